"""The incremental files follow the store, whatever happens to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

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
    lease,
    settlement,
)
from tidemill.ports import Store
from tidemill.storage import SqliteStore, open_store
from tidemill.types import BatchRecord, LineState

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = open_store(tmp_path, clock=Hand(), tidy=False)
    await store.start()
    yield store
    await store.close()


def _file(path: Path, batch: BatchRecord, kind: str) -> Path:
    end = "jsonl" if kind == "output" else "errors.jsonl"
    return path / "incremental" / f"{batch.id}.{end}"


def _bytes(path: Path, batch: BatchRecord, kind: str) -> bytes:
    file = _file(path, batch, kind)
    return file.read_bytes() if file.exists() else b""


def _open_files() -> int:
    held = [link.resolve().name for link in Path("/proc/self/fd").iterdir() if link.exists()]
    return sum(name.endswith(".jsonl") for name in held)


async def _stored(store: Store, batch: BatchRecord, kind: str) -> bytes:
    rows = await store.lines.rows(batch.seq, 0, 10**6)
    return b"".join(row.row + b"\n" for row in rows if row.kind == kind)


async def _agree(store: Store, path: Path, batch: BatchRecord) -> None:
    for kind in ("output", "error"):
        assert _bytes(path, batch, kind) == await _stored(store, batch, kind), kind


async def _half_done(store: Store, *, pad: int = 0) -> BatchRecord:
    """A batch of nine with four successes, two failures and three lines to go."""
    batch = await begin(store, Input(9))
    leases = await lease(store, batch, 6)
    await store.lines.settle(
        [
            settlement(one, REFUSAL) if one.no % 3 == 0 else settlement(one, pad=pad)
            for one in leases
        ]
    )
    return batch


async def test_rows_are_there_when_the_settlement_returns(
    store: SqliteStore, tmp_path: Path
) -> None:
    """Both streams equal the store after every settlement and after lines are closed."""
    batch = await begin(store, Input(9))
    while leases := await lease(store, batch, 2):
        await store.lines.settle([settlement(one) for one in leases])
        await _agree(store, tmp_path, batch)
        if leases[0].no > 4:
            break
    await store.batches.move(batch.seq, frozenset({S.IN_PROGRESS}), S.CANCELLING)
    while await store.lines.close(batch.seq, LineState.CANCELLED, "batch_cancelled", "m", 2):
        await _agree(store, tmp_path, batch)
    assert _bytes(tmp_path, batch, "error").count(b"batch_cancelled") > 0


async def test_the_file_is_the_output_file(store: SqliteStore, tmp_path: Path) -> None:
    """What was followed while the batch ran is, byte for byte, what is downloaded."""
    batch = await finish(store, await _half_done(store))
    for id, kind in ((batch.output_file_id, "output"), (batch.error_file_id, "error")):
        assert id is not None
        file = await store.files.get(id, OWNER)
        assert file is not None
        assert await content(store, file) == _bytes(tmp_path, batch, kind)


@pytest.mark.parametrize("damage", ["gone", "half a row", "longer", "changed", "other", "empty"])
@pytest.mark.parametrize("ended", [False, True])
async def test_a_start_makes_the_files_equal_to_the_store(
    tmp_path: Path, damage: str, ended: bool
) -> None:
    """Missing, short, long or different: afterwards it is right, and grows on rightly."""
    store = open_store(tmp_path, clock=Hand(), tidy=False)
    await store.start()
    batch = await _half_done(store, pad=40_000)
    if ended:
        batch = await finish(store, batch)
    await store.close()
    file = _file(tmp_path, batch, "output")
    right = file.read_bytes()
    assert len(right) > 2 * 65536
    match damage:
        case "gone":
            file.unlink()
        case "half a row":
            file.write_bytes(right[:-100])
        case "longer":
            file.write_bytes(right + b'{"half": "a ro')
        case "changed":
            file.write_bytes(right[:-20] + b"x" * 20)
        case "other":
            file.write_bytes(b"y" * 1000)
        case "empty":
            file.write_bytes(b"")
    store = open_store(tmp_path, clock=Hand(), tidy=False)
    await store.start()
    assert file.read_bytes() == right
    if not ended:
        await finish(store, batch)
    await _agree(store, tmp_path, batch)
    await store.close()


async def test_a_file_that_cannot_be_written_costs_no_result(
    store: SqliteStore, tmp_path: Path
) -> None:
    """The settlement stands, health says why, and the next append makes the file whole."""
    batch = await begin(store, Input(4))
    leases = await lease(store, batch)
    file = _file(tmp_path, batch, "output")
    file.parent.mkdir(exist_ok=True)
    file.mkdir()  # opening it fails
    (report,) = await store.lines.settle([settlement(one) for one in leases[:2]])
    assert report.accepted == 2
    assert "incremental" in (store.healthy() or "")
    file.rmdir()
    await store.lines.settle([settlement(leases[2])])
    assert store.healthy() is None
    await _agree(store, tmp_path, batch)


async def test_the_end_completes_what_an_append_missed(store: SqliteStore, tmp_path: Path) -> None:
    """A batch is not seen ended before its files are whole."""
    batch = await begin(store, Input(3))
    leases = await lease(store, batch)
    await store.lines.settle([settlement(one) for one in leases])
    file = _file(tmp_path, batch, "output")
    right = file.read_bytes()
    file.write_bytes(right[:50])
    await store.batches.move(batch.seq, frozenset({S.FINALIZING}), S.COMPLETED)
    assert file.read_bytes() == right


async def test_many_batches_share_a_bounded_number_of_open_files(
    store: SqliteStore, tmp_path: Path
) -> None:
    """More streams than handles: each still gets its rows, in order."""
    batches = await asyncio.gather(*(begin(store, Input(2)) for _ in range(70)))

    async def answer_one(batch: BatchRecord) -> None:
        await store.lines.settle([settlement(one) for one in await lease(store, batch, 1)])

    for _ in range(2):
        await asyncio.gather(*(answer_one(batch) for batch in batches))
    assert 1 <= _open_files() <= 64
    for batch in batches:
        await _agree(store, tmp_path, batch)


async def test_a_deleted_result_is_followed_no_more(tmp_path: Path) -> None:
    """The sweep removes its incremental file, and no start brings it back."""
    clock = Hand()
    store = open_store(tmp_path, clock=clock, tidy=False)
    await store.start()
    batch = await finish(store, await _half_done(store))
    for id in (batch.output_file_id, batch.error_file_id):
        assert id is not None
        await store.files.delete(id, OWNER)
    await store.files.sweep(int(clock.now))
    assert list((tmp_path / "incremental").iterdir()) == []
    await store.close()
    (tmp_path / "incremental" / f"{batch.id}.jsonl").write_bytes(b"left by a crash\n")
    store = open_store(tmp_path, clock=clock, tidy=False)
    await store.start()
    assert list((tmp_path / "incremental").iterdir()) == []
    await store.close()
