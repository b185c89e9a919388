"""Files of all owners."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from tidemill.errors import FileInUse, NotFound
from tidemill.ports import Clock
from tidemill.storage import chunks
from tidemill.storage.drafts import SqliteDraft, remove_blob
from tidemill.storage.queries import load
from tidemill.storage.readers import Readers
from tidemill.storage.records import file_record
from tidemill.storage.trail import note
from tidemill.storage.writer import Removed, Tx, Writer
from tidemill.types import Actor, FileRecord, NewFile, Page

_Q = load("files")

_READ = 4 * chunks.PIECE
"""Bytes that one query fetches: a hop to a thread per piece would cost more than the piece."""

_STEP = 1000
"""Rows that one commit of the sweep removes."""

ENDS = {"desc": 2**63 - 1, "asc": 0}
"""Where a page without a cursor begins."""


class SqliteFiles:
    """``ports.Files``. ``ring`` tells the janitor that there is something to remove, now (null) or
    at a time."""

    def __init__(
        self, writer: Writer, readers: Readers, clock: Clock, ring: Callable[[int | None], None]
    ) -> None:
        self._writer = writer
        self._readers = readers
        self._clock = clock
        self._ring = ring

    async def draft(self, new: NewFile) -> SqliteDraft:
        """Begin a file."""

        def write(tx: Tx) -> int:
            blob = tx.run(_Q["new_blob"], {"now": tx.now_s}).lastrowid
            assert blob is not None
            return blob

        return SqliteDraft(self._writer, new, await self._writer.run(write), self._ring)

    async def get(self, id: str, owner: str | None) -> FileRecord | None:
        """None when unknown, foreign, deleted or past its expiry."""
        values = {"id": id, "owner": owner, "now": int(self._clock())}
        row = await self._readers.run(lambda conn: conn.execute(_Q["get"], values).fetchone())
        return None if row is None else file_record(row)

    async def page(self, owner: str, page: Page) -> tuple[list[FileRecord], bool]:
        """A page and whether more follow. A cursor whose file is gone still has its place."""
        values: dict[str, Any] = {
            "owner": owner,
            "purpose": page.purpose,
            "limit": page.limit + 1,
            "now": int(self._clock()),
        }

        def read(conn: sqlite3.Connection) -> list[sqlite3.Row]:
            after = ENDS[page.order]
            if page.after is not None:
                found = conn.execute(_Q["cursor"], {"id": page.after, "owner": owner}).fetchone()
                if found is None:
                    return []
                after = found["seq"]
            return conn.execute(_Q[f"page_{page.order}"], {**values, "after": after}).fetchall()

        rows = await self._readers.run(read)
        return [file_record(row) for row in rows[: page.limit]], len(rows) > page.limit

    async def delete(self, id: str, owner: str, by: Actor | None = None) -> bool:
        """False when there was nothing to delete. Raises ``FileInUse`` while an active batch reads
        it. The file is gone at once, its bytes at the next sweep."""

        def write(tx: Tx) -> bool:
            row = tx.one(_Q["get"], {"id": id, "owner": owner, "now": tx.now_s})
            if row is None:
                return False
            reader = tx.one(_Q["reader"], {"seq": row["seq"]})
            if reader is not None:
                raise FileInUse(
                    f"File {id} is the input of batch {reader['id']}, which is still active; "
                    "cancel the batch or wait for its end."
                )
            tx.after.append("file.delete.after_commit")
            if tx.run(_Q["delete"], {"seq": row["seq"], "now": tx.now_s}).rowcount == 0:
                return False
            note(tx, by, "file.deleted", id, owner)
            return True

        deleted = await self._writer.run(write)
        if deleted:
            self._ring(None)
        return deleted

    async def read(
        self, file: FileRecord, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[bytes]:
        """Bytes ``[start, stop)``, in pieces of about 64 KiB (a longer line comes in several).

        Raises ``NotFound`` when the file is deleted, also while it is read.
        """
        source = await self._readers.run(
            lambda conn: conn.execute(_Q["source"], {"seq": file.seq}).fetchone()
        )
        if source is None:
            raise _gone(file)
        position = max(start, 0)
        end = source["bytes"] if stop is None else min(stop, source["bytes"])

        def fetch(conn: sqlite3.Connection) -> bytes:
            if source["blob"] is not None:
                return chunks.of_blob(conn, source["blob"], position, end, _READ)
            return chunks.of_rows(conn, source["batch_seq"], source["kind"], position, end, _READ)

        while position < end:
            data = await self._readers.run(fetch)
            if not data:
                raise _gone(file)
            position += len(data)
            if len(data) <= chunks.PIECE:
                yield data
            else:
                for at in range(0, len(data), chunks.PIECE):
                    yield data[at : at + chunks.PIECE]

    async def sweep(self, now: int) -> int:
        """Remove the bytes of expired and deleted files, and the lines of batches that nothing
        shows any more; a bounded number of rows per commit. Returns how many files went."""
        values = {"now": now, "n": _STEP}
        while await self._writer.run(lambda tx: tx.run(_Q["expire"], values).rowcount):
            pass
        swept = 0
        while rows := await self._readers.run(
            lambda conn: conn.execute(_Q["to_sweep"], {"n": _STEP}).fetchall()
        ):
            for row in rows:
                await self._sweep_file(row)
                swept += 1
        await self.sweep_blobs()
        await self._prune()
        return swept

    async def next_expiry(self) -> int | None:
        """When the next file expires that no active batch reads."""
        row = await self._readers.run(lambda conn: conn.execute(_Q["next_expiry"]).fetchone())
        return None if row is None else int(row["expires_at"])

    async def sweep_drafts(self) -> None:
        """At start: drafts of the process that died."""
        await self._writer.run(lambda tx: tx.run(_Q["kill_drafts"]).rowcount)
        await self.sweep_blobs()

    async def sweep_blobs(self) -> None:
        """Remove all dead blobs."""
        while rows := await self._readers.run(
            lambda conn: conn.execute(_Q["dead_blobs"], {"n": _STEP}).fetchall()
        ):
            for row in rows:
                await remove_blob(self._writer, row["seq"])

    async def _sweep_file(self, row: sqlite3.Row) -> None:
        seq, batch_seq, kind, blob = row["seq"], row["batch_seq"], row["kind"], row["blob"]
        if blob is not None:

            def let_go(tx: Tx) -> None:
                tx.run(_Q["swept"], {"seq": seq, "now": tx.now_s})
                tx.run(_Q["bury_blob"], {"blob": blob})

            await self._writer.run(let_go)
            await remove_blob(self._writer, blob)
            return

        def swept(tx: Tx) -> None:
            tx.run(_Q["swept"], {"seq": seq, "now": tx.now_s})
            tx.changes.append(Removed(row["batch_id"], kind))

        await self._drop("drop_rows", {"batch_seq": batch_seq, "kind": kind})
        await self._writer.run(swept)

    async def _prune(self) -> None:
        while rows := await self._readers.run(
            lambda conn: conn.execute(_Q["to_prune"], {"n": _STEP}).fetchall()
        ):
            for row in rows:
                values = {"batch_seq": row["seq"]}
                await self._drop("drop_lines", values)
                await self._drop("drop_all_rows", values)
                await self._writer.run(partial(_pruned, values=values))

    async def _drop(self, query: str, values: dict[str, Any]) -> None:
        def step(tx: Tx) -> int:
            tx.after.append("sweep.step.after_commit")
            return tx.run(_Q[query], {**values, "n": _STEP}).rowcount

        while await self._writer.run(step):
            pass


def _pruned(tx: Tx, values: dict[str, Any]) -> None:
    tx.run(_Q["pruned"], values)


def _gone(file: FileRecord) -> NotFound:
    return NotFound(f"No such File object: {file.id}", param="id")
