"""The result streams as files that one may ``tail -f`` while a batch runs.

The store is the truth; ``{storage_path}/incremental/{batch_id}.jsonl`` follows it, and so does
``{batch_id}.errors.jsonl``. A row is written after its commit, at the offset that the commit gave
it, so that a row can be written twice but never stand there twice::

    commit  ├── row 1 ──┼── row 2 ──┤
    file    ├── row 1 ──┼── ro          died here: the next start completes it from the store
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from tidemill.crash import armed, crash_point
from tidemill.storage.chunks import PIECE
from tidemill.storage.writer import Appended, Change, Finished, Removed

FOLDER = "incremental"

_OPEN = 64
"""Most files that are held open."""

_COPY = 16 * PIECE
"""Bytes that a rebuild copies at once."""

_log = structlog.get_logger(__name__)

Fetch = Callable[[str, str, int, int], bytes]
"""``(batch_id, kind, start, stop)``: these bytes of a stream, from the store."""


class Incremental:
    """Writes the incremental files. Once the store has started, only the write thread calls it."""

    def __init__(self, path: Path, fetch: Fetch) -> None:
        self._folder = path / FOLDER
        self._fetch = fetch
        self._handles: OrderedDict[tuple[str, str], int] = OrderedDict()
        self.failure: str | None = None
        """Why the last append failed; None after one that did not."""

    def file(self, batch_id: str, kind: str) -> Path:
        """Where a stream's file is."""
        return self._folder / (
            f"{batch_id}.jsonl" if kind == "output" else f"{batch_id}.errors.jsonl"
        )

    def follow(self, changes: list[Change]) -> None:
        """Do what a commit asks for. A failure is kept for ``/health`` and made good by the next
        append to the same file, the batch's end or the next start: the commit stands either way."""
        for change in changes:
            try:
                match change:
                    case Appended():
                        self._append(change)
                        self.failure = None
                    case Finished(batch_id):
                        for kind in ("output", "error"):
                            self._let_go(batch_id, kind)
                    case Removed(batch_id, kind):
                        self._let_go(batch_id, kind)
                        self.file(batch_id, kind).unlink(missing_ok=True)
            except OSError as exc:
                self._failed(change.batch_id, exc)

    def restore(self, streams: Sequence[tuple[str, str, int]]) -> None:
        """At start: make the files of these streams ``(batch_id, kind, size)`` equal to the store
        and remove those of streams that are no longer shown. A full disk is kept for ``/health``:
        the files follow later, the server starts."""
        shown = {self.file(batch_id, kind) for batch_id, kind, _ in streams}
        try:
            for batch_id, kind, size in streams:
                self.complete(batch_id, kind, size)
                self._let_go(batch_id, kind)
            if self._folder.is_dir():
                for file in self._folder.glob("batch_*.jsonl"):
                    if file not in shown:
                        file.unlink(missing_ok=True)
        except OSError as exc:
            self._failed("", exc)

    def ensure(self, batch_id: str, sizes: dict[str, int]) -> None:
        """Before a batch ends: complete what an earlier failure left short."""
        try:
            for kind, size in sizes.items():
                file = self.file(batch_id, kind)
                if size and (not file.exists() or file.stat().st_size != size):
                    self.complete(batch_id, kind, size)
                    self.failure = None
        except OSError as exc:
            self._failed(batch_id, exc)

    def complete(self, batch_id: str, kind: str, size: int) -> None:
        """Make a stream's file equal to the store's first ``size`` bytes, cheaply where it is.

        A file of the right length whose last 64 KiB are right is taken to be right; a shorter one
        is continued when its own end is; everything else is written anew.
        """
        file = self.file(batch_id, kind)
        have = file.stat().st_size if file.exists() else 0
        if have == 0 and size == 0:
            return
        fd = self._handle(batch_id, kind)
        keep = min(have, size)
        tail = max(0, keep - PIECE)
        if keep and os.pread(fd, keep - tail, tail) != self._fetch(batch_id, kind, tail, keep):
            keep = 0
        if have > keep:
            os.ftruncate(fd, keep)
        self._copy(fd, batch_id, kind, keep, size)

    def close(self) -> None:
        """Let go of all files."""
        while self._handles:
            os.close(self._handles.popitem()[1])

    def _append(self, piece: Appended) -> None:
        fd = self._handle(piece.batch_id, piece.kind)
        size = os.fstat(fd).st_size
        if size < piece.start:  # an earlier append failed
            self._copy(fd, piece.batch_id, piece.kind, size, piece.start)
        if armed("incremental.append.half_a_row"):
            _write(fd, piece.data[: len(piece.data) - 2], piece.start)
            crash_point("incremental.append.half_a_row")
        _write(fd, piece.data, piece.start)

    def _let_go(self, batch_id: str, kind: str) -> None:
        fd = self._handles.pop((batch_id, kind), None)
        if fd is not None:
            os.close(fd)

    def _failed(self, batch_id: str, exc: OSError) -> None:
        self.failure = f"the incremental files cannot be written: {exc.strerror}"
        _log.error("store.incremental_failed", batch=batch_id, error=str(exc))

    def _copy(self, fd: int, batch_id: str, kind: str, start: int, stop: int) -> None:
        while start < stop:
            data = self._fetch(batch_id, kind, start, min(stop, start + _COPY))
            if not data:
                raise OSError(0, f"the store has no byte {start} of the {kind} of {batch_id}")
            _write(fd, data, start)
            start += len(data)

    def _handle(self, batch_id: str, kind: str) -> int:
        key = (batch_id, kind)
        fd = self._handles.get(key)
        if fd is not None:
            self._handles.move_to_end(key)
            return fd
        self._folder.mkdir(exist_ok=True, mode=0o700)
        while len(self._handles) >= _OPEN:
            os.close(self._handles.popitem(last=False)[1])
        fd = os.open(self.file(batch_id, kind), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._handles[key] = fd
        return fd


def _write(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        n = os.pwrite(fd, view, at)
        view, at = view[n:], at + n
