"""Reads: a few read-only connections, each used by one worker thread at a time."""

from __future__ import annotations

import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import anyio.to_thread

from tidemill.errors import StoreUnavailable
from tidemill.storage.connections import open_reader

T = TypeVar("T")


class Readers:
    """A pool of read-only connections behind a limiter of its own.

    A read sees every commit that was acknowledged before it began. Each call is one short
    transaction, so that no reader holds the write-ahead log open.
    """

    def __init__(self, path: Path, n: int = 4) -> None:
        self._path = path
        self._limiter = anyio.CapacityLimiter(n)
        self._idle: deque[sqlite3.Connection] = deque()
        self._lent = 0
        self._closed = False
        self._returned = threading.Condition()

    async def run(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """The result of ``fn`` on a connection of the pool, in a worker thread."""
        return await anyio.to_thread.run_sync(self.run_here, fn, limiter=self._limiter)

    def run_here(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """The same in the calling thread. Raises ``StoreUnavailable`` once the pool is closed."""
        conn = self._borrow()
        try:
            return fn(conn)
        finally:
            with self._returned:
                self._idle.append(conn)
                self._lent -= 1
                self._returned.notify_all()

    def close(self) -> None:
        """Close all connections, once they are back.

        Cancelling whoever waits for a read does not stop the thread that reads, and closing a
        connection under it would end the process.
        """
        with self._returned:
            self._closed = True
            self._returned.wait_for(lambda: self._lent == 0)
            while self._idle:
                self._idle.pop().close()

    def _borrow(self) -> sqlite3.Connection:
        with self._returned:
            if self._closed:
                raise StoreUnavailable("The store is shut down.")
            self._lent += 1
            if self._idle:
                return self._idle.pop()
        try:
            return open_reader(self._path)
        except BaseException:
            with self._returned:
                self._lent -= 1
                self._returned.notify_all()
            raise
