"""The provider's side of a batch survives, settles once, and can be taken back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tidemill import wire
from tidemill.storage import open_store
from tidemill.storage.sqlite import SqliteStore
from tidemill.types import (
    Answer,
    BatchRecord,
    BatchStatus,
    FileFacts,
    FileRecord,
    NewBatch,
    NewFile,
    NewLine,
    Placement,
    Problem,
    Refusal,
    Settlement,
    UpstreamBatch,
    UpstreamFile,
    Usage,
)

pytestmark = pytest.mark.anyio

UP = Placement(execution="provider", backend="up", provider="up", reason="up: it batches")
LINES = [b'{"custom_id":"%d"}' % n for n in range(3)]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = open_store(tmp_path)
    await store.start()
    yield store
    await store.close()


async def _batch(store: SqliteStore) -> tuple[FileRecord, BatchRecord]:
    draft = await store.files.draft(NewFile(owner="o", filename="in.jsonl"))
    await draft.append(b"\n".join(LINES) + b"\n")
    file = await draft.commit(FileFacts(lines=3, placement=UP))
    new = NewBatch(owner="o", key_id=None, file=file, endpoint="/v1/chat/completions")
    return file, await store.batches.open(new)


def _row(batch: BatchRecord, custom_id: str, outcome: Answer | Refusal) -> Settlement:
    ok = isinstance(outcome, Answer)
    return Settlement(
        batch_seq=batch.seq,
        no=0,
        token=0,
        ok=ok,
        row=wire.result_row(custom_id, outcome),
        usage=Usage(input=2, output=3) if ok else Usage(),
        custom_id=custom_id,
        execution="up",
        tier="batch",
        finished_at=7,
    )


async def _lines(store: SqliteStore, batch: BatchRecord) -> None:
    size = len(LINES[0])
    lines = [
        NewLine(no=n + 1, offset=n * (size + 1), length=size, custom_id=str(n), model="m")
        for n in range(3)
    ]
    await store.lines.add(batch.seq, lines)


async def test_a_forwarded_batch_and_its_file_are_remembered(store: SqliteStore) -> None:
    """What was kept comes back equal; a settled batch is never brought back to life."""
    file, batch = await _batch(store)
    copy = UpstreamFile(file_seq=file.seq, provider="up", id="file-up", created_at=1, expires_at=9)
    await store.upstream.keep_file(copy)
    assert await store.upstream.file(file.seq, "up") == copy
    assert await store.upstream.file(file.seq, "two") is None

    intent = UpstreamBatch(batch_seq=batch.seq, batch_id=batch.id, provider="up", intended_at=5)
    await store.upstream.keep_batch(intent)
    assert await store.upstream.unsettled() == [intent]
    settled = UpstreamBatch(
        batch_seq=batch.seq,
        batch_id=batch.id,
        provider="up",
        id="batch_up",
        status="failed",
        problems=(Problem(code="x", message="y", line=3),),
        intended_at=5,
        settled_at=9,
    )
    await store.upstream.keep_batch(settled)
    await store.upstream.keep_batch(intent)
    assert await store.upstream.batch(batch.seq) == settled
    assert await store.upstream.unsettled() == []


async def test_the_latch_is_held_by_one(store: SqliteStore) -> None:
    """A second taker waits until it is given back or runs out; a settled batch gives none."""
    _, batch = await _batch(store)
    intent = UpstreamBatch(batch_seq=batch.seq, batch_id=batch.id, provider="up", intended_at=5)
    await store.upstream.keep_batch(intent)
    assert await store.upstream.latch(batch.seq, 2**40)
    assert not await store.upstream.latch(batch.seq, 2**40)
    assert await store.upstream.latch(batch.seq, 0)
    assert await store.upstream.latch(batch.seq, 1)
    assert await store.upstream.latch(batch.seq, 2**40)


async def test_a_line_is_settled_once_however_often_its_row_is_read(store: SqliteStore) -> None:
    """Rows come in any order, twice or for lines that nobody sent; each line is booked once."""
    _, batch = await _batch(store)
    await _lines(store, batch)
    await store.batches.model(batch.seq, "m", 3)
    await store.batches.move(
        batch.seq, frozenset({BatchStatus.VALIDATING}), BatchStatus.IN_PROGRESS
    )
    good, bad = Answer(body=b"{}"), Refusal(code="c", message="m", status_code=400)
    rows = [_row(batch, "2", good), _row(batch, "2", good), _row(batch, "9", good)]
    (report,) = await store.upstream.settle(rows)
    assert (report.accepted, report.drained) == (1, False)
    (report,) = await store.upstream.settle(rows)
    assert report.accepted == 0
    (report,) = await store.upstream.settle([_row(batch, "0", bad), _row(batch, "1", good)])
    assert (report.accepted, report.drained) == (2, True)

    ended = await store.batches.move(
        batch.seq, frozenset({BatchStatus.FINALIZING}), BatchStatus.COMPLETED
    )
    assert ended is not None
    assert (ended.completed, ended.failed, ended.usage) == (2, 1, Usage(input=4, output=6))
    booked = await store.ledger.usage("o", 0, 100)
    assert [(row.custom_id, row.execution, row.tier, row.at) for row in booked] == [
        ("2", "up", "batch", 7),
        ("1", "up", "batch", 7),
    ]


async def test_a_batch_that_nobody_took_can_be_withdrawn(store: SqliteStore) -> None:
    """It is gone as if it never was, and its file is free again; one that ran stays."""
    file, batch = await _batch(store)
    intent = UpstreamBatch(batch_seq=batch.seq, batch_id=batch.id, provider="up", intended_at=5)
    await store.upstream.keep_batch(intent)
    assert await store.upstream.withdraw(batch.seq)
    assert await store.batches.get(batch.id, "o") is None
    [entry] = await store.audit.page(object=batch.id)
    assert (entry.actor, entry.action, entry.owner) == ("server", "batch.withdrawn", "o")
    assert await store.upstream.unsettled() == []
    assert await store.files.delete(file.id, "o")

    _, batch = await _batch(store)
    await _lines(store, batch)
    assert not await store.upstream.withdraw(batch.seq)


async def test_leftovers_are_known_until_they_are_cleared(store: SqliteStore) -> None:
    """Of settled batches and deleted files; a newer copy of the same file is not forgotten."""
    file, batch = await _batch(store)
    copy = UpstreamFile(file_seq=file.seq, provider="up", id="file-in", created_at=1)
    await store.upstream.keep_file(copy)
    up = UpstreamBatch(
        batch_seq=batch.seq,
        batch_id=batch.id,
        provider="up",
        id="batch_up",
        input_id="file-own",
        output_id="file-out",
    )
    await store.upstream.keep_batch(up)
    assert await store.upstream.leftovers("up", 9) == []
    await store.upstream.keep_batch(msgspec.structs.replace(up, settled_at=5))
    (left,) = await store.upstream.leftovers("up", 9)
    assert (left.ids, left.file_seq) == (("file-own", "file-out"), None)  # it is still active
    open_states = frozenset({BatchStatus.VALIDATING})
    await store.batches.move(batch.seq, open_states, BatchStatus.FAILED)
    (left,) = await store.upstream.leftovers("up", 9)
    assert (left.ids, left.file_seq) == (("file-own", "file-out", "file-in"), file.seq)
    assert await store.upstream.leftovers("other", 9) == []

    await store.upstream.keep_file(msgspec.structs.replace(copy, id="file-new"))
    await store.upstream.cleared(left)
    assert await store.upstream.leftovers("up", 9) == []
    assert await store.upstream.file(file.seq, "up") is not None
    assert await store.files.delete(file.id, "o")
    (left,) = await store.upstream.leftovers("up", 9)
    assert (left.ids, left.batch_seq) == (("file-new",), None)
    await store.upstream.cleared(left)
    assert await store.upstream.file(file.seq, "up") is None
