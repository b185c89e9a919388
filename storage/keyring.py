"""The keys alone, for a process beside the server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio.to_thread

from tidemill import clock as wall
from tidemill.ports import Clock
from tidemill.storage.migrations import migrate, pending
from tidemill.storage.readers import Readers
from tidemill.storage.tables import SqliteKeys
from tidemill.storage.writer import Writer


@asynccontextmanager
async def open_keys(path: Path, *, clock: Clock = wall.now_f) -> AsyncIterator[SqliteKeys]:
    """The key table of a storage path, also while a server has the store.

    SQLite lets the two processes write in turns. A store that is new or old is migrated first,
    which raises ``StoreBusy`` and ``StoreTooNew`` as ``migrate`` does.
    """
    if await anyio.to_thread.run_sync(pending, path):
        await anyio.to_thread.run_sync(migrate, path)
    readers = Readers(path)
    writer = Writer(path, clock, lambda changes: None)
    writer.start()
    try:
        yield SqliteKeys(writer, readers)
    finally:
        await anyio.to_thread.run_sync(writer.stop)
        readers.close()
