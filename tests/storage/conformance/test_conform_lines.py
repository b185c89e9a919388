"""What every store does with lines, their leases and their results."""

from __future__ import annotations

import asyncio
import json
import random

import msgspec
import pytest

from tests.storage.world import (
    ANSWER,
    OWNER,
    REFUSAL,
    Hand,
    Input,
    S,
    begin,
    finish,
    fresh,
    lease,
    new_batch,
    results,
    settlement,
    upload,
)
from tidemill.errors import Conflict, InvariantBroken
from tidemill.ports import Store
from tidemill.types import BatchRecord, LineState, NewLine, Refusal, Usage

pytestmark = pytest.mark.anyio


async def _cancel(store: Store, batch: BatchRecord) -> None:
    assert await store.batches.move(batch.seq, frozenset({S.IN_PROGRESS}), S.CANCELLING)


async def test_lines_are_leased_in_order_with_their_bytes(store: Store) -> None:
    """Each lease has the exact line, a new token, attempt 1, and what its batch says."""
    source = Input(300)
    batch = await begin(store, source)
    first, second = await lease(store, batch, 100), await lease(store, batch, 1000)
    both = [*first, *second]
    assert [one.custom_id for one in both] == [f"c{i}" for i in range(1, 301)]
    assert [one.line for one in both] == source.texts
    assert [one.no for one in both] == [line.no for line in source.lines]
    tokens = [one.token for one in both]
    assert tokens == sorted(set(tokens))
    assert {one.attempt for one in both} == {1}
    assert {(one.owner, one.key_id, one.batch_id) for one in both} == {(OWNER, "key_1", batch.id)}
    assert await lease(store, batch) == []
    assert await store.lines.running(batch.seq) == 300


async def test_lines_of_some_models_may_be_leased_alone(store: Store) -> None:
    """In line order; the others stay queued for who runs their models."""
    source = Input(6)
    source.lines = [
        msgspec.structs.replace(line, model="odd" if i % 2 else "even")
        for i, line in enumerate(source.lines, 1)
    ]
    batch = await begin(store, source)
    assert sorted(await store.lines.models(batch.seq)) == ["even", "odd"]
    until_at = 2**40
    odd = await store.lines.lease(batch.seq, 2, "h", until_at, ["odd", "other"])
    assert [one.custom_id for one in odd] == ["c1", "c3"]
    assert await store.lines.lease(batch.seq, 9, "h", until_at, []) == []
    rest = await store.lines.lease(batch.seq, 9, "h", until_at)
    assert [one.custom_id for one in rest] == ["c2", "c4", "c5", "c6"]


async def test_tokens_of_all_batches_differ(store: Store) -> None:
    """No two leases of a store ever have the same token, whichever line they are for."""
    batches = [await begin(store, Input(5)) for _ in range(3)]
    tokens: list[int] = []
    for _ in range(3):
        for batch in batches:
            leases = await lease(store, batch, 3)
            tokens += [one.token for one in leases]
            await store.lines.release(leases)
    assert len(set(tokens)) == len(tokens) == 27


async def test_only_a_batch_in_progress_is_leased(store: Store) -> None:
    """Neither while it is validated nor once it is being cancelled."""
    source = Input(2)
    batch = await store.batches.open(new_batch(await upload(store, source.pieces)))
    await store.lines.add(batch.seq, source.lines)
    assert await lease(store, batch) == []
    await store.batches.move(batch.seq, frozenset({S.VALIDATING}), S.CANCELLING)
    assert await lease(store, batch) == []


async def test_concurrent_leases_never_share_a_line(store: Store) -> None:
    """Twenty holders that ask at once split the lines among them."""
    batch = await begin(store, Input(150))
    taken = await asyncio.gather(*(lease(store, batch, 10, f"h{i}") for i in range(20)))
    nos = [one.no for leases in taken for one in leases]
    assert len(nos) == len(set(nos)) == 150


async def test_lines_are_added_once(store: Store) -> None:
    """A restart in mid-validation adds the same lines again; those that exist stay as they are."""
    source = Input(6)
    batch = await store.batches.open(new_batch(await upload(store, source.pieces)))
    await store.lines.add(batch.seq, source.lines[:4])
    await store.lines.add(batch.seq, source.lines)
    await store.lines.add(batch.seq, [])
    assert await store.lines.queued() == 6


async def test_a_custom_id_twice_is_refused(store: Store) -> None:
    """Whole call or nothing, and whoever shares its commit is not hurt."""
    source = Input(3)
    one = await store.batches.open(new_batch(await upload(store, source.pieces)))
    others = [
        await store.batches.open(new_batch(await upload(store, source.pieces))) for _ in range(20)
    ]
    twice = [*source.lines, NewLine(no=99, offset=0, length=1, custom_id="c1", model="m")]
    answers = await asyncio.gather(
        *(store.lines.add(batch.seq, source.lines) for batch in others[:10]),
        store.lines.add(one.seq, twice),
        *(store.lines.add(batch.seq, source.lines) for batch in others[10:]),
        return_exceptions=True,
    )
    assert [type(a) for a in answers] == [type(None)] * 10 + [InvariantBroken] + [type(None)] * 10
    assert await store.lines.queued() == 60


async def test_an_ended_batch_takes_no_lines(store: Store) -> None:
    """Adding to it is refused."""
    source = Input(2)
    batch = await store.batches.open(new_batch(await upload(store, source.pieces)))
    await store.batches.move(batch.seq, frozenset({S.VALIDATING}), S.FAILED)
    with pytest.raises(Conflict):
        await store.lines.add(batch.seq, source.lines)


async def test_a_settlement_counts_books_and_appends(store: Store) -> None:
    """One commit: counters, usage sums, the ledger and the result rows agree."""
    batch = await begin(store, Input(4))
    leases = await lease(store, batch)
    (report,) = await store.lines.settle(
        [settlement(leases[0]), settlement(leases[1], REFUSAL), settlement(leases[2])]
    )
    assert (report.batch_seq, report.batch_id) == (batch.seq, batch.id)
    assert (report.accepted, report.drained) == (3, False)
    now = await fresh(store, batch)
    assert (now.status, now.completed, now.failed) == (S.IN_PROGRESS, 2, 1)
    assert now.usage == Usage(input=14, cached=4, output=10)
    rows = await store.lines.rows(batch.seq, 0, 10)
    assert [row.kind for row in rows] == ["output", "error", "output"]
    assert [json.loads(row.row)["custom_id"] for row in rows] == ["c1", "c2", "c3"]
    assert await store.lines.rows(batch.seq, rows[0].seq, 1) == [rows[1]]
    booked = await store.ledger.usage(OWNER, 0, 2**40)
    assert [(one.batch_id, one.custom_id, one.usage) for one in booked] == [
        (batch.id, "c1", ANSWER.usage),
        (batch.id, "c3", ANSWER.usage),
    ]
    assert {(one.key_id, one.model, one.at) for one in booked} == {("key_1", "m", 1_800_000_123)}


async def test_the_last_line_moves_the_batch_on(store: Store, clock: Hand) -> None:
    """The settlement after which nothing is queued or running finalizes it in the same commit."""
    batch = await begin(store, Input(3))
    leases = await lease(store, batch)
    (first,) = await store.lines.settle([settlement(one) for one in leases[:2]])
    clock.now += 9
    (last,) = await store.lines.settle([settlement(leases[2])])
    assert (first.drained, last.drained) == (False, True)
    now = await fresh(store, batch)
    assert (now.status, now.finalizing_at) == (S.FINALIZING, int(clock.now))


async def test_the_last_line_of_a_closing_batch_says_so(store: Store) -> None:
    """It is drained, and stays cancelling until it is moved."""
    batch = await begin(store, Input(3))
    leases = await lease(store, batch, 1)
    await _cancel(store, batch)
    assert await store.lines.close(batch.seq, LineState.CANCELLED, "batch_cancelled", "m") == 2
    (report,) = await store.lines.settle([settlement(leases[0])])
    assert (report.accepted, report.drained) == (1, True)
    assert (await fresh(store, batch)).status == S.CANCELLING


async def test_a_late_or_double_settlement_changes_nothing(store: Store) -> None:
    """Neither the same one again, nor one in the same call, nor one with an older token."""
    batch = await begin(store, Input(3))
    (old,) = await lease(store, batch, 1)
    await store.lines.release([old])
    (new,) = await lease(store, batch, 1)
    assert (old.no, old.attempt, new.no, new.attempt) == (1, 1, 1, 2)
    (stale,) = await store.lines.settle([settlement(old)])
    assert stale.accepted == 0
    (twice,) = await store.lines.settle([settlement(new), settlement(new, REFUSAL)])
    assert twice.accepted == 1
    (again,) = await store.lines.settle([settlement(new)])
    assert again.accepted == 0
    now = await fresh(store, batch)
    assert (now.completed, now.failed, now.usage) == (1, 0, ANSWER.usage)
    assert len(await store.lines.rows(batch.seq, 0, 10)) == 1
    assert len(await store.ledger.usage(None, 0, 2**40)) == 1


async def test_concurrent_settlements_of_one_line_are_one(store: Store) -> None:
    """However many callers report a line at once, exactly one is accepted."""
    batch = await begin(store, Input(40))
    leases = await lease(store, batch)
    calls = [[settlement(one)] for one in leases for _ in range(5)]
    random.Random(7).shuffle(calls)
    reports = await asyncio.gather(*(store.lines.settle(call) for call in calls))
    assert sum(report.accepted for (report,) in reports) == 40
    assert any(report.drained for (report,) in reports)
    assert (await fresh(store, batch)).completed == 40


async def test_one_call_may_settle_several_batches(store: Store) -> None:
    """Each gets its own report, unknown ones none."""
    one, two = await begin(store, Input(1)), await begin(store, Input(2))
    leases = [*await lease(store, one), *await lease(store, two, 1)]
    stray = settlement(leases[0])
    reports = await store.lines.settle(
        [
            *(settlement(x) for x in leases),
            type(stray)(batch_seq=77, no=1, token=1, ok=True, row=b"x"),
        ]
    )
    assert [(r.batch_id, r.accepted, r.drained) for r in reports] == [
        (one.id, 1, True),
        (two.id, 1, False),
    ]
    assert await store.lines.settle([]) == []


async def test_a_released_line_waits_until_it_is_due(store: Store, clock: Hand) -> None:
    """It is leased neither earlier nor twice, and the store knows when to look again."""
    batch = await begin(store, Input(2))
    leases = await lease(store, batch)
    assert await store.lines.next_due_at() is None
    assert await store.lines.release(leases[:1], due_at=clock.now + 30.5) == []
    assert await store.lines.next_due_at() == clock.now + 30.5
    assert await lease(store, batch) == []
    assert (await store.lines.queued(), await store.lines.running(batch.seq)) == (1, 1)
    clock.now += 30.5
    (again,) = await lease(store, batch)
    assert (again.no, again.attempt) == (1, 2)
    assert await store.lines.next_due_at() is None


async def test_an_unspent_attempt_is_given_back(store: Store) -> None:
    """A drain costs the line nothing; a stale release costs nobody anything."""
    batch = await begin(store, Input(1))
    old = await lease(store, batch)
    await store.lines.release(old, spend=False)
    (new,) = await lease(store, batch)
    assert new.attempt == 1
    await store.lines.release(old)
    assert await store.lines.running(batch.seq) == 1
    (report,) = await store.lines.settle([settlement(new)])
    assert report.accepted == 1


async def test_a_release_names_the_batches_that_close(store: Store) -> None:
    """Their lines will not run again; they must be closed instead."""
    closing, open_one = await begin(store, Input(2)), await begin(store, Input(2))
    leases = [*await lease(store, closing), *await lease(store, open_one)]
    await _cancel(store, closing)
    assert await store.lines.release(leases) == [closing.seq]
    assert await store.lines.close(closing.seq, LineState.CANCELLED, "c", "m") == 2


async def test_a_lapsed_lease_goes_back_and_counts(store: Store, clock: Hand) -> None:
    """Unless its holder kept it alive; the old token no longer settles."""
    batch = await begin(store, Input(4))
    now = int(clock.now)
    dead = await store.lines.lease(batch.seq, 1, "dead", now + 10)
    await store.lines.lease(batch.seq, 2, "alive", now + 10)
    await store.lines.extend("alive", now + 100)
    assert await store.lines.reclaim(now + 10) == 0
    assert await store.lines.reclaim(now + 11) == 1
    assert await store.lines.reclaim(now + 11) == 0
    record = await fresh(store, batch)
    assert (record.lines_rerun, await store.lines.running(batch.seq)) == (1, 2)
    (report,) = await store.lines.settle([settlement(dead[0])])
    assert report.accepted == 0
    (again,) = await lease(store, batch, 1)
    assert (again.no, again.attempt) == (1, 2)


async def test_closed_lines_get_their_rows(store: Store) -> None:
    """Bounded per call, each with an error row that says why; running lines are left alone."""
    batch = await begin(store, Input(5))
    (running,) = await lease(store, batch, 1)
    await store.batches.move(batch.seq, frozenset({S.IN_PROGRESS}), S.EXPIRING)
    counts = [
        await store.lines.close(batch.seq, LineState.EXPIRED, "batch_expired", "late", 3)
        for _ in range(3)
    ]
    assert counts == [3, 1, 0]
    assert await store.lines.running(batch.seq) == 1
    await store.lines.settle([settlement(running)])
    ended = await store.batches.move(batch.seq, frozenset({S.EXPIRING}), S.EXPIRED)
    assert ended is not None
    output, errors = await results(store, ended)
    assert [row["custom_id"] for row in output] == ["c1"]
    assert [row["custom_id"] for row in errors] == ["c2", "c3", "c4", "c5"]
    assert {json.dumps(row["error"]) for row in errors} == {
        '{"code": "batch_expired", "message": "late"}'
    }
    assert {row["response"] for row in errors} == {None}  # type: ignore[comparison-overlap]
    with pytest.raises(ValueError, match="never ran"):
        await store.lines.close(batch.seq, LineState.FAILED, "c", "m")


async def test_lines_of_ended_batches_wait_for_nothing(store: Store, clock: Hand) -> None:
    """The queue and the next due time are about active batches only."""
    batch = await begin(store, Input(3))
    await store.lines.release(await lease(store, batch, 1), due_at=clock.now + 5)
    assert await store.lines.queued() == 3
    await store.batches.move(batch.seq, frozenset({S.IN_PROGRESS}), S.FAILED)
    assert (await store.lines.queued(), await store.lines.next_due_at()) == (0, None)


async def test_rows_read_while_running_are_a_prefix_of_the_file(store: Store) -> None:
    """Every earlier read is a byte prefix of every later one and of the output file."""
    batch = await begin(store, Input(30))
    reads = []
    while leases := await lease(store, batch, 7):
        await store.lines.settle(
            [settlement(one, REFUSAL if one.no % 4 == 0 else ANSWER, pad=one.no) for one in leases]
        )
        rows = await store.lines.rows(batch.seq, 0, 100)
        reads.append(b"".join(row.row + b"\n" for row in rows if row.kind == "output"))
    ended = await store.batches.move(batch.seq, frozenset({S.FINALIZING}), S.COMPLETED)
    assert ended is not None
    assert ended.output_file_id is not None
    file = await store.files.get(ended.output_file_id, OWNER)
    assert file is not None
    whole = b"".join([piece async for piece in store.files.read(file)])
    for earlier, later in zip(reads, [*reads[1:], whole], strict=True):
        assert later.startswith(earlier)
    assert reads[-1] == whole


async def test_a_retried_line_ends_once(store: Store) -> None:
    """Refused, released, run again, answered: one row, in the output file."""
    batch = await begin(store, Input(2))
    for _ in range(2):
        await store.lines.release(await lease(store, batch))
    ended = await finish(store, batch)
    output, errors = await results(store, ended)
    assert sorted(str(row["custom_id"]) for row in output) == ["c1", "c2"]
    assert errors == []


async def test_a_failure_with_usage_is_booked(store: Store) -> None:
    """Tokens that a refused line used count like any other."""
    batch = await begin(store, Input(1))
    (one,) = await lease(store, batch)
    refused = settlement(one, Refusal(code="c", message="m", status_code=500))
    used = type(refused)(
        batch_seq=one.batch_seq,
        no=one.no,
        token=one.token,
        ok=False,
        row=refused.row,
        usage=Usage(input=9),
        execution="azure",
        tier="batch",
    )
    await store.lines.settle([used])
    (booked,) = await store.ledger.usage(OWNER, 0, 2**40)
    assert (booked.usage.input, booked.execution, booked.tier) == (9, "azure", "batch")
    assert (booked.at, booked.model, booked.custom_id) == (1_800_000_000, "m", "c1")
    assert (await fresh(store, batch)).usage == Usage(input=9)
