"""What is deleted or past its time goes by itself."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from sqlite_utils import Database

from tests.storage.world import OWNER, Input, S, begin, finish, lease, settlement, upload
from tidemill.storage import SqliteStore, open_store
from tidemill.storage.connections import database

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = open_store(tmp_path, clock=time.time)
    await store.start()
    yield store
    await store.close()


def _count(path: Path, table: str) -> int:
    db = Database(database(path))
    count: int = db[table].count
    db.close()
    return count


async def _left(path: Path, n: int, *tables: str) -> None:
    """Wait until that many rows are left in each of the tables."""
    with anyio.fail_after(60):
        # The janitor tells nobody that it is done.
        while any(_count(path, table) > n for table in tables):  # noqa: ASYNC110
            await anyio.sleep(0.02)


async def test_deleted_bytes_go_soon(store: SqliteStore, tmp_path: Path) -> None:
    """Nobody has to call the sweep."""
    file = await upload(store, [b"x" * 65_536] * 40)
    assert _count(tmp_path, "chunks") == 40
    await store.files.delete(file.id, OWNER)
    await _left(tmp_path, 0, "chunks", "blobs")


async def test_a_file_goes_when_its_time_comes(store: SqliteStore, tmp_path: Path) -> None:
    """The janitor plans for the earliest expiry, also of a file that comes later."""
    await upload(store, [b"late"], expires_after_s=3600)
    early = await upload(store, [b"early"], expires_after_s=1)
    await _left(tmp_path, 1, "chunks")
    assert await store.files.get(early.id, OWNER) is None


async def test_lines_of_batches_that_show_nothing_go(store: SqliteStore, tmp_path: Path) -> None:
    """Once the result files are deleted, or the batch failed as a whole; the batch itself stays."""
    done = await finish(store, await begin(store, Input(5)))
    failed = await begin(store, Input(5))
    await store.lines.settle([settlement(one) for one in await lease(store, failed, 2)])
    lost = await store.batches.move(failed.seq, frozenset({S.IN_PROGRESS}), S.FAILED)
    assert lost is not None
    for id in (done.output_file_id, lost.output_file_id):
        assert id is not None
        await store.files.delete(id, OWNER)
    await _left(tmp_path, 0, "lines", "results")
    assert (await store.batches.get(done.id, OWNER)) == done
    assert len(await store.ledger.usage(OWNER, 0, 2**40)) == 7
