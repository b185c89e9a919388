"""All backends of one server: a dict, two errors, and who stands in for a provider that left."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

import msgspec

from tidemill import access
from tidemill.backends.provider import ProviderBackend
from tidemill.backends.settlement import Incomplete
from tidemill.errors import BadRequest, NotSupported, ProviderNotPermitted, ProviderUnavailable
from tidemill.estimates import Examination
from tidemill.ports import Backend
from tidemill.types import (
    TERMINAL,
    Actor,
    BatchRecord,
    Execution,
    FileRecord,
    NewBatch,
    Principal,
    Upload,
)


class Here(Backend, Protocol):
    """The local path, as far as everything begins and may end there."""

    async def examine(self, upload: Upload) -> Examination:
        """What ``accept`` would do with an upload."""

    async def cancel_stranded(
        self, batch: BatchRecord, why: str, by: Actor | None = None
    ) -> BatchRecord:
        """Bring a batch here that nobody else can end, and cancel it. Raises ``Incomplete``."""


class BackendRegistry:
    """Implements ``ports.Registry``: ``here`` and the ``providers``, by name."""

    def __init__(self, here: Here, providers: Mapping[str, Backend]) -> None:
        self._backends: dict[str, Backend] = {here.name: here, **providers}
        self._here = here

    async def accept(self, upload: Upload) -> FileRecord:
        """Check and store an upload, decide where its batch will run, and hand it there.

        What is certain to be refused is refused before the body is read.
        """
        self._refuse_early(upload)
        file = await self._here.accept(upload)
        backend = self.named(file.facts.placement.backend)
        if isinstance(backend, ProviderBackend):
            await backend.take(file)
        return file

    async def examine(self, upload: Upload) -> Examination:
        """Check an upload and decide where its batch would run; keep nothing, ask no provider to
        take anything."""
        self._refuse_early(upload)
        return await self._here.examine(upload)

    def _refuse_early(self, upload: Upload) -> None:
        if upload.provider is not None and not self._is_provider(upload.provider):
            raise ProviderNotPermitted(upload.provider)
        if upload.execution == "provider" and not any(map(self._is_provider, self._backends)):
            raise NotSupported(
                "No provider with a batch API is configured; send X-Tidemill-Execution: auto or "
                "local to run the batch here."
            )

    def agree(
        self, file: FileRecord, who: Principal, execution: Execution, provider: str | None
    ) -> None:
        """Whether a create may ask for this of a file whose place was decided at upload.

        Raises ``ProviderNotPermitted``, ``NotSupported`` when
        a provider is demanded and the file runs here, and ``BadRequest`` for another place.
        """
        placed = file.facts.placement
        if provider is not None and not (
            self._is_provider(provider) and access.uses(who.limits, provider)
        ):
            raise ProviderNotPermitted(provider)
        if not file.facts.checked:
            return  # placed once its models are known, as its upload asked
        if execution == "provider" and placed.execution == "local":
            raise NotSupported(
                f"The file runs here: {placed.reason}. Where a batch runs is decided when its file "
                "is uploaded; send X-Tidemill-Execution there.",
                code="model_not_available_for_batch",
            )
        elsewhere = provider is not None and provider != placed.provider
        if placed.execution == "provider" and (execution == "local" or elsewhere):
            raise BadRequest(
                f"The file was placed at provider '{placed.provider}'. Where a batch runs is "
                "decided when its file is uploaded; upload it again with the header.",
                param="X-Tidemill-Execution" if execution == "local" else "X-Tidemill-Provider",
                code="placement_mismatch",
            )

    def named(self, name: str) -> Backend:
        """The backend of a placement; for a provider that is no longer configured one that shows
        what is on record, and can be told to cancel it."""
        return self._backends.get(name) or Departed(name, self._here)

    def shown(self, batch: BatchRecord) -> BatchRecord:
        """A batch of a list, with what its provider last said; asks nobody."""
        backend = self.named(batch.placement.backend)
        return backend.shown(batch) if isinstance(backend, ProviderBackend | Departed) else batch

    def _is_provider(self, name: str) -> bool:
        return isinstance(self._backends.get(name), ProviderBackend)


class Departed:
    """Stands for a provider that the settings no longer name: its objects remain readable, and its
    batches wait until it returns or somebody cancels them."""

    def __init__(self, name: str, here: Here) -> None:
        self.name = name
        self._here = here

    async def accept(self, upload: Upload) -> FileRecord:
        """Refused."""
        raise self._gone()

    async def open(self, new: NewBatch) -> BatchRecord:
        """Refused."""
        raise self._gone()

    async def refresh(self, batch: BatchRecord) -> BatchRecord:
        """The record, and why it does not change."""
        return self.shown(batch)

    def shown(self, batch: BatchRecord) -> BatchRecord:
        """The record, and why it does not change."""
        if batch.status in TERMINAL:
            return batch
        return msgspec.structs.replace(
            batch,
            waits=f"The provider '{self.name}' is no longer configured here. The batch goes on "
            "when it is again; a cancel ends it.",
        )

    async def cancel(self, batch: BatchRecord, by: Actor | None = None) -> BatchRecord:
        """End it here: no line gets an answer any more. The provider is told when it returns."""
        if batch.status in TERMINAL:
            return await self._here.cancel(batch, by)
        try:
            why = f"its provider '{self.name}' was no longer configured when it was cancelled"
            return await self._here.cancel_stranded(batch, why, by)
        except Incomplete as exc:
            raise self._gone() from exc

    def content(
        self, file: FileRecord, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[bytes]:
        """Our copy."""
        return self._here.content(file, start, stop)

    def _gone(self) -> ProviderUnavailable:
        return ProviderUnavailable(f"The provider '{self.name}' is no longer configured here.")
