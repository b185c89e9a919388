"""The pool of read-only connections and its end."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from tidemill.errors import StoreUnavailable
from tidemill.storage.connections import open_writer
from tidemill.storage.readers import Readers

pytestmark = pytest.mark.anyio


async def test_closing_waits_for_a_read_whose_caller_has_gone(tmp_path: Path) -> None:
    """A cancelled caller leaves its thread reading; the connection is closed only after it."""
    open_writer(tmp_path).close()
    readers = Readers(tmp_path)
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def read(conn: sqlite3.Connection) -> None:
        begun.set()
        go_on.wait(60)
        conn.execute("SELECT 1").fetchone()
        done.set()

    task = asyncio.create_task(readers.run(read))
    await anyio.to_thread.run_sync(begun.wait, 60)
    task.cancel()
    await asyncio.wait([task])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, readers.close)
        await anyio.sleep(0.05)
        assert not done.is_set()
        go_on.set()
    assert done.is_set()


async def test_a_closed_pool_reads_no_more(tmp_path: Path) -> None:
    """A late read gets an error that says so, and no connection stays open behind it."""
    open_writer(tmp_path).close()
    readers = Readers(tmp_path)
    readers.close()
    with pytest.raises(StoreUnavailable):
        await readers.run(lambda conn: conn.execute("SELECT 1").fetchone())
