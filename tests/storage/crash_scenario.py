"""Two batches from upload to deletion, in steps that a killed process can take up again.

Run as ``python crash_scenario.py PATH``; every fact that the store has acknowledged is said on
stdout, one JSON array a line, before the next step begins.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import anyio

from tests.storage.world import (
    OWNER,
    REFUSAL,
    Hand,
    Input,
    S,
    fresh,
    lease,
    new_batch,
    settlement,
    upload,
)
from tidemill.storage import SqliteStore, open_store
from tidemill.types import BatchRecord, FileFacts, LineState, Page

Say = Callable[..., None]

# 1.5 MB: more than a draft collects before it writes.
SOURCES = {"answered": Input(30, width=25_000), "cancelled": Input(12)}


async def drive(store: SqliteStore, say: Say) -> None:
    """Bring both batches to their end, from wherever they are."""
    for name in SOURCES:
        batch = await _begin(store, name, say)
        if name == "answered":
            await _answer(store, batch, say)
        else:
            await _cancel(store, batch, say)


async def delete(store: SqliteStore, say: Say) -> None:
    """Delete the output of the first batch and sweep its bytes."""
    first = (await store.batches.page(OWNER, Page(order="asc")))[0][0]
    assert first.output_file_id is not None
    if await store.files.delete(first.output_file_id, OWNER):
        say("deleted", first.output_file_id)
    await store.files.sweep(1_800_000_000)


async def _begin(store: SqliteStore, name: str, say: Say) -> BatchRecord:
    source = SOURCES[name]
    files = (await store.files.page(OWNER, Page(limit=100, purpose="batch")))[0]
    file = next((one for one in files if one.filename == name), None)
    if file is None:
        facts = FileFacts(lines=len(source.lines))
        file = await upload(store, source.pieces, filename=name, facts=facts)
        say("file", file.id, file.bytes)
    batch = await store.batches.open(new_batch(file, idempotency_key=name))
    say("batch", batch.id)
    if batch.status is S.VALIDATING:
        await store.lines.add(batch.seq, source.lines[:9])
        await store.lines.add(batch.seq, source.lines)
        await store.batches.model(batch.seq, "m", len(source.lines))
        await store.batches.move(batch.seq, frozenset({S.VALIDATING}), S.IN_PROGRESS)
    return await fresh(store, batch)


async def _answer(store: SqliteStore, batch: BatchRecord, say: Say) -> None:
    while leases := await lease(store, batch, 7):
        await store.lines.settle(
            [settlement(x, REFUSAL) if x.no % 4 == 0 else settlement(x) for x in leases]
        )
        say("settled", batch.id, [x.custom_id for x in leases])
    if await store.batches.move(batch.seq, frozenset({S.FINALIZING}), S.COMPLETED):
        say("ended", batch.id)


async def _cancel(store: SqliteStore, batch: BatchRecord, say: Say) -> None:
    leases = await lease(store, batch, 5)
    await store.lines.settle([settlement(x) for x in leases[:3]])
    say("settled", batch.id, [x.custom_id for x in leases[:3]])
    await store.batches.move(batch.seq, frozenset({S.IN_PROGRESS}), S.CANCELLING)
    await store.lines.release(leases[3:])
    while await store.lines.close(batch.seq, LineState.CANCELLED, "batch_cancelled", "m", 4):
        pass
    if await store.batches.move(batch.seq, frozenset({S.CANCELLING}), S.CANCELLED):
        say("ended", batch.id)


async def main(path: Path) -> None:
    def say(*fact: object) -> None:
        print(json.dumps(fact), flush=True)

    store = open_store(path, clock=Hand(), tidy=False)
    await store.start()
    await drive(store, say)
    await delete(store, say)
    await store.close()


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]))
