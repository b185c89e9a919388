"""Brings files and batches to a provider, once, and records whose they are before anybody hears.

::

    our batch row ──► intent ──► create upstream ──► its id ──► answer
                                        │
                    died here: found by the id in its metadata, and adopted
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import structlog

from tidemill import clock
from tidemill.backends.dialects import Dialect
from tidemill.backends.forwarding import Forwarding, ProviderFailed, as_seen
from tidemill.backends.refusals import Failure, Meaning
from tidemill.backends.rewriting import Outbound, body_defaults
from tidemill.backends.upstreams import Upstreams
from tidemill.crash import crash_point
from tidemill.errors import OwnershipUnrecorded, TidemillError
from tidemill.ports import Store
from tidemill.types import BatchRecord, FileRecord, UpstreamBatch, UpstreamFile

log = structlog.get_logger()

_EXPIRY_MARGIN_S = 600
"""A copy with less than this left is uploaded anew."""


class Creation:
    """Uploads and creates at one provider. ``names``: our model names → its batch names."""

    def __init__(
        self,
        dialect: Dialect,
        store: Store,
        forwarding: Forwarding,
        upstreams: Upstreams,
        names: dict[str, str],
    ) -> None:
        self.name = dialect.provider.name
        self._dialect = dialect
        self._store = store
        self._forwarding = forwarding
        self._upstreams = upstreams
        self._names = names
        self._creating: dict[int, tuple[anyio.Lock, int]] = {}

    @asynccontextmanager
    async def alone(self, file_seq: int) -> AsyncIterator[None]:
        """One create of a file at a time: a repetition waits for the first one's outcome."""
        lock, waiting = self._creating.get(file_seq, (anyio.Lock(), 0))
        self._creating[file_seq] = lock, waiting + 1
        try:
            async with lock:
                yield
        finally:
            _, waiting = self._creating[file_seq]
            self._creating[file_seq] = lock, waiting - 1
            if waiting == 1:
                del self._creating[file_seq]

    async def upload(self, file: FileRecord, endpoint: str, *, anew: bool = False) -> str:
        """The provider's id of a file, uploading it unless a copy is there."""
        if not anew:
            known = await self._store.upstream.file(file.seq, self.name)
            if known is not None and (
                known.expires_at is None or known.expires_at > clock.now() + _EXPIRY_MARGIN_S
            ):
                return known.id
        id, expires_at = await self._send(file, endpoint, {})
        copy = UpstreamFile(
            file_seq=file.seq,
            provider=self.name,
            id=id,
            created_at=clock.now(),
            expires_at=expires_at,
        )
        await self._recorded(self._store.upstream.keep_file(copy), id)
        return id

    async def withdraw(self, batch: BatchRecord) -> None:
        """Take back a batch that the provider did not take, and what it was sent for it alone."""
        up = await self._upstreams.get(batch.seq)
        if await self._store.upstream.withdraw(batch.seq) and up is not None and up.input_id:
            await self._undo(self._forwarding.delete_file(up.input_id), "file", up.input_id)

    async def create(
        self, batch: BatchRecord, up: UpstreamBatch, *, again: bool = False
    ) -> UpstreamBatch:
        """Create the batch at the provider and record its id.

        The first time somebody waits for the answer: an id that cannot be recorded is undone.
        ``again``, nobody does: the batch is looked for first, since an earlier answer may have
        been lost, and one that cannot be recorded is found the next time. Raises
        ``ProviderFailed`` and ``OwnershipUnrecorded``.
        """
        found = await self.find(batch, up) if again else None
        if found is None:
            found = await self._create_or_find(batch, up)
        crash_point("provider.create.after_answer")
        assert found.id is not None
        try:
            await self._upstreams.note(found)
        except TidemillError as exc:
            if again:
                raise
            await self._undo(self._forwarding.cancel(found.id), "batch", found.id)
            raise _unrecorded() from exc
        return found

    async def find(self, batch: BatchRecord, up: UpstreamBatch) -> UpstreamBatch | None:
        """The provider's batch that carries our id, if it has one."""
        answer = await self._forwarding.find(batch.id, up.intended_at)
        return None if answer is None else as_seen(up, answer)

    async def _create_or_find(self, batch: BatchRecord, up: UpstreamBatch) -> UpstreamBatch:
        file = await self._store.files.get(batch.input_file_id, None)
        if file is None:
            raise ProviderFailed(
                Failure(meaning=Meaning.REQUEST, status=400, message="The input file is gone.")
            )
        up, file_id = await self._copy(batch, up, file)
        try:
            return as_seen(up, await self._forwarding.create(batch, file_id))
        except ProviderFailed as failed:
            if file_id in failed.failure.message:
                # The provider has lost or expired its copy; ours is still here.
                up, file_id = await self._copy(batch, up, file, anew=True)
                return as_seen(up, await self._forwarding.create(batch, file_id))
            if failed.failure.certain:
                raise
            # It may have been created although no answer came.
            found = await self.find(batch, up)
            if found is None:
                raise
            return found

    async def _copy(
        self, batch: BatchRecord, up: UpstreamBatch, file: FileRecord, *, anew: bool = False
    ) -> tuple[UpstreamBatch, str]:
        """The provider's copy of the input for this batch. One with parameters of its own gets a
        copy of its own, with them in its lines."""
        kind = self._dialect.provider.kind
        defaults = body_defaults(batch.params, batch.endpoint, kind)
        if not defaults:
            return up, await self.upload(file, batch.endpoint, anew=anew)
        if up.input_id is not None and not anew:
            return up, up.input_id
        id, _ = await self._send(file, batch.endpoint, defaults)
        up = msgspec.structs.replace(up, input_id=id)
        await self._recorded(self._upstreams.note(up), id)
        return up, id

    async def _send(
        self, file: FileRecord, endpoint: str, defaults: dict[str, Any]
    ) -> tuple[str, int | None]:
        outbound = Outbound(
            {ours: self._names[ours] for ours in file.facts.models if ours in self._names},
            url=self._dialect.spelled(endpoint),
            defaults=defaults,
        )
        return await self._forwarding.upload(file.filename, self._store.files.read(file), outbound)

    async def _recorded(self, write: Awaitable[None], file_id: str) -> None:
        try:
            await write
        except TidemillError as exc:
            await self._undo(self._forwarding.delete_file(file_id), "file", file_id)
            raise _unrecorded() from exc

    async def _undo(self, call: Awaitable[Any], what: str, id: str) -> None:
        try:
            await call
        except ProviderFailed as failed:
            log.error("orphan upstream", provider=self.name, what=what, id=id, why=str(failed))


def _unrecorded() -> OwnershipUnrecorded:
    return OwnershipUnrecorded(
        "The provider took it, but its id could not be recorded here; it was undone. Try again."
    )
