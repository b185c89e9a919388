"""Batches run on a real store with a scripted executor."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import anyio
import pytest

from tests.scheduler.conftest import ENDPOINT, World, line
from tidemill import clock
from tidemill.errors import AtCapacity, NotCancellable
from tidemill.scheduler import retry
from tidemill.types import (
    Answer,
    BatchStatus,
    Lease,
    NewBatch,
    NewFile,
    Outcome,
    Principal,
    Refusal,
    Upload,
)

pytestmark = pytest.mark.anyio


async def test_every_line_is_answered_once(world: World) -> None:
    """A batch goes through its states in order; counts, usage, model and rows agree."""
    async with world.up():
        batch = await world.until(await world.open([line(f"l{i}") for i in range(100)]))
        output, errors = await world.rows(batch)
    assert batch.status is BatchStatus.COMPLETED
    assert (batch.total, batch.completed, batch.failed) == (100, 100, 0)
    assert sorted(row["custom_id"] for row in output) == sorted(f"l{i}" for i in range(100))
    assert not errors
    assert batch.error_file_id is None
    assert (batch.usage.input, batch.usage.output) == (200, 100)
    assert batch.model == "m"
    stamps = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert stamps == sorted(stamps, key=lambda at: at or 0)
    assert world.script.most <= world.script.capacity
    assert (world.runner.pool.active, world.runner.intake_pool.size) == (0, 0)


async def test_a_failed_line_does_not_fail_its_batch(world: World) -> None:
    """A refused line has its status in the row, one that never ran has an error; both are counted
    as failed, and the batch completes."""

    def do(lease: Lease) -> Outcome | None:
        if lease.custom_id == "bad":
            return Refusal(status_code=404, code="model_not_found", message="no such model")
        if lease.custom_id == "long":
            return Refusal(code="context_length_exceeded", message="too long")
        return None

    world.script.do = do
    async with world.up():
        batch = await world.until(await world.open([line("ok"), line("bad"), line("long")]))
        output, errors = await world.rows(batch)
    assert batch.status is BatchStatus.COMPLETED
    assert (batch.completed, batch.failed) == (1, 2)
    assert [row["custom_id"] for row in output] == ["ok"]
    by_id = {row["custom_id"]: row for row in errors}
    assert by_id["bad"]["response"]["status_code"] == 404
    assert by_id["bad"]["error"] is None
    assert by_id["long"]["response"] is None
    assert by_id["long"]["error"]["code"] == "context_length_exceeded"


async def test_all_lines_failing_still_completes(world: World) -> None:
    """The output file is absent then, the error file has everything."""
    world.script.do = lambda lease: Refusal(status_code=400, code="x", message="no")
    async with world.up():
        batch = await world.until(await world.open([line("a"), line("b")]))
    assert batch.status is BatchStatus.COMPLETED
    assert batch.output_file_id is None
    assert batch.error_file_id is not None


async def test_a_line_is_retried_up_to_the_cap(world: World) -> None:
    """A retryable refusal runs again after its time; the last refusal is the row."""
    world.script.do = lambda lease: Refusal(
        status_code=503, code="busy", message="busy", retry=True, retry_after_s=0.05
    )
    async with world.up(max_line_attempts=3):
        batch = await world.until(await world.open([line("a")]))
        _, errors = await world.rows(batch)
    assert [lease.attempt for lease in world.script.ran] == [1, 2, 3]
    assert errors[0]["response"]["status_code"] == 503
    assert (batch.completed, batch.failed) == (0, 1)


async def test_a_retry_that_succeeds_counts_once(world: World) -> None:
    """Whatever was retried inside, a line is counted and booked once."""

    def do(lease: Lease) -> Outcome | None:
        if lease.attempt == 1:
            return Refusal(status_code=500, code="x", message="x", retry=True, retry_after_s=0.02)
        return None

    world.script.do = do
    async with world.up():
        batch = await world.until(await world.open([line(f"l{i}") for i in range(20)]))
        booked = await world.store.ledger.usage("a", 0, clock.now() + 10)
    assert (batch.completed, batch.failed) == (20, 0)
    assert sorted(row.custom_id or "" for row in booked) == sorted(f"l{i}" for i in range(20))


async def test_lines_wait_for_an_engine_that_is_down_without_losing_an_attempt(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time it is asked again it is asked with as many lines as it wants, not with all that
    wait; every line is answered in the end, on its only attempt."""
    rests: list[int] = []

    def soon(failures: int, **_: float) -> float:
        rests.append(failures)
        return 0.01

    monkeypatch.setattr(retry, "backoff_s", soon)
    down = Refusal(
        status_code=503, code="engine_unavailable", message="down", retry=True, spend=False,
        rest=True,
    )  # fmt: skip
    world.script.do = lambda lease: down if len(rests) < 3 else None
    async with world.up(max_line_attempts=1):
        batch = await world.until(await world.open([line(f"l{i}") for i in range(100)]))
    assert (batch.completed, batch.failed) == (100, 0)
    assert rests[:3] == [1, 2, 3]
    assert len(world.script.ran) <= 100 + len(rests) * world.script.capacity


async def test_the_deadline_ends_the_wait_for_an_engine(world: World) -> None:
    """A line that never ran says so when its batch expires."""
    world.script.do = lambda lease: Refusal(
        status_code=503, code="engine_unavailable", message="down", retry=True, spend=False,
        rest=True,
    )  # fmt: skip
    async with world.up():
        batch = await world.open([line("a"), line("b")], window_s=1)
        batch = await world.until(batch)
        _, errors = await world.rows(batch)
    assert batch.status is BatchStatus.EXPIRED
    assert {row["error"]["code"] for row in errors} == {"batch_expired"}


async def test_cancel_keeps_what_ran_and_names_what_did_not(world: World) -> None:
    """Lines in flight finish and are kept, the others get a batch_cancelled row; each custom_id is
    in exactly one file."""
    world.script.capacity = 3
    world.script.gate = anyio.Event()
    async with world.up():
        batch = await world.open([line(f"l{i}") for i in range(10)])
        await world.until(batch, lambda b: b.status is BatchStatus.IN_PROGRESS)
        await world.script.reached(3)
        cancelling = await world.local.cancel(batch)
        assert cancelling.status is BatchStatus.CANCELLING
        again = await world.local.cancel(batch)
        assert again.status is BatchStatus.CANCELLING
        world.script.gate.set()
        done = await world.until(batch)
        output, errors = await world.rows(done)
        with pytest.raises(NotCancellable):
            await world.local.cancel(done)
    assert done.status is BatchStatus.CANCELLED
    assert (done.total, done.completed, done.failed) == (10, 3, 7)
    assert {row["error"]["code"] for row in errors} == {"batch_cancelled"}
    ids = [row["custom_id"] for row in output + errors]
    assert sorted(ids) == sorted(f"l{i}" for i in range(10))
    assert world.runner.intake_pool.size == 0


async def test_cancel_at_once_gives_every_line_a_row(world: World) -> None:
    """A batch cancelled before its file was read is read to its end first."""
    world.script.gate = anyio.Event()
    async with world.up():
        batch = await world.open([line(f"l{i}") for i in range(50)])
        await world.local.cancel(batch)
        world.script.gate.set()
        done = await world.until(batch)
        output, errors = await world.rows(done)
    assert done.status is BatchStatus.CANCELLED
    assert len(output) + len(errors) == done.total == 50


async def test_at_the_deadline_no_line_starts(world: World) -> None:
    """Unrun lines get batch_expired, finished ones are kept, the status is expired."""
    world.script.capacity = 1
    world.script.gate = anyio.Event()
    async with world.up():
        batch = await world.open([line(f"l{i}") for i in range(5)], window_s=1)
        expiring = await world.until(batch, lambda b: b.status is BatchStatus.EXPIRING)
        assert expiring.finalizing_at is not None
        world.script.gate.set()
        done = await world.until(batch)
        output, errors = await world.rows(done)
    assert done.status is BatchStatus.EXPIRED
    assert done.expired_at is not None
    assert len(output) == 1
    assert {row["error"]["code"] for row in errors} == {"batch_expired"}
    assert len(world.script.ran) == 1


async def test_a_batch_that_would_be_late_has_every_second_turn(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four owners, room for one line; the batch of one is in the last tenth of its window. The
    others get theirs in between."""
    world.script.capacity = 1
    world.script.gate = anyio.Event()
    later = 0.0
    monkeypatch.setattr(clock, "now_f", lambda: time.time() + later)
    lines = [line(f"l{i}") for i in range(6)]
    async with world.up():
        batches = [await world.open(lines, owner="late", window_s=10_000)]
        await world.script.reached(1)
        batches += [await world.open(lines, owner=owner, window_s=100_000) for owner in "abc"]
        for batch in batches:
            await world.until(batch, lambda b: b.status is BatchStatus.IN_PROGRESS)
        later = 9_100.0
        world.script.gate.set()
        for batch in batches:
            await world.until(batch)
    owners = [lease.owner for lease in world.script.ran]
    assert all("late" in pair for pair in pairwise(owners[:10]))
    assert set(owners[:9]) == {"late", "a", "b", "c"}


async def test_owners_share_the_slots(world: World) -> None:
    """A small batch of another owner does not wait for a large one to end."""
    world.script.capacity = 2
    finished: list[str] = []

    def do(lease: Lease) -> Outcome | None:
        finished.append(lease.custom_id)
        return None

    world.script.do = do
    world.script.gate = anyio.Event()
    async with world.up():
        big = await world.open([line(f"big{i}") for i in range(60)], owner="a")
        await world.until(big, lambda b: b.status is BatchStatus.IN_PROGRESS)
        small = await world.open([line(f"small{i}") for i in range(5)], owner="b")
        await world.until(small, lambda b: b.status is BatchStatus.IN_PROGRESS)
        world.script.gate.set()
        await world.until(small)
        await world.until(big)
    assert max(finished.index(f"small{i}") for i in range(5)) < 20


async def test_a_batch_that_does_not_fit_now_is_refused_and_nothing_is_made(world: World) -> None:
    """429 at create; once the pool drained the same create works."""
    world.script.gate = anyio.Event()
    world.script.capacity = 1
    async with world.up(max_intake_capacity=10):
        first = await world.open([line(f"a{i}") for i in range(8)])
        with pytest.raises(AtCapacity):
            await world.open([line(f"b{i}") for i in range(8)], owner="b")
        assert len(await world.store.batches.active()) == 1
        world.script.gate.set()
        await world.until(first)
        await world.until(await world.open([line(f"b{i}") for i in range(8)], owner="b"))


async def test_a_batch_that_can_never_fit_fails_with_a_reason(world: World) -> None:
    """It is created and failed, capacity_exceeded, and blocks nobody."""
    async with world.up(max_intake_capacity=5):
        batch = await world.until(await world.open([line(f"l{i}") for i in range(6)]))
        assert batch.status is BatchStatus.FAILED
        assert [p.code for p in batch.problems] == ["capacity_exceeded"]
        assert world.runner.intake_pool.size == 0


async def test_a_drain_gives_lines_back_without_an_attempt(world: World) -> None:
    """What does not finish in time is queued again; the next server runs it as the first time."""
    world.script.gate = anyio.Event()
    world.script.capacity = 2
    async with world.up(drain_s=0.05):
        batch = await world.open([line(f"l{i}") for i in range(6)])
        await world.until(batch, lambda b: b.status is BatchStatus.IN_PROGRESS)
        await world.script.reached(2)
    world.script.gate = None
    async with world.up():
        done = await world.until(batch)
    assert (done.completed, done.lines_rerun) == (6, 0)
    assert {lease.attempt for lease in world.script.ran} == {1}


async def test_what_finishes_while_the_server_drains_is_kept(world: World) -> None:
    """No further line begins; those in flight are settled before the server ends."""
    world.script.gate = anyio.Event()
    world.script.capacity = 2
    async with world.up():
        batch = await world.open([line(f"l{i}") for i in range(6)])
        await world.script.reached(2)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.runner.drain, 600)
            await anyio.wait_all_tasks_blocked()
            world.script.gate.set()
        now = await world.until(batch, lambda b: True)
        assert (now.status, now.completed) == (BatchStatus.IN_PROGRESS, 2)
        assert len(world.script.ran) == 2
    async with world.up():
        done = await world.until(batch)
    assert (done.completed, done.lines_rerun) == (6, 0)
    assert len(world.script.ran) == 6


async def test_a_drain_waits_for_a_lease_that_is_being_granted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines leased while the drain begins are given back, too, and nothing falls over."""
    granting, grant = anyio.Event(), anyio.Event()
    world.script.gate = anyio.Event()
    async with world.up(drain_s=0.05):
        lease = world.store.lines.lease

        async def slow(*given: Any) -> list[Lease]:
            leases = await lease(*given)
            granting.set()
            await grant.wait()
            return leases

        monkeypatch.setattr(world.store.lines, "lease", slow)
        batch = await world.open([line("l")])
        await granting.wait()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.runner.drain, 0.05)
            await anyio.wait_all_tasks_blocked()
            grant.set()
    world.script.gate = None
    async with world.up():
        done = await world.until(batch)
    assert (done.completed, done.lines_rerun) == (1, 0)


async def test_a_bug_in_one_line_costs_that_line_only(world: World) -> None:
    """An unexpected exception becomes a row with status 500."""

    def do(lease: Lease) -> Outcome | None:
        if lease.custom_id == "l1":
            raise ZeroDivisionError
        return Answer(body=b"{}")

    world.script.do = do
    async with world.up():
        batch = await world.until(await world.open([line(f"l{i}") for i in range(3)]))
        _, errors = await world.rows(batch)
    assert (batch.completed, batch.failed) == (2, 1)
    assert errors[0]["response"]["status_code"] == 500


async def test_the_scheduling_pool_bounds_what_is_in_flight(world: World) -> None:
    """However much the executor wants, no more lines than the pool's size run."""
    world.script.capacity = 1000
    async with world.up(max_pool_size=7):
        batch = await world.until(await world.open([line(f"l{i}") for i in range(60)]))
    assert batch.completed == 60
    assert world.script.most <= 7


async def test_batch_validation_finds_problems_after_creation(world: World) -> None:
    """An unchecked file gives a batch that fails with every problem, and nothing runs."""

    async def body() -> AsyncIterator[bytes]:
        yield (line("a") + "\n{\n" + line("a") + "\n").encode()

    async with world.up():
        file = await world.local.accept(
            Upload(
                new=NewFile(owner="a", filename="in.jsonl"),
                body=body(),
                principal=Principal(owner="a", name="a"),
                validation="batch",
            )
        )
        batch = await world.local.open(
            NewBatch(owner="a", key_id=None, file=file, endpoint=ENDPOINT)
        )
        done = await world.until(batch)
    assert done.status is BatchStatus.FAILED
    assert [(p.line, p.code) for p in done.problems] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
    ]
    assert not world.script.ran
