"""Files of any size pass through a bounded amount of memory."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import pytest

from tests.storage.world import Hand
from tidemill.storage import open_store
from tidemill.types import FileFacts, NewFile

pytestmark = pytest.mark.anyio

_MIB = 1 << 20


async def test_an_upload_and_a_download_are_flat(tmp_path: Path) -> None:
    """96 MiB in and out again hold less than 8 MiB at any time."""
    store = open_store(tmp_path, clock=Hand(), tidy=False)
    await store.start()
    draft = await store.files.draft(NewFile(owner="o", filename="big"))
    gc.collect()
    tracemalloc.start()
    try:
        for i in range(96 * 16):
            await draft.append(b"%063d\n" % i * 1024)
        file = await draft.commit(FileFacts(lines=1))
        assert tracemalloc.get_traced_memory()[1] < 8 * _MIB
        tracemalloc.reset_peak()
        total = 0
        async for piece in store.files.read(file):
            total += len(piece)
        assert tracemalloc.get_traced_memory()[1] < 8 * _MIB
    finally:
        tracemalloc.stop()
    assert total == file.bytes == 96 * _MIB
    await store.close()
