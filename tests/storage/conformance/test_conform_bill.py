"""The bill under random schedules: create, run, cancel, expire, crash, retry and settle, over
several owners, in any order."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.storage.conformance.conftest import Factory
from tests.storage.world import Hand, Input, S, begin, fresh, lease, settlement
from tidemill import prices
from tidemill.errors import BudgetExceeded
from tidemill.ports import Store
from tidemill.types import (
    TERMINAL,
    Account,
    Answer,
    BatchRecord,
    KeyRecord,
    Lease,
    Limits,
    LineState,
    Refusal,
    Usage,
    UsageRow,
)

# One micro-unit a token: costs are token counts.
PRICES = prices.parse({"models": {"local/m": {"input": 1, "output": 1}}})
MOST = 100
"""What each line holds; a line that is longer than it looked uses up to twice as much."""
BUDGETS = {"key_a": 250, "key_b": 400, "key_c": None}
TEAM_BUDGET = 500
OVER = Refusal(code="budget_exceeded", message="no")
FAILED = Refusal(code="bad", message="no", status_code=400)

CLOSINGS = {
    S.CANCELLING: (LineState.CANCELLED, S.CANCELLED),
    S.EXPIRING: (LineState.EXPIRED, S.EXPIRED),
}

opened = st.tuples(
    st.just("open"),
    st.sampled_from(sorted(BUDGETS)),
    st.integers(1, 4),
    st.sampled_from([0, 0, 150, 200]),
    st.sampled_from([None, None, 120, 220]),
)
leased = st.tuples(st.just("lease"), st.integers(0, 3), st.integers(1, 4))
used = st.one_of(st.integers(1, MOST), st.integers(1, MOST), st.integers(MOST + 1, 2 * MOST))
answered = st.tuples(st.just("answer"), st.integers(0, 5), used, st.booleans())
relet = st.tuples(st.just("relet"), st.integers(0, 5), st.integers(1, MOST))
others = (
    st.tuples(st.just("fail"), st.integers(0, 5)),
    st.tuples(st.just("retry"), st.integers(0, 5)),
    st.tuples(st.just("late"), st.integers(0, 9), st.integers(1, MOST)),
    st.tuples(st.just("close"), st.integers(0, 3), st.sampled_from(sorted(CLOSINGS))),
    st.tuples(st.just("finish"), st.integers(0, 3)),
    st.tuples(st.just("ask"), st.sampled_from(sorted(BUDGETS))),
    st.tuples(st.just("told"), st.integers(0, 3), st.integers(0, MOST)),
    st.just(("crash",)),
)
# Two batches that run and are answered, then anything: most of what can go wrong needs those.
steps = st.builds(
    lambda first, run, rest: [*first, *run, *rest],
    st.lists(opened, min_size=2, max_size=3),
    st.lists(st.one_of(leased, leased, relet, answered), min_size=4, max_size=8),
    st.lists(st.one_of(leased, answered, leased, relet, answered, opened, *others), max_size=12),
)


def _scopes(one: Lease) -> tuple[str, ...]:
    """Whose limits a line counts against."""
    team = () if one.key_id == "key_c" else ("team_1",)
    return (one.batch_id, one.key_id or "", *team)


@dataclass
class Bill:
    """A store, what was done to it, and what must be true of it."""

    store: Store
    open_store: Callable[[], Store]
    batches: list[BatchRecord] = field(default_factory=list)
    flight: list[Lease] = field(default_factory=list)
    old: list[Lease] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    """Expected per batch id, and per key for requests outside a batch."""
    reserved: dict[str, int] = field(default_factory=dict)
    """What each batch asked to reserve."""
    requests: list[tuple[str, int]] = field(default_factory=list)
    """Interactive requests in flight: key and reservation, of ``MOST`` each."""
    lenient: int = 0
    """What the last request that was let in may have passed a budget by."""
    slots: Counter[str] = field(default_factory=Counter)
    """Per batch, key and team: lines in flight when the last one started."""
    excess: Counter[str] = field(default_factory=Counter)
    """Per batch, key and team: what lines have used beyond what they held, since then."""

    async def step(self, name: str, *arguments: Any) -> None:
        await getattr(self, name)(*arguments)

    async def open(self, key: str, n: int, hold: int, max_cost: int | None) -> None:
        try:
            made = await begin(
                self.store, Input(n), key_id=key, hold=hold, max_cost=max_cost, owner=key
            )
        except BudgetExceeded:
            return
        self.batches.append(made)
        self.reserved[made.id] = hold

    async def lease(self, which: int, n: int) -> None:
        if not self.batches:
            return
        for one in await lease(self.store, self.batches[which % len(self.batches)], n):
            turn = await self.store.budgets.hold(one, MOST)
            if turn == "held":
                self.flight.append(one)
                for scope in _scopes(one):
                    self.slots[scope] = sum(scope in _scopes(other) for other in self.flight)
                    self.excess[scope] = 0
            elif turn == "wait":
                await self.store.lines.release([one], spend=False)
            else:
                await self.store.lines.settle([settlement(one, OVER)])
            if turn != "held":
                self.old.append(one)

    async def answer(self, which: int, tokens: int, twice: bool) -> None:
        if not self.flight:
            return
        one = self.flight.pop(which % len(self.flight))
        self.old.append(one)
        ended = settlement(one, Answer(body=b"{}", usage=Usage(output=tokens)))
        await self.store.lines.settle([ended, ended] if twice else [ended])
        self.tokens[one.batch_id] += tokens
        for scope in _scopes(one):
            self.excess[scope] += max(tokens - MOST, 0)

    async def fail(self, which: int) -> None:
        if self.flight:
            one = self.flight.pop(which % len(self.flight))
            self.old.append(one)
            await self.store.lines.settle([settlement(one, FAILED)])

    async def retry(self, which: int) -> None:
        if self.flight:
            one = self.flight.pop(which % len(self.flight))
            self.old.append(one)
            await self.store.lines.release([one])

    async def late(self, which: int, tokens: int) -> None:
        """A settlement, or a hold, of a lease that is over changes nothing."""
        if self.old:
            # First those whose line runs again: only there could an old token do harm.
            again = {(one.batch_seq, one.no) for one in self.flight}
            old = [one for one in self.old if (one.batch_seq, one.no) in again] or self.old
            one = old[which % len(old)]
            ended = settlement(one, Answer(body=b"{}", usage=Usage(output=tokens)))
            await self.store.lines.settle([ended])
            await self.store.budgets.hold(one, tokens)

    async def relet(self, which: int, tokens: int) -> None:
        """A line comes back and runs again, and whoever had it before speaks up."""
        if self.flight:
            await self.retry(which)
            given_back = self.old[-1].batch_seq
            which = next(n for n, one in enumerate(self.batches) if one.seq == given_back)
            await self.lease(which, 4)
            await self.late(0, tokens)

    async def close(self, which: int, closing: S) -> None:
        if self.batches:
            batch = self.batches[which % len(self.batches)]
            await self.store.batches.move(batch.seq, frozenset({S.IN_PROGRESS}), closing)

    async def finish(self, which: int) -> None:
        """As far as the batch can go now."""
        if not self.batches:
            return
        batch = await fresh(self.store, self.batches[which % len(self.batches)])
        if batch.status in CLOSINGS:
            to, end = CLOSINGS[batch.status]
            await self.store.lines.close(batch.seq, to, "closed", "closed")
            if not await self.store.lines.running(batch.seq):
                await self.store.batches.move(batch.seq, frozenset({batch.status}), end)
        elif batch.status is S.FINALIZING:
            await self.store.batches.move(batch.seq, frozenset({S.FINALIZING}), S.COMPLETED)

    async def ask(self, key: str) -> None:
        """An interactive request comes in."""
        try:
            reservation = await self.store.budgets.begin(key, MOST)
        except BudgetExceeded:
            return
        if reservation is not None:
            self.requests.append((key, reservation))
            self.lenient = MOST - 1

    async def told(self, which: int, tokens: int) -> None:
        """It is answered, or fails and costs nothing."""
        if not self.requests:
            return
        key, reservation = self.requests.pop(which % len(self.requests))
        if not tokens:
            await self.store.budgets.release(reservation)
            return
        row = UsageRow(
            owner=key,
            key_id=key,
            model="m",
            execution="local",
            tier="standard",
            usage=Usage(input=tokens),
            batch_id=None,
            custom_id=None,
            at=1_800_000_000,
        )
        await self.store.ledger.book([row], reservation=reservation)
        self.tokens[key] += tokens

    async def crash(self) -> None:
        """Whatever ran is queued again, and its old leases are worth nothing."""
        await self.store.close()
        self.store = self.open_store()
        await self.store.start()
        self.old += self.flight
        self.flight.clear()
        self.requests.clear()

    async def end(self) -> None:
        """Cancel all that is left."""
        while self.flight:
            await self.retry(0)
        while self.requests:
            await self.told(0, 1)
        for n in range(len(self.batches)):
            await self.close(n, S.CANCELLING)
            await self.finish(n)

    async def check(self) -> None:
        """The sums agree, nothing is booked twice, and no budget is crossed."""
        rows = await self.store.ledger.usage(None, 0, 2**40)
        lines = [(row.batch_id, row.custom_id) for row in rows if row.batch_id is not None]
        assert len(lines) == len(set(lines))
        booked: Counter[str] = Counter()
        spent: Counter[str] = Counter()
        for row in rows:
            assert row.cost == row.usage.input + row.usage.output
            booked[row.batch_id or row.owner] += row.cost
            spent[row.key_id or ""] += row.cost
            if row.team_id is not None:
                spent[row.team_id] += row.cost
        assert +booked == +self.tokens
        held: Counter[str] = Counter()
        for known in self.batches:
            batch = await fresh(self.store, known)
            assert batch.cost == booked[batch.id] == batch.usage.output
            if batch.max_cost is not None:
                assert batch.cost <= batch.max_cost + self.excess[batch.id]
            if batch.status not in TERMINAL:
                assert batch.held == max(self.reserved[batch.id] - batch.cost, 0)
            else:
                assert batch.held == 0
                assert batch.completed + batch.failed == batch.total
            in_flight = MOST * sum(one.batch_id == batch.id for one in self.flight)
            held[batch.key_id or ""] += max(batch.held, in_flight)
        for key, _ in self.requests:
            held[key] += MOST
        for scope, excess in self.excess.items():
            assert excess <= MOST * self.slots[scope]
        for key, budget in BUDGETS.items():
            for purse in await self.store.budgets.purses(key):
                assert purse.spent == spent[purse.id], purse
                limit = purse.limits.monthly_budget
                if limit is not None:
                    over = self.lenient + self.excess[purse.id]
                    assert purse.spent + purse.committed <= limit + over, purse
                if purse.kind == "key":
                    assert purse.committed == held[key]
                    assert purse.limits.monthly_budget == budget


async def _run(open_store: Callable[[], Store], schedule: list[tuple[Any, ...]]) -> None:
    store = open_store()
    await store.start()
    bill = Bill(store, open_store)
    try:
        limits = Limits(monthly_budget=TEAM_BUDGET)
        await store.accounts.add(Account(kind="team", id="team_1", name="t", limits=limits))
        for id, budget in BUDGETS.items():
            await store.keys.add(
                KeyRecord(
                    id=id,
                    name=id,
                    owner=id,
                    prefix="",
                    digest=id,
                    created_at=1,
                    team_id=None if id == "key_c" else "team_1",
                    limits=Limits(monthly_budget=budget),
                )
            )
        for step in schedule:
            await bill.step(*step)
            await bill.check()
        await bill.end()
        await bill.check()
        for key in BUDGETS:
            assert all(p.committed == 0 for p in await bill.store.budgets.purses(key))
    finally:
        await bill.store.close()


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(schedule=steps)
def test_the_bill_is_right_whatever_happens(
    factory: Factory, schedule: list[tuple[Any, ...]]
) -> None:
    """After every step: usage rows equal what lines and requests report, no line is booked twice;
    caps and budgets are passed by no more than what each line in flight used beyond what it held,
    and budgets by one request; at the end nothing is reserved."""
    with tempfile.TemporaryDirectory(prefix="tidemill-bill-") as folder:
        anyio.run(_run, partial(factory, Path(folder) / "store", Hand(), PRICES), schedule)
