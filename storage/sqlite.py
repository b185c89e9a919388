"""The store on SQLite, put together."""

from __future__ import annotations

from pathlib import Path
from sqlite3 import Connection

import anyio.to_thread

from tidemill import clock as wall
from tidemill.ports import Clock
from tidemill.prices import Catalogue
from tidemill.storage import chunks
from tidemill.storage.accounts import SqliteAccounts
from tidemill.storage.batches import SqliteBatches
from tidemill.storage.files import SqliteFiles
from tidemill.storage.incremental import Incremental
from tidemill.storage.janitor import Janitor
from tidemill.storage.lines import SqliteLines
from tidemill.storage.lock import StoreLock
from tidemill.storage.migrations import migrate_locked
from tidemill.storage.money import SqliteBudgets
from tidemill.storage.queries import load
from tidemill.storage.readers import Readers
from tidemill.storage.tables import SqliteFacts, SqliteKeys, SqliteLedger
from tidemill.storage.trail import SqliteAudit
from tidemill.storage.upstream import SqliteUpstream
from tidemill.storage.writer import Writer

_Q = load("lines")


class SqliteStore:
    """``ports.Store`` in one folder: ``tidemill.db``, ``tidemill.lock`` and ``incremental/``."""

    files: SqliteFiles
    batches: SqliteBatches
    lines: SqliteLines
    keys: SqliteKeys
    ledger: SqliteLedger
    facts: SqliteFacts
    upstream: SqliteUpstream
    accounts: SqliteAccounts
    budgets: SqliteBudgets
    audit: SqliteAudit

    def __init__(
        self, path: Path, clock: Clock, *, tidy: bool, prices: Catalogue | None = None
    ) -> None:
        self._path = path
        self._lock = StoreLock(path)
        self._readers = Readers(path)
        self._incremental = Incremental(path, self._stream)
        self._writer = Writer(path, clock, self._incremental.follow, prices)
        self._tidy = tidy
        self.files = SqliteFiles(self._writer, self._readers, clock, self._ring)
        self._janitor = Janitor(self._sweep, self.files.next_expiry, clock)
        self.batches = SqliteBatches(
            self._writer, self._readers, self._incremental.ensure, self._ring
        )
        self.budgets = SqliteBudgets(self._writer, self._readers, clock)
        self.lines = SqliteLines(self._writer, self._readers, self.budgets.ring)
        self.keys = SqliteKeys(self._writer, self._readers)
        self.ledger = SqliteLedger(self._writer, self._readers, self.budgets.ring)
        self.facts = SqliteFacts(self._writer, self._readers, clock)
        self.upstream = SqliteUpstream(self._writer, self._readers)
        self.accounts = SqliteAccounts(self._writer, self._readers)
        self.audit = SqliteAudit(self._readers)

    async def start(self) -> None:
        """Take the store, migrate it, and make good what a dead process left half done.

        Drafts are swept, lines in flight go back to queued, incremental files are completed.
        Raises ``StoreBusy`` while another server has the path, ``StoreTooNew`` when a newer version
        wrote it.
        """
        self._lock.take()
        try:
            await anyio.to_thread.run_sync(migrate_locked, self._path)
            self._writer.start()
            await self.files.sweep_drafts()
            await self.facts.sweep()
            await self.lines.reclaim(None)
            await self.budgets.release_all()
            await self.upstream.unlatch_all()
            await anyio.to_thread.run_sync(self._rebuild)
            if self._tidy:
                self._janitor.start()
        except BaseException:
            self._stop()
            raise

    async def close(self) -> None:
        """Finish what is queued and let go of the path; harmless when repeated."""
        await self._janitor.stop()
        await anyio.to_thread.run_sync(self._stop)

    def healthy(self) -> str | None:
        """None, or the reason why the store cannot be written."""
        return self._writer.healthy() or self._incremental.failure

    def _stop(self) -> None:
        self._writer.stop()
        self._readers.close()
        self._incremental.close()
        self._lock.release()

    def _ring(self, at: int | None) -> None:
        if self._tidy:
            self._janitor.ring(at)

    async def _sweep(self, now: int) -> None:
        await self.files.sweep(now)
        await self.facts.sweep()

    def _rebuild(self) -> None:
        streams = self._readers.run_here(lambda conn: conn.execute(_Q["streams"]).fetchall())
        self._incremental.restore([(s["id"], s["kind"], s["bytes"]) for s in streams])

    def _stream(self, batch_id: str, kind: str, start: int, stop: int) -> bytes:
        def read(conn: Connection) -> bytes:
            seq = conn.execute(_Q["seq_of"], {"id": batch_id}).fetchone()["seq"]
            return chunks.of_rows(conn, seq, kind, start, stop, stop - start)

        return self._readers.run_here(read)


def open_store(
    path: Path,
    *,
    clock: Clock = wall.now_f,
    tidy: bool = True,
    prices: Catalogue | None = None,
) -> SqliteStore:
    """The store of a storage path, not yet started.

    ``clock`` gives epoch seconds. Without ``tidy`` nothing is removed unless ``files.sweep`` is
    called. ``prices`` are those in force for all that is booked; None: everything costs 0.
    """
    return SqliteStore(path, clock, tidy=tidy, prices=prices)
