"""One server per store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.errors import StoreBusy
from tidemill.storage import migrate, open_keys, open_store
from tidemill.types import KeyRecord

pytestmark = pytest.mark.anyio

_HOLD = """
import anyio, sys
from pathlib import Path
from tidemill.storage import open_store

async def main():
    await open_store(Path(sys.argv[1])).start()
    print("started", flush=True)
    await anyio.sleep_forever()

anyio.run(main)
"""


def _server(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path)], stdout=subprocess.PIPE, text=True
    )


async def test_a_second_server_is_refused(tmp_path: Path) -> None:
    """One sentence names the path and the process; the first goes on, and leaves the path free."""
    first = open_store(tmp_path)
    await first.start()
    with pytest.raises(StoreBusy) as refused:
        await open_store(tmp_path).start()
    assert str(tmp_path) in refused.value.message
    assert f"process {os.getpid()}" in refused.value.message
    with pytest.raises(StoreBusy):
        migrate(tmp_path)
    await first.facts.put("k", "a", b"v")
    await first.close()
    second = open_store(tmp_path)
    await second.start()
    assert await second.facts.get("k", "a") is not None
    await second.close()
    await second.close()


async def test_a_killed_server_leaves_the_path_free(tmp_path: Path) -> None:
    """The lock dies with its process; while it lives it is named."""
    holder = _server(tmp_path)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "started\n"
        with pytest.raises(StoreBusy, match=f"process {holder.pid}"):
            await open_store(tmp_path).start()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    store = open_store(tmp_path)
    await store.start()
    assert store.healthy() is None
    await store.close()


async def test_a_failed_start_leaves_the_path_free(tmp_path: Path) -> None:
    """A database that is none stops the start, not the next one."""
    (tmp_path / "tidemill.db").write_bytes(b"this is not a database, " * 100)
    with pytest.raises(Exception, match="not a database"):
        await open_store(tmp_path).start()
    (tmp_path / "tidemill.db").unlink()
    store = open_store(tmp_path)
    await store.start()
    await store.close()


async def test_a_store_that_was_never_started_can_be_closed(tmp_path: Path) -> None:
    """And says that it cannot be written."""
    store = open_store(tmp_path / "none")
    assert store.healthy() is not None
    await store.close()
    assert not (tmp_path / "none").exists()


async def test_keys_are_managed_beside_a_server(tmp_path: Path) -> None:
    """The server sees a key that another process adds, and its revocation."""

    key = KeyRecord(id="key_1", name="n", owner="o", prefix="tm-", digest="d", created_at=1)
    async with open_keys(tmp_path) as keys:  # a new store: made first
        assert await keys.page() == []
    store = open_store(tmp_path)
    await store.start()
    async with open_keys(tmp_path) as keys:
        await keys.add(key)
        assert await store.keys.find("d") == key
        await keys.revoke("key_1")
    found = await store.keys.find("d")
    assert found is not None
    assert found.revoked_at is not None
    await store.close()
