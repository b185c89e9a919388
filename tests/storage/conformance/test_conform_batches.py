"""What every store does with batches."""

from __future__ import annotations

import asyncio

import pytest

from tests.storage.world import (
    OWNER,
    REFUSAL,
    Hand,
    Input,
    S,
    begin,
    content,
    finish,
    fresh,
    lease,
    new_batch,
    results,
    settlement,
    upload,
)
from tidemill.errors import BadRequest, DuplicateActiveBatch, InvariantBroken, NotFound
from tidemill.ports import Store
from tidemill.scheduler.states import BATCH_MOVES, STAMPS, allowed
from tidemill.types import (
    TERMINAL,
    BatchParams,
    BatchStatus,
    LineState,
    Page,
    Placement,
    Problem,
)

pytestmark = pytest.mark.anyio

_PATHS: dict[BatchStatus, tuple[BatchStatus, ...]] = {
    S.VALIDATING: (),
    S.IN_PROGRESS: (S.IN_PROGRESS,),
    S.FINALIZING: (S.IN_PROGRESS, S.FINALIZING),
    S.COMPLETED: (S.IN_PROGRESS, S.FINALIZING, S.COMPLETED),
    S.FAILED: (S.FAILED,),
    S.CANCELLING: (S.CANCELLING,),
    S.CANCELLED: (S.CANCELLING, S.CANCELLED),
    S.EXPIRING: (S.EXPIRING,),
    S.EXPIRED: (S.EXPIRING, S.EXPIRED),
}


async def test_a_new_batch_is_validating(store: Store, clock: Hand) -> None:
    """Counts are zero, the deadline is set, everything later is null, and it reads back equal."""
    file = await upload(store, [b"{}\n"])
    batch = await store.batches.open(
        new_batch(
            file,
            metadata={"k": "ä"},
            params=BatchParams(temperature=0.5, top_k=3),
            window_s=7200,
            output_expires_after_s=3600,
        )
    )
    now = int(clock.now)
    assert (batch.status, batch.created_at, batch.expires_at) == (S.VALIDATING, now, now + 7200)
    assert (batch.total, batch.completed, batch.failed, batch.model) == (0, 0, 0, None)
    assert (batch.output_file_id, batch.error_file_id, batch.problems) == (None, None, ())
    assert (batch.metadata, batch.params.top_k) == ({"k": "ä"}, 3)
    assert batch.placement == file.facts.placement
    assert await store.batches.get(batch.id, OWNER) == batch
    assert await store.batches.get(batch.id, None) == batch
    assert await store.batches.get(batch.id, "bob") is None
    assert await store.batches.get("batch_unknown", OWNER) is None


async def test_one_file_has_one_active_batch(store: Store) -> None:
    """A second create is refused, naming the first; allowed when asked for, and after the end."""
    file = await upload(store, [b"{}\n"])
    first = await store.batches.open(new_batch(file))
    with pytest.raises(DuplicateActiveBatch, match=first.id):
        await store.batches.open(new_batch(file))
    second = await store.batches.open(new_batch(file, allow_duplicate=True))
    third = await store.batches.open(new_batch(file, allow_duplicate=True))
    assert len({first.id, second.id, third.id}) == 3
    for batch in (first, second, third):
        await store.batches.move(batch.seq, frozenset({S.VALIDATING}), S.FAILED)
    assert (await store.batches.open(new_batch(file))).id not in {first.id, second.id, third.id}


async def test_a_repeated_create_gives_the_first_batch(store: Store) -> None:
    """The same idempotency key, or a retry while the batch is active, makes no second one."""
    file = await upload(store, [b"{}\n"])
    first = await store.batches.open(new_batch(file, idempotency_key="k"))
    assert (await store.batches.open(new_batch(file, idempotency_key="k"))).id == first.id
    assert (await store.batches.open(new_batch(file, retried=True))).id == first.id
    await store.batches.move(first.seq, frozenset({S.VALIDATING}), S.FAILED)
    assert (await store.batches.open(new_batch(file, idempotency_key="k"))).id == first.id
    assert (await store.batches.open(new_batch(file, retried=True))).id != first.id
    with pytest.raises(BadRequest, match=first.id):
        await store.batches.open(new_batch(file, idempotency_key="k", metadata={"a": "b"}))
    theirs = await upload(store, [b"{}\n"], owner="bob")
    assert (await store.batches.open(new_batch(theirs, idempotency_key="k"))).id != first.id


async def test_a_create_whose_answer_was_lost(store: Store, clock: Hand) -> None:
    """A batch may complete before its create is sent again: it is the answer still. Long after, or
    asked for otherwise, or without the SDK's mark, the same file makes another one."""
    file = await upload(store, [b"{}\n"])
    first = await store.batches.open(new_batch(file))
    for frm, to in ((S.VALIDATING, S.IN_PROGRESS), (S.IN_PROGRESS, S.FINALIZING)):
        await store.batches.move(first.seq, frozenset({frm}), to)
    await store.batches.move(first.seq, frozenset({S.FINALIZING}), S.COMPLETED)
    assert (await store.batches.open(new_batch(file, retried=True))).id == first.id
    other = await store.batches.open(new_batch(file, retried=True, metadata={"a": "b"}))
    assert other.id != first.id
    await store.batches.move(other.seq, frozenset({S.VALIDATING}), S.FAILED)
    clock.now += 3600
    assert (await store.batches.open(new_batch(file, retried=True))).id != first.id


async def test_parallel_creates_agree(store: Store) -> None:
    """Twenty creates with one key at once make one batch; twenty of twenty files make twenty."""
    file = await upload(store, [b"{}\n"])
    same = await asyncio.gather(
        *(store.batches.open(new_batch(file, idempotency_key="k")) for _ in range(20))
    )
    assert len({batch.id for batch in same}) == 1
    files = [await upload(store, [b"{}\n"]) for _ in range(20)]
    many = await asyncio.gather(*(store.batches.open(new_batch(file)) for file in files))
    assert len({batch.id for batch in many}) == 20


async def test_a_deleted_or_expired_file_opens_nothing(store: Store, clock: Hand) -> None:
    """The file may go between the check and the create; then the create says so."""
    gone = await upload(store, [b"{}\n"])
    await store.files.delete(gone.id, OWNER)
    with pytest.raises(NotFound):
        await store.batches.open(new_batch(gone))
    old = await upload(store, [b"{}\n"], expires_after_s=3600)
    clock.now += 3600
    with pytest.raises(NotFound):
        await store.batches.open(new_batch(old))


@pytest.mark.parametrize("frm", list(BATCH_MOVES))
async def test_batches_move_as_the_table_says(store: Store, clock: Hand, frm: BatchStatus) -> None:
    """A move that the table has happens once and is stamped; no other can even be asked for."""
    for to in BATCH_MOVES:
        await _try_move(store, clock, frm, to)


async def _try_move(store: Store, clock: Hand, frm: BatchStatus, to: BatchStatus) -> None:
    batch = await store.batches.open(new_batch(await upload(store, [b"{}\n"])))
    for step in _PATHS[frm]:
        moved = await store.batches.move(batch.seq, frozenset({batch.status}), step)
        assert moved is not None
        batch = moved
    clock.now += 10
    if not allowed(frm, to):
        with pytest.raises(ValueError, match="cannot move"):
            await store.batches.move(batch.seq, frozenset({frm}), to)
        assert await fresh(store, batch) == batch
        return
    moved = await store.batches.move(batch.seq, frozenset({frm}), to)
    assert moved is not None
    assert (moved.status, getattr(moved, STAMPS[to])) == (to, int(clock.now))
    assert await fresh(store, moved) == moved
    assert await store.batches.move(batch.seq, frozenset({frm}), to) is None


async def test_a_move_from_another_state_changes_nothing(store: Store) -> None:
    """Zero rows changed is an answer; an unknown batch gives the same one."""
    batch = await store.batches.open(new_batch(await upload(store, [b"{}\n"])))
    assert await store.batches.move(batch.seq, frozenset({S.IN_PROGRESS}), S.CANCELLING) is None
    assert await store.batches.move(999, frozenset({S.VALIDATING}), S.FAILED) is None
    assert await fresh(store, batch) == batch


async def test_a_failed_batch_keeps_its_problems(store: Store) -> None:
    """What validation found is on the record, in order."""
    batch = await store.batches.open(new_batch(await upload(store, [b"{}\n"])))
    problems = (
        Problem(code="invalid_json_line", message="no", line=2),
        Problem(code="empty_file", message="none"),
    )
    moved = await store.batches.move(
        batch.seq, frozenset({S.VALIDATING}), S.FAILED, problems=problems
    )
    assert moved is not None
    assert moved.problems == problems
    assert (moved.output_file_id, moved.error_file_id) == (None, None)


async def test_the_end_creates_the_result_files(store: Store, clock: Hand) -> None:
    """Both files in the commit of the end: exact bytes, owner, names, expiry from the batch."""
    batch = await begin(store, Input(5), output_expires_after_s=4000)
    leases = await lease(store, batch)
    await store.lines.settle([settlement(one) for one in leases[:3]])
    await store.lines.settle([settlement(one, REFUSAL) for one in leases[3:]])
    clock.now += 5
    ended = await store.batches.move(batch.seq, frozenset({S.FINALIZING}), S.COMPLETED)
    assert ended is not None
    output, errors = await results(store, ended)
    assert [row["custom_id"] for row in output] == ["c1", "c2", "c3"]
    assert [row["custom_id"] for row in errors] == ["c4", "c5"]
    for id, kind in ((ended.output_file_id, "output"), (ended.error_file_id, "error")):
        assert id is not None
        file = await store.files.get(id, OWNER)
        assert file is not None
        assert (file.kind, file.purpose, file.batch_id) == (kind, "batch_output", batch.id)
        assert file.filename == f"{batch.id}_{kind}.jsonl"
        assert (file.created_at, file.expires_at) == (int(clock.now), int(clock.now) + 4000)
        assert file.facts.lines == {"output": 3, "error": 2}[kind]


async def test_a_file_without_rows_is_not_created(store: Store, clock: Hand) -> None:
    """All succeeded: no error file. All failed: completed all the same, and no output file."""
    clean = await finish(store, await begin(store, Input(2)))
    assert clean.output_file_id is not None
    assert clean.error_file_id is None
    output = await store.files.get(clean.output_file_id, OWNER)
    assert output is not None
    assert output.expires_at == int(clock.now) + 2_592_000
    batch = await begin(store, Input(2))
    leases = await lease(store, batch)
    await store.lines.settle([settlement(one, REFUSAL) for one in leases])
    ended = await store.batches.move(batch.seq, frozenset({S.FINALIZING}), S.COMPLETED)
    assert ended is not None
    assert (ended.completed, ended.failed, ended.output_file_id) == (0, 2, None)
    assert ended.error_file_id is not None


async def test_no_batch_ends_with_a_line_in_neither_file(store: Store) -> None:
    """An end that would lose lines is refused and changes nothing."""
    batch = await begin(store, Input(3))
    await lease(store, batch, 1)
    await store.batches.move(batch.seq, frozenset({S.IN_PROGRESS}), S.CANCELLING)
    before = await fresh(store, batch)
    with pytest.raises(InvariantBroken):
        await store.batches.move(batch.seq, frozenset({S.CANCELLING}), S.CANCELLED)
    assert await fresh(store, batch) == before
    assert (await store.files.page(OWNER, Page(purpose="batch_output")))[0] == []


async def test_a_batch_cancelled_in_validation_counts_its_lines(store: Store) -> None:
    """Its total was never said; at the end it is the lines that got rows."""
    source = Input(4)
    file = await upload(store, source.pieces)
    batch = await store.batches.open(new_batch(file))
    await store.lines.add(batch.seq, source.lines)
    await store.batches.move(batch.seq, frozenset({S.VALIDATING}), S.CANCELLING)
    while await store.lines.close(batch.seq, LineState.CANCELLED, "batch_cancelled", "m"):
        pass
    ended = await store.batches.move(batch.seq, frozenset({S.CANCELLING}), S.CANCELLED)
    assert ended is not None
    assert (ended.total, ended.completed, ended.failed) == (4, 0, 4)


async def test_an_ended_batch_no_longer_changes(store: Store) -> None:
    """No settlement, model, placement or line reaches it."""
    batch = await begin(store, Input(2))
    late = await lease(store, batch)
    await store.lines.release(late)
    ended = await finish(store, batch)
    (report,) = await store.lines.settle([settlement(late[0])])
    assert (report.accepted, report.drained) == (0, False)
    await store.batches.model(batch.seq, "other", 9)
    await store.batches.place(batch.seq, Placement(execution="provider"))
    assert await fresh(store, ended) == ended


async def test_validation_and_placement_are_recorded(store: Store) -> None:
    """The one model, the number of lines, and where the batch runs after all."""
    batch = await store.batches.open(new_batch(await upload(store, [b"{}\n"])))
    elsewhere = Placement(execution="provider", backend="azure", provider="azure", reason="r")
    await store.batches.model(batch.seq, "m", 12)
    await store.batches.place(batch.seq, elsewhere)
    found = await fresh(store, batch)
    assert (found.model, found.total, found.placement) == ("m", 12, elsewhere)


async def test_pages_walk_every_batch_once(store: Store) -> None:
    """Newest first, each id once, also while batches arrive; foreign cursors give nothing."""
    made = []
    for _ in range(99):
        file = await upload(store, [b"{}\n"])
        made.append((await store.batches.open(new_batch(file))).id)
    theirs = await store.batches.open(new_batch(await upload(store, [b"{}\n"], owner="bob")))
    seen: list[str] = []
    after = None
    while True:
        page, more = await store.batches.page(OWNER, Page(limit=10, after=after))
        seen += [batch.id for batch in page]
        await store.batches.open(new_batch(await upload(store, [b"{}\n"])))
        if not more:
            break
        after = page[-1].id
    assert seen == made[::-1]
    page, more = await store.batches.page(OWNER, Page(limit=2, after=made[0], order="asc"))
    assert ([batch.id for batch in page], more) == (made[1:3], True)
    assert await store.batches.page(OWNER, Page(after=theirs.id)) == ([], False)
    assert await store.batches.page(OWNER, Page(after="batch_unknown")) == ([], False)


async def test_active_batches_are_those_that_have_not_ended(store: Store) -> None:
    """All owners', oldest first."""
    batches = [
        await store.batches.open(new_batch(await upload(store, [b"{}\n"], owner=owner)))
        for owner in (OWNER, "bob", OWNER)
    ]
    await store.batches.move(batches[1].seq, frozenset({S.VALIDATING}), S.FAILED)
    await store.batches.move(batches[2].seq, frozenset({S.VALIDATING}), S.CANCELLING)
    active = await store.batches.active()
    assert [batch.id for batch in active] == [batches[0].id, batches[2].id]
    assert not any(batch.status in TERMINAL for batch in active)


async def test_results_are_downloadable_when_the_end_shows(store: Store) -> None:
    """Whoever sees a batch ended can read its files at once."""
    batch = await begin(store, Input(200))

    async def watch() -> int:
        while (seen := await fresh(store, batch)).output_file_id is None:
            assert seen.status not in TERMINAL
        file = await store.files.get(seen.output_file_id, OWNER)
        assert file is not None
        return len((await content(store, file)).splitlines())

    watcher = asyncio.create_task(watch())
    await finish(store, batch)
    assert await watcher == 200
