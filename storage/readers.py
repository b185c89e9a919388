"""Reads: a few read-only connections, each used by one worker thread at a time."""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import anyio.to_thread

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
        self._all: list[sqlite3.Connection] = []

    async def run(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """The result of ``fn`` on a connection of the pool, in a worker thread."""
        return await anyio.to_thread.run_sync(self.run_here, fn, limiter=self._limiter)

    def run_here(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """The same in the calling thread."""
        try:
            conn = self._idle.pop()
        except IndexError:
            conn = open_reader(self._path)
            self._all.append(conn)
        try:
            return fn(conn)
        finally:
            self._idle.append(conn)

    def close(self) -> None:
        """Close all connections; nobody may be reading."""
        self._idle.clear()
        while self._all:
            self._all.pop().close()
