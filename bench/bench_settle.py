"""Durable lines per second: lease and settle on the real store, each commit on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from tidemill.storage import open_store
from tidemill.types import BatchStatus, FileFacts, NewBatch, NewFile, NewLine, Settlement

LINES = 20_000


@pytest.mark.parametrize("together", [1, 64, 512])
def bench_settle(benchmark: Any, report: Any, tmp_path: Path, together: int) -> None:
    """``together`` lines in a commit, one caller: the floor that group commit improves on."""
    rounds = iter(range(1000))
    lines = LINES if together > 1 else 1000

    def run() -> None:
        anyio.run(_settle_all, tmp_path / str(next(rounds)), lines, together)

    benchmark.pedantic(run, rounds=2, iterations=1)
    report(f"lease + settle, {together} a commit", **{"lines/s": lines / benchmark.stats.stats.min})


async def _settle_all(path: Path, lines: int, together: int) -> None:
    store = open_store(path)
    await store.start()
    draft = await store.files.draft(NewFile(owner="a", filename="in.jsonl"))
    row = b'{"custom_id": "x"}\n'
    await draft.append(row)
    file = await draft.commit(FileFacts(lines=lines))
    batch = await store.batches.open(
        NewBatch(owner="a", key_id=None, file=file, endpoint="/v1/chat/completions")
    )
    await store.lines.add(
        batch.seq,
        [
            NewLine(no=no, offset=0, length=len(row) - 1, custom_id=f"l{no}", model="m")
            for no in range(1, lines + 1)
        ],
    )
    await store.batches.model(batch.seq, "m", lines)
    await store.batches.move(
        batch.seq, frozenset({BatchStatus.VALIDATING}), BatchStatus.IN_PROGRESS
    )
    done = 0
    while done < lines:
        leases = await store.lines.lease(batch.seq, together, "bench", 1 << 40)
        settlements = [
            Settlement(
                batch_seq=lease.batch_seq,
                no=lease.no,
                token=lease.token,
                ok=True,
                row=b'{"id":"batch_req_0","custom_id":"x","response":null,"error":null}',
                owner="a",
                custom_id=lease.custom_id,
                finished_at=1,
            )
            for lease in leases
        ]
        await store.lines.settle(settlements)
        done += len(leases)
    await store.close()
