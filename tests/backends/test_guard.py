"""Before a line runs: may its key still, and is there money."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import anyio
import msgspec
import pytest

from tests.storage.world import Hand, S, lease, new_batch, settlement, upload
from tidemill import prices
from tidemill.backends import guard
from tidemill.backends.guard import GuardedExecutor
from tidemill.ports import Store
from tidemill.storage import open_store
from tidemill.types import (
    Account,
    Answer,
    BatchRecord,
    FileFacts,
    KeyRecord,
    Lease,
    Limits,
    NewLine,
    Outcome,
    Refusal,
    Usage,
    Waiting,
)

pytestmark = pytest.mark.anyio

PRICES = prices.parse({"models": {"local/priced": {"input": 0, "output": 1}}})
"""One micro-unit per output token."""


class Inner:
    """Answers each line with ``output`` tokens, once it is let."""

    capacities: Mapping[str, int] = {"local": 7}

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.output = 100
        self.open = anyio.Event()
        self.open.set()

    def place(self, model: str, endpoint: str) -> str:
        return f"local/{model}"

    def waits(self, lines: Mapping[str, Waiting]) -> None:
        self.told = lines

    async def execute(self, lease: Lease) -> Outcome:
        self.ran.append(lease.custom_id)
        await self.open.wait()
        return Answer(body=b"{}", usage=Usage(output=self.output), model="priced")


@pytest.fixture
async def store(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Store]:
    store = open_store(tmp_path / "store", clock=Hand(), tidy=False, prices=PRICES)
    await store.start()
    await store.accounts.add(Account(kind="team", id="team_1", name="t"))
    await store.keys.add(
        KeyRecord(
            id="key_1", name="k", owner="o", prefix="", digest="d", created_at=1, team_id="team_1"
        )
    )
    yield store
    await store.close()


@pytest.fixture
def inner() -> Inner:
    return Inner()


@pytest.fixture
def guarded(store: Store, inner: Inner, monkeypatch: pytest.MonkeyPatch) -> GuardedExecutor:
    """Knows of a key what the store knows at that moment."""
    monkeypatch.setattr(guard, "GRANT_TTL_S", -1.0)
    return GuardedExecutor(
        inner, store.accounts, store.budgets, prices=PRICES, where=lambda model: "local"
    )


async def _batch(store: Store, n: int, model: str = "priced", **changes: object) -> BatchRecord:
    """A batch in progress of ``n`` lines that ask for at most 100 tokens each."""
    pieces, lines, offset = [], [], 0
    for i in range(1, n + 1):
        body = {"model": model, "max_tokens": 100}
        text = json.dumps({"custom_id": f"c{i}", "body": body}).encode()
        lines.append(NewLine(no=i, offset=offset, length=len(text), custom_id=f"c{i}", model=model))
        pieces.append(text + b"\n")
        offset += len(text) + 1
    file = await upload(store, pieces, owner="o", facts=FileFacts(lines=n))
    batch = await store.batches.open(new_batch(file, **changes))
    await store.lines.add(batch.seq, lines)
    await store.batches.model(batch.seq, model, n)
    moved = await store.batches.move(batch.seq, frozenset({S.VALIDATING}), S.IN_PROGRESS)
    assert moved is not None
    return moved


def _code(outcome: Outcome) -> str | None:
    if isinstance(outcome, Answer):
        return None
    assert isinstance(outcome, Refusal)
    assert outcome.status_code is None, "a line that never ran has no status"
    assert not outcome.retry
    return outcome.code


async def _settle(store: Store, lease: Lease, outcome: Outcome) -> None:
    ended = msgspec.structs.replace(settlement(lease, outcome), model="priced")
    await store.lines.settle([ended])


async def _run(store: Store, guarded: GuardedExecutor, batch: BatchRecord) -> list[str | None]:
    """Lines one after the other, each settled before the next."""
    codes = []
    while found := await lease(store, batch, 1):
        outcome = await guarded.execute(found[0])
        codes.append(_code(outcome))
        await _settle(store, found[0], outcome)
    return codes


async def test_a_line_runs_when_nothing_speaks_against_it(
    store: Store, guarded: GuardedExecutor, inner: Inner
) -> None:
    """Priced or not, with a key of the store or one of the settings."""
    assert await _run(store, guarded, await _batch(store, 1)) == [None]
    assert await _run(store, guarded, await _batch(store, 1, model="free")) == [None]
    assert await _run(store, guarded, await _batch(store, 1, key_id=None)) == [None]
    assert await _run(store, guarded, await _batch(store, 1, key_id="env")) == [None]
    assert guarded.capacities == inner.capacities
    assert guarded.place("m", "/v1/embeddings") == "local/m"
    told = {"local/m": Waiting(deadline=1.0)}
    guarded.waits(told)
    assert inner.told == told


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda store: store.keys.revoke("key_1"), "key_revoked"),
        (lambda store: store.keys.change("key_1", expires_at=5), "key_expired"),
        (lambda store: store.accounts.close("team_1"), "team_closed"),
        (
            lambda store: store.keys.change("key_1", limits=Limits(models=("other",))),
            "model_not_permitted",
        ),
        (
            lambda store: store.accounts.change(
                "team_1", limits=Limits(providers={"elsewhere": ("*",)})
            ),
            "model_not_permitted",
        ),
    ],
    ids=["revoked", "expired", "closed", "narrowed", "provider"],
)
async def test_a_key_that_lost_its_right_stops_the_rest(
    store: Store, guarded: GuardedExecutor, inner: Inner, change: object, code: str
) -> None:
    """What ran stays; each remaining line says why it did not."""
    batch = await _batch(store, 3)
    [first] = await lease(store, batch, 1)
    outcome = await guarded.execute(first)
    await _settle(store, first, outcome)
    await change(store)  # type: ignore[operator]
    assert await _run(store, guarded, batch) == [code, code]
    assert inner.ran == ["c1"]
    ended = await store.batches.get(batch.id, None)
    assert ended is not None
    assert (ended.completed, ended.failed, ended.total) == (1, 2, 3)


async def test_lines_stop_before_the_one_that_would_cross(
    store: Store, guarded: GuardedExecutor, inner: Inner
) -> None:
    """A cap of 250 pays for two lines of 100; the rest never run, and cost nothing."""
    capped = await _batch(store, 4, max_cost=250)
    assert await _run(store, guarded, capped) == [None, None, "budget_exceeded", "budget_exceeded"]
    free = await _batch(store, 2)
    assert await _run(store, guarded, free) == [None, None]
    assert inner.ran == ["c1", "c2", "c1", "c2"]


async def test_a_line_that_waits_does_not_start_in_a_closing_batch(
    store: Store, guarded: GuardedExecutor, inner: Inner
) -> None:
    """It is given back, and whoever closes the batch says why it did not run."""
    batch = await _batch(store, 2, max_cost=150)
    first, second = await lease(store, batch)
    inner.open = anyio.Event()
    outcomes: dict[str, Outcome] = {}

    async def run(one: Lease) -> None:
        outcomes[one.custom_id] = await guarded.execute(one)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, first)
            while not inner.ran:
                await anyio.lowlevel.checkpoint()
            tasks.start_soon(run, second)
            await store.batches.move(batch.seq, frozenset({S.IN_PROGRESS}), S.CANCELLING)
            inner.output = 10
            inner.open.set()
            while "c1" not in outcomes:
                await anyio.lowlevel.checkpoint()
            await _settle(store, first, outcomes["c1"])
    given_back = outcomes["c2"]
    assert isinstance(given_back, Refusal)
    assert (given_back.retry, given_back.spend) == (True, False)
    assert inner.ran == ["c1"]


async def test_a_line_that_waited_for_money_is_asked_about_its_key_again(
    store: Store, guarded: GuardedExecutor, inner: Inner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was revoked meanwhile; that there is money now does not matter."""
    await store.keys.change("key_1", limits=Limits(monthly_budget=150))
    batch = await _batch(store, 2)
    inner.output = 0
    inner.open = anyio.Event()
    codes: dict[str, str | None] = {}
    waits, freed = anyio.Event(), store.budgets.freed

    async def waiting(since: int) -> None:
        waits.set()
        await freed(since)

    monkeypatch.setattr(store.budgets, "freed", waiting)

    async def run(one: Lease) -> None:
        outcome = await guarded.execute(one)
        codes[one.custom_id] = _code(outcome)
        await _settle(store, one, outcome)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            first, second = await lease(store, batch)
            tasks.start_soon(run, first)
            while not inner.ran:
                await anyio.lowlevel.checkpoint()
            tasks.start_soon(run, second)
            await waits.wait()
            await store.keys.revoke("key_1")
            inner.open.set()
    assert codes == {"c1": None, "c2": "key_revoked"}
    assert inner.ran == ["c1"]


async def test_a_budget_is_used_to_its_last_unit(
    store: Store, guarded: GuardedExecutor, inner: Inner
) -> None:
    """Lines that wait for others' estimates run once those have cost less."""
    await store.keys.change("key_1", limits=Limits(monthly_budget=250))
    batch = await _batch(store, 3)
    inner.output = 0
    inner.open = anyio.Event()
    outcomes: dict[str, Outcome] = {}

    async def run(one: Lease) -> None:
        outcomes[one.custom_id] = await guarded.execute(one)
        await _settle(store, one, outcomes[one.custom_id])

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for one in await lease(store, batch):
                tasks.start_soon(run, one)
            while len(inner.ran) < 2:
                await anyio.lowlevel.checkpoint()
            purse = (await store.budgets.purses("key_1"))[0]
            assert purse.committed == 200
            inner.open.set()
    assert [_code(outcome) for outcome in outcomes.values()] == [None] * 3
    assert (await store.budgets.purses("key_1"))[0].committed == 0
