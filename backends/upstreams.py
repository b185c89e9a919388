"""One provider's side of our batches: written through to the store, kept at hand for lists."""

from __future__ import annotations

import msgspec

from tidemill import clock
from tidemill.backends.forwarding import ENDS
from tidemill.ports import Store
from tidemill.types import TERMINAL, BatchRecord, BatchStatus, UpstreamBatch


class Upstreams:
    """What the provider ``name`` last said of each open batch."""

    def __init__(self, name: str, store: Store) -> None:
        self.name = name
        self._store = store
        self._seen: dict[int, UpstreamBatch] = {}

    async def get(self, batch_seq: int) -> UpstreamBatch | None:
        """As stored."""
        return await self._store.upstream.batch(batch_seq)

    async def note(self, up: UpstreamBatch) -> None:
        """Store what was learned."""
        await self._store.upstream.keep_batch(up)
        self._seen[up.batch_seq] = up

    async def settled(self, up: UpstreamBatch) -> None:
        """It is over: it will not be looked at again."""
        ended = msgspec.structs.replace(up, settled_at=clock.now(), tries=0)
        await self._store.upstream.keep_batch(ended)
        self._seen.pop(up.batch_seq, None)

    async def ids(self, batch: BatchRecord, up: UpstreamBatch) -> dict[str, str]:
        """What the provider calls a batch and its files, by our ids."""
        copy = await self._store.upstream.file(batch.input_file_seq, self.name)
        theirs = {
            batch.id: up.id,
            batch.input_file_id: up.input_id or (copy and copy.id),
            batch.output_file_id or "output_file_id": up.output_id,
            batch.error_file_id or "error_file_id": up.error_id,
        }
        return {ours: their for ours, their in theirs.items() if their}

    def looked(self, batch_seq: int) -> tuple[int, int]:
        """When the batch was last looked at by this process, and how many looks failed in a row;
        zeros when it never was."""
        up = self._seen.get(batch_seq)
        return (0, 0) if up is None else (up.looked_at, up.tries)

    def shown(self, batch: BatchRecord) -> BatchRecord:
        """Our record with the provider's counts and phase, as last seen; asks nobody."""
        up = self._seen.get(batch.seq)
        if up is None or batch.status in TERMINAL or batch.placement.backend != self.name:
            return batch
        completed = max(batch.completed, min(up.completed, batch.total))
        failed = max(batch.failed, min(up.failed, batch.total - completed))
        batch = msgspec.structs.replace(batch, completed=completed, failed=failed)
        ending = up.status == "finalizing" or up.status in ENDS
        if ending and batch.status is BatchStatus.IN_PROGRESS:
            return msgspec.structs.replace(
                batch, status=BatchStatus.FINALIZING, finalizing_at=up.looked_at
            )
        return batch
