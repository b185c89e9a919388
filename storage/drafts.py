"""A file on its way in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from tidemill import ids
from tidemill.crash import crash_point
from tidemill.errors import InvariantBroken, TidemillError
from tidemill.storage import money
from tidemill.storage.queries import load
from tidemill.storage.records import text
from tidemill.storage.trail import note
from tidemill.storage.writer import Tx, Writer
from tidemill.types import FileFacts, FileRecord, NewFile

_Q = load("files")
_log = structlog.get_logger(__name__)

BATCH_FILE_EXPIRY_S = 2_592_000
"""Files of purpose ``batch`` expire after 30 days unless the client says otherwise."""

_WRITE = 1024 * 1024
"""Bytes that are collected before they are written: one commit per mebibyte of upload."""

_STEP = 64
"""Chunks that one commit removes."""


class SqliteDraft:
    """Chunks of a blob that no file names yet.

    At most one write is under way while the next is collected, so that a draft holds about two
    mebibytes of memory whatever its size, and a slow disk slows its caller down.
    """

    def __init__(
        self, writer: Writer, new: NewFile, blob: int, committed: Callable[[int | None], None]
    ) -> None:
        self._writer = writer
        self._new = new
        self._blob = blob
        self._committed = committed
        self._bytes = 0
        self._waiting: list[tuple[int, int, bytes]] = []
        self._waiting_bytes = 0
        self._written: asyncio.Task[None] | None = None
        self._over = False

    async def append(self, chunk: bytes) -> None:
        """Append bytes; a chunk stays the unit of reading. Raises ``StoreUnavailable``."""
        if not chunk:
            return
        self._waiting.append((self._blob, self._bytes, bytes(chunk)))
        self._bytes += len(chunk)
        self._waiting_bytes += len(chunk)
        if self._waiting_bytes >= _WRITE:
            await self._settled()
            chunks, self._waiting, self._waiting_bytes = self._waiting, [], 0
            self._written = asyncio.create_task(self._write(chunks))

    async def commit(self, facts: FileFacts, *, expires_after_s: int | None = None) -> FileRecord:
        """Make the file visible, with its last chunks, in one commit. ``expires_after_s`` wins
        over the one that the draft was opened with. Raises ``StorageQuotaExceeded``."""
        await self._settled()
        after_s = self._new.expires_after_s if expires_after_s is None else expires_after_s
        if after_s is None and self._new.purpose == "batch":
            after_s = BATCH_FILE_EXPIRY_S

        def write(tx: Tx) -> FileRecord:
            if tx.run(_Q["hold_blob"], {"blob": self._blob}).rowcount != 1:
                raise InvariantBroken("This draft is over.")
            money.keep(tx, self._new, self._bytes)
            tx.conn.executemany(_Q["append_chunk"], self._waiting)
            values: dict[str, Any] = {
                "id": ids.file_id(),
                "owner": self._new.owner,
                "filename": self._new.filename,
                "purpose": self._new.purpose,
                "bytes": self._bytes,
                "created_at": tx.now_s,
                "expires_at": None if after_s is None else tx.now_s + after_s,
            }
            cursor = tx.run(
                _Q["insert_input"], {**values, "facts": text(facts), "blob": self._blob}
            )
            note(tx, self._new.by, "file.created", values["id"], self._new.owner)
            crash_point("draft.commit.before_commit")
            tx.after.append("draft.commit.after_commit")
            assert cursor.lastrowid is not None
            return FileRecord(seq=cursor.lastrowid, kind="input", facts=facts, **values)

        record = await self._writer.run(write)
        self._over = True
        self._waiting = []
        if record.expires_at is not None:
            self._committed(record.expires_at)
        return record

    async def discard(self) -> None:
        """Forget it; harmless after ``commit`` and when repeated.

        What cannot be removed now (the disk is full) is swept at the next start.
        """
        if self._over:
            return
        self._over = True
        self._waiting = []
        try:
            if self._written is not None:
                await asyncio.gather(self._written, return_exceptions=True)
            await self._writer.run(
                lambda tx: tx.run(_Q["kill_blob"], {"blob": self._blob}).rowcount
            )
            await remove_blob(self._writer, self._blob)
        except TidemillError as error:
            _log.warning("store.draft_left", error=error.message)

    async def _write(self, chunks: list[tuple[int, int, bytes]]) -> None:
        def write(tx: Tx) -> None:
            tx.conn.executemany(_Q["append_chunk"], chunks)
            crash_point("draft.append.before_commit")
            tx.after.append("draft.append.after_commit")

        await self._writer.run(write)

    async def _settled(self) -> None:
        written, self._written = self._written, None
        if written is not None:
            await written


async def remove_blob(writer: Writer, blob: int) -> None:
    """Remove a dead blob, a few chunks per commit."""

    def step(tx: Tx) -> int:
        tx.after.append("sweep.step.after_commit")
        n = tx.run(_Q["drop_chunks"], {"blob": blob, "n": _STEP}).rowcount
        if n == 0:
            tx.run(_Q["drop_blob"], {"blob": blob})
        return n

    while await writer.run(step):
        pass
