"""Parts of the store alone: for a process beside the server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread

from tidemill import clock as wall
from tidemill.ports import Clock
from tidemill.storage.accounts import SqliteAccounts
from tidemill.storage.migrations import migrate, pending
from tidemill.storage.readers import Readers
from tidemill.storage.tables import SqliteFacts, SqliteKeys, SqliteLedger
from tidemill.storage.trail import SqliteAudit
from tidemill.storage.writer import Writer


@asynccontextmanager
async def open_keys(path: Path, *, clock: Clock = wall.now_f) -> AsyncIterator[SqliteKeys]:
    """The key table of a storage path, also while a server has the store.

    SQLite lets the two processes write in turns. A store that is new or old is migrated first,
    which raises ``StoreBusy`` and ``StoreTooNew`` as ``migrate`` does.
    """
    async with _beside(path, clock) as (writer, readers):
        yield SqliteKeys(writer, readers)


@dataclass(frozen=True, slots=True)
class Office:
    """What an operator works with: who there is, what was used, who did what."""

    keys: SqliteKeys
    accounts: SqliteAccounts
    ledger: SqliteLedger
    audit: SqliteAudit


@asynccontextmanager
async def open_office(path: Path, *, clock: Clock = wall.now_f) -> AsyncIterator[Office]:
    """Keys, accounts, ledger and audit trail of a storage path; as ``open_keys``."""
    async with _beside(path, clock) as (writer, readers):
        yield Office(
            keys=SqliteKeys(writer, readers),
            accounts=SqliteAccounts(writer, readers),
            ledger=SqliteLedger(writer, readers, lambda: None),
            audit=SqliteAudit(readers),
        )


@asynccontextmanager
async def open_facts(path: Path, *, clock: Clock = wall.now_f) -> AsyncIterator[SqliteFacts]:
    """The facts of a storage path; as ``open_keys``."""
    async with _beside(path, clock) as (writer, readers):
        yield SqliteFacts(writer, readers, clock)


@asynccontextmanager
async def _beside(path: Path, clock: Clock) -> AsyncIterator[tuple[Writer, Readers]]:
    if await anyio.to_thread.run_sync(pending, path):
        await anyio.to_thread.run_sync(migrate, path)
    readers = Readers(path)
    writer = Writer(path, clock, lambda changes: None)
    writer.start()
    try:
        yield writer, readers
    finally:
        await anyio.to_thread.run_sync(writer.stop)
        readers.close()
