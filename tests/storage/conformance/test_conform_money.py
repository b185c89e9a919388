"""What every store does with prices, spending, budgets and reservations."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_args

import anyio
import pytest

from tests.storage.conformance.conftest import Factory
from tests.storage.world import (
    ANSWER,
    Hand,
    Input,
    S,
    begin,
    finish,
    fresh,
    lease,
    new_batch,
    settlement,
    upload,
)
from tidemill import prices
from tidemill.errors import BudgetExceeded, QuotaExceeded
from tidemill.ports import Store
from tidemill.types import (
    Account,
    FileFacts,
    Grouping,
    KeyRecord,
    Limits,
    LineState,
    Purse,
    UsageQuery,
    UsageRow,
)

pytestmark = pytest.mark.anyio

# A line of the world uses 7 input tokens, 2 of them cached, and 5 output tokens.
PRICES = prices.parse(
    {"version": "v1", "models": {"local/m": {"input": 10, "cached_input": 5, "output": 20}}}
)
LINE = PRICES.cost(ANSWER.usage, "m")
REQUEST = UsageRow(
    owner="team_1",
    key_id="key_2",
    model="m",
    execution="local",
    tier="standard",
    usage=ANSWER.usage,
    batch_id=None,
    custom_id=None,
    at=1_800_000_000,
)
"""An interactive request that costs as much as a line."""


@pytest.fixture
async def store(
    factory: Factory, tmp_path: Path, clock: Hand, anyio_backend: str
) -> AsyncIterator[Store]:
    """A store where the world's model costs something, with a team and two of its keys."""
    store = factory(tmp_path / "store", clock, PRICES)
    await store.start()
    await store.accounts.add(Account(kind="team", id="team_1", name="research"))
    await store.accounts.add(Account(kind="user", id="user_1", name="ada"))
    for id, user in (("key_1", "user_1"), ("key_2", None)):
        await store.keys.add(
            KeyRecord(
                id=id,
                name=id,
                owner="team_1",
                prefix="tm-",
                digest=id,
                created_at=1,
                team_id="team_1",
                user_id=user,
            )
        )
    yield store
    await store.close()


async def _purse(store: Store, kind: str, key_id: str = "key_1") -> Purse:
    return next(purse for purse in await store.budgets.purses(key_id) if purse.kind == kind)


async def test_a_settled_line_is_booked_at_its_price(store: Store) -> None:
    """Row, month and batch agree, and the row keeps the price that it was booked at."""
    assert LINE == 160
    batch = await finish(store, await begin(store, Input(3)))
    rows = await store.ledger.usage("ada", 0, 2**40)
    assert [row.cost for row in rows] == [LINE] * 3
    assert {row.price for row in rows} == {PRICES.version}
    assert {(row.key_id, row.team_id, row.user_id) for row in rows} == {
        ("key_1", "team_1", "user_1")
    }
    assert batch.cost == 3 * LINE
    for kind in ("key", "team", "user"):
        assert (await _purse(store, kind)).spent == 3 * LINE


async def test_a_new_price_changes_no_old_row(
    store: Store, factory: Factory, tmp_path: Path, clock: Hand
) -> None:
    """Lines that are settled after it, of the same batch too, are booked at the new one."""
    batch = await begin(store, Input(2))
    [one] = await lease(store, batch, 1)
    await store.lines.settle([settlement(one)])
    [old] = await store.ledger.usage("ada", 0, 2**40)
    await store.close()
    dearer = prices.parse({"version": "v2", "models": {"local/m": {"input": 100, "output": 200}}})
    again = factory(tmp_path / "store", clock, dearer)
    await again.start()
    ended = await finish(again, batch)
    first, second = await again.ledger.usage("ada", 0, 2**40)
    assert first == old
    assert (first.cost, second.cost) == (LINE, dearer.cost(ANSWER.usage, "m"))
    assert (first.price, second.price) == (PRICES.version, dearer.version)
    assert ended.cost == first.cost + second.cost == (await _purse(again, "team")).spent
    await again.close()


async def test_a_late_or_double_settlement_is_not_charged(store: Store) -> None:
    """A line is paid for once, however often it is reported."""
    batch = await begin(store, Input(1))
    [one] = await lease(store, batch)
    await store.lines.settle([settlement(one), settlement(one)])
    await store.lines.settle([settlement(one)])
    assert (await fresh(store, batch)).cost == LINE
    assert (await _purse(store, "key")).spent == LINE


async def test_a_key_outside_every_team_spends_alone(store: Store) -> None:
    """Two keys that have no team do not share a purse for it."""
    for id in ("key_8", "key_9"):
        await store.keys.add(
            KeyRecord(id=id, name=id, owner=id, prefix="tm-", digest=id, created_at=1)
        )
    await finish(store, await begin(store, Input(1), key_id="key_8"))
    assert [(p.id, p.spent) for p in await store.budgets.purses("key_8")] == [("key_8", LINE)]
    assert [(p.id, p.spent) for p in await store.budgets.purses("key_9")] == [("key_9", 0)]
    assert await store.budgets.purses(None) == []
    assert await store.budgets.purses("key_of_the_settings") == []


async def test_interactive_requests_fill_the_same_purse(store: Store) -> None:
    """A booked request counts in its own month, and rows are added up per group."""
    await store.ledger.book([REQUEST, REQUEST])
    assert (await _purse(store, "team")).spent == 2 * LINE
    assert (await _purse(store, "key", "key_1")).spent == 0
    await finish(store, await begin(store, Input(1)))
    query = UsageQuery(until_at=2**40, by=("key", "day"))
    found = [(one.group, one.rows, one.cost) for one in await store.ledger.report(query)]
    assert found == [
        ({"key": "key_1", "day": "2027-01-15"}, 1, LINE),
        ({"key": "key_2", "day": "2027-01-15"}, 2, 2 * LINE),
    ]
    [total] = await store.ledger.report(UsageQuery(until_at=2**40, owner="team_1"))
    assert (total.group, total.rows, total.usage.output) == ({}, 2, 2 * ANSWER.usage.output)


async def test_usage_is_added_up_by_whatever_is_asked_for(store: Store) -> None:
    """Whose tokens and how they were run are two things; a day ends at midnight UTC; the sums of
    the groups are the sum of all."""
    midnight = 1_800_057_600

    def row(at: int, execution: str, tier: str) -> UsageRow:
        return UsageRow(
            owner="team_1",
            key_id="key_1",
            model="m",
            execution=execution,
            tier=tier,
            usage=ANSWER.usage,
            batch_id=None,
            custom_id=None,
            at=at,
        )

    rows = [
        row(midnight - 1, "local", "standard"),
        row(midnight, "up", "standard"),
        row(midnight, "up", "batch"),
        row(midnight + 86_399, "up", "batch"),
    ]
    await store.ledger.book(rows)

    async def counted(*by: Grouping) -> list[tuple[dict[str, str | None], int]]:
        sums = await store.ledger.report(UsageQuery(until_at=2**40, by=by))
        assert sum(one.usage.output for one in sums) == 4 * ANSWER.usage.output
        return [(one.group, one.rows) for one in sums]

    assert await counted("provider", "execution") == [
        ({"provider": None, "execution": "local"}, 1),
        ({"provider": "up", "execution": "local"}, 1),
        ({"provider": "up", "execution": "provider"}, 2),
    ]
    assert await counted("day") == [({"day": "2027-01-15"}, 1), ({"day": "2027-01-16"}, 3)]
    for grouping in get_args(Grouping):
        assert sum(n for _, n in await counted(grouping)) == 4
    assert await counted("team", "user", "key") == [
        ({"team": "team_1", "user": "user_1", "key": "key_1"}, 4)
    ]


async def test_a_budget_begins_anew_each_month(store: Store, clock: Hand) -> None:
    """What was spent in one month does not count in the next."""
    await store.keys.change("key_1", limits=Limits(monthly_budget=LINE))
    await finish(store, await begin(store, Input(1)))
    with pytest.raises(BudgetExceeded, match="monthly budget of this key"):
        await begin(store, Input(1))
    clock.now += 31 * 86_400
    await begin(store, Input(1))


async def test_a_team_over_its_budget_stops_all_its_keys(store: Store) -> None:
    """Nothing of a refused batch is left behind."""
    await store.accounts.change("team_1", limits=Limits(monthly_budget=LINE))
    await finish(store, await begin(store, Input(1)))
    with pytest.raises(BudgetExceeded, match="monthly budget of this team") as caught:
        await begin(store, Input(1), key_id="key_2")
    assert caught.value.status == 402
    assert caught.value.should_retry is False
    assert await store.batches.active() == []


async def test_a_reservation_counts_until_its_batch_ends(store: Store) -> None:
    """An estimate is used up by what is booked, and what is left of it returns at the end."""
    await store.accounts.change("team_1", limits=Limits(monthly_budget=1000))
    batch = await begin(store, Input(2), hold=900)
    assert (await _purse(store, "team")).committed == 900
    with pytest.raises(BudgetExceeded, match=r"0\.000101 is more than what is left"):
        await begin(store, Input(1), hold=101, key_id="key_2")
    [one] = await lease(store, batch, 1)
    await store.lines.settle([settlement(one)])
    purse = await _purse(store, "team")
    assert (purse.spent, purse.committed) == (LINE, 900 - LINE)
    ended = await finish(store, batch)
    assert ended.held == 0
    purse = await _purse(store, "team")
    assert (purse.spent, purse.committed) == (2 * LINE, 0)


@pytest.mark.parametrize("end", [S.CANCELLED, S.EXPIRED, S.FAILED])
async def test_a_reservation_returns_at_every_end(store: Store, end: S) -> None:
    """Cancelled, expired or failed: nothing stays reserved."""
    batch = await begin(store, Input(2), hold=500)
    [one] = await lease(store, batch, 1)
    assert await store.budgets.hold(one, 200) == "held"
    if end is S.FAILED:
        moved = await store.batches.move(batch.seq, frozenset({S.IN_PROGRESS}), S.FAILED)
    else:
        closing = {S.CANCELLED: S.CANCELLING, S.EXPIRED: S.EXPIRING}[end]
        state = {S.CANCELLED: LineState.CANCELLED, S.EXPIRED: LineState.EXPIRED}[end]
        await store.batches.move(batch.seq, frozenset({S.IN_PROGRESS}), closing)
        await store.lines.settle([settlement(one)])
        await store.lines.close(batch.seq, state, "code", "message")
        moved = await store.batches.move(batch.seq, frozenset({closing}), end)
    assert moved is not None
    assert moved.held == 0
    assert (await _purse(store, "team")).committed == 0


async def test_a_line_that_would_cross_does_not_start(store: Store) -> None:
    """While others may still turn out cheaper it waits; when nothing can help it is over."""
    await store.keys.change("key_1", limits=Limits(monthly_budget=500))
    batch = await begin(store, Input(4))
    one, two, three, four = await lease(store, batch)
    assert await store.budgets.hold(one, 300) == "held"
    assert await store.budgets.hold(two, 200) == "held"
    assert await store.budgets.hold(three, 300) == "wait"
    assert await store.budgets.hold(four, 501) == "over"
    await store.lines.settle([settlement(one), settlement(two)])
    assert await store.budgets.hold(four, 500 - 2 * LINE + 1) == "over"
    assert await store.budgets.hold(three, 500 - 2 * LINE) == "held"
    assert (await _purse(store, "key")).committed == 500 - 2 * LINE


async def test_the_cap_of_a_batch_is_its_own(store: Store) -> None:
    """``max_cost`` stops one batch, whatever its key may still spend."""
    batch = await begin(store, Input(2), max_cost=LINE + 10)
    other = await begin(store, Input(1))
    one, two = await lease(store, batch)
    [free] = await lease(store, other)
    assert await store.budgets.hold(one, LINE + 10) == "held"
    await store.lines.settle([settlement(one)])
    assert await store.budgets.hold(two, 11) == "over"
    assert await store.budgets.hold(free, 10**6) == "held"


async def test_a_reserved_batch_runs_within_its_reservation(store: Store) -> None:
    """Its lines in flight are part of what it reserved and do not count a second time."""
    await store.keys.change("key_1", limits=Limits(monthly_budget=1000))
    batch = await begin(store, Input(2), hold=1000)
    one, two = await lease(store, batch)
    assert await store.budgets.hold(one, 600) == "held"
    assert await store.budgets.hold(two, 400) == "held"
    assert (await _purse(store, "key")).committed == 1000


async def test_whatever_ends_a_lease_lets_go_what_it_held(
    store: Store, factory: Factory, tmp_path: Path, clock: Hand
) -> None:
    """Released, lapsed, or its server died: the amount is free again."""
    batch = await begin(store, Input(1))
    for give_back in ("release", "lapse", "restart"):
        [one] = await lease(store, batch)
        assert await store.budgets.hold(one, 700) == "held"
        assert (await _purse(store, "team")).committed == 700
        if give_back == "release":
            await store.lines.release([one], spend=False)
        elif give_back == "lapse":
            await store.lines.reclaim(2**33)
        else:
            await store.close()
            again = factory(tmp_path / "store", clock, PRICES)
            await again.start()
            assert (await _purse(again, "team")).committed == 0
            await again.close()
            return
        assert (await _purse(store, "team")).committed == 0


async def test_a_lease_that_is_over_holds_nothing(store: Store) -> None:
    """Who asks too late reserves nothing in the name of the next run."""
    batch = await begin(store, Input(1))
    [old] = await lease(store, batch)
    await store.lines.release([old])
    [new] = await lease(store, batch)
    await store.budgets.hold(old, 700)
    assert (await _purse(store, "team")).committed == 0
    assert await store.budgets.hold(new, 5) == "held"


async def test_who_waits_for_its_turn_is_woken(store: Store) -> None:
    """The end of a line in flight wakes the lines that wait for money."""
    batch = await begin(store, Input(1))
    [one] = await lease(store, batch)
    since = store.budgets.turn
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(store.budgets.freed, since)
            await store.lines.settle([settlement(one)])
        await store.budgets.freed(since)


async def test_requests_at_once_pass_a_budget_by_one_at_most(store: Store) -> None:
    """What each may cost is in flight from its start, so the next ones wait; the true cost, or
    nothing, takes its place; only what is booked ends a budget."""
    await store.accounts.change("team_1", limits=Limits(monthly_budget=2 * LINE + 1))
    turn = store.budgets.turn
    first = await store.budgets.begin("key_1", 2 * LINE)
    second = await store.budgets.begin("key_2", 2 * LINE)
    assert first is not None
    assert second is not None
    assert await store.budgets.begin("key_1", 1) is None
    assert (await _purse(store, "team")).committed == 4 * LINE
    await store.budgets.release(first)
    await store.budgets.freed(turn)
    for reservation in (second, await store.budgets.begin("key_1", 2 * LINE)):
        assert reservation is not None
        turn = store.budgets.turn
        await store.ledger.book([REQUEST], reservation=reservation)
        await store.budgets.freed(turn)
    purse = await _purse(store, "team")
    assert (purse.spent, purse.committed) == (2 * LINE, 0)
    last = await store.budgets.begin("key_2", LINE)
    await store.ledger.book([REQUEST], reservation=last)
    with pytest.raises(BudgetExceeded, match="monthly budget of this team is used up"):
        await store.budgets.begin("key_1", 1)


async def test_lines_and_requests_leave_room_for_each_other(store: Store) -> None:
    """Each counts what the other has in flight."""
    await store.keys.change("key_1", limits=Limits(monthly_budget=500))
    [one] = await lease(store, await begin(store, Input(1)))
    request = await store.budgets.begin("key_1", 300)
    assert request is not None
    assert await store.budgets.hold(one, 201) == "wait"
    await store.budgets.release(request)
    assert await store.budgets.hold(one, 500) == "held"
    assert await store.budgets.begin("key_1", 1) is None


async def test_what_dead_requests_reserved_is_free_again(
    store: Store, factory: Factory, tmp_path: Path, clock: Hand
) -> None:
    """Nobody is left who could give it back."""
    assert await store.budgets.begin("key_1", 300) is not None
    await store.close()
    again = factory(tmp_path / "store", clock, PRICES)
    await again.start()
    assert (await _purse(again, "team")).committed == 0
    await again.close()


async def test_enqueued_lines_and_tokens_are_limited(store: Store) -> None:
    """Over all active batches of a key; what has ended makes room."""
    await store.keys.change("key_1", limits=Limits(enqueued_lines=3))
    first = await begin(store, Input(2))
    with pytest.raises(QuotaExceeded, match="2 are enqueued and the batch has 2") as caught:
        await begin(store, Input(2))
    assert (caught.value.status, caught.value.code) == (400, "line_limit_exceeded")
    await begin(store, Input(1))
    await finish(store, first)
    await store.keys.change("key_1", limits=Limits(enqueued_tokens=100))
    file = await upload(store, [b"x" * 500], facts=FileFacts(lines=1))
    with pytest.raises(QuotaExceeded) as caught:
        await store.batches.open(new_batch(file))
    assert caught.value.code == "token_limit_exceeded"


async def test_the_bytes_that_an_owner_keeps(store: Store) -> None:
    """Input files that are there; results and deleted files do not count."""
    source = Input(2)
    batch = await finish(store, await begin(store, source))
    assert await store.budgets.stored("ada") == len(source.bytes)
    assert await store.files.delete(batch.input_file_id, "ada")
    assert await store.budgets.stored("ada") == 0
