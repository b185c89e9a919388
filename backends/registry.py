"""All backends of one server: a dict and two errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from tidemill import access
from tidemill.backends.provider import ProviderBackend
from tidemill.errors import BadRequest, Forbidden, NotSupported, ProviderUnavailable
from tidemill.estimates import Examination
from tidemill.ports import Backend
from tidemill.types import Actor, BatchRecord, Execution, FileRecord, NewBatch, Principal, Upload

Examine = Callable[[Upload], Awaitable[Examination]]


class BackendRegistry:
    """Implements ``ports.Registry``. ``backends`` has ``local`` and the providers by name;
    ``examine`` is what ``local`` would do with an upload."""

    def __init__(self, backends: Mapping[str, Backend], examine: Examine) -> None:
        self._backends = dict(backends)
        self._examine = examine

    async def accept(self, upload: Upload) -> FileRecord:
        """Check and store an upload, decide where its batch will run, and hand it there.

        What is certain to be refused is refused before the body is read.
        """
        self._refuse_early(upload)
        file = await self._backends["local"].accept(upload)
        backend = self.named(file.facts.placement.backend)
        if isinstance(backend, ProviderBackend):
            await backend.take(file)
        return file

    async def examine(self, upload: Upload) -> Examination:
        """Check an upload and decide where its batch would run; keep nothing, ask no provider to
        take anything."""
        self._refuse_early(upload)
        return await self._examine(upload)

    def _refuse_early(self, upload: Upload) -> None:
        if upload.provider is not None and not self._is_provider(upload.provider):
            raise _not_permitted(upload.provider)
        if upload.execution == "provider" and not any(map(self._is_provider, self._backends)):
            raise NotSupported(
                "No provider with a batch API is configured; send X-Tidemill-Execution: auto or "
                "local to run the batch here."
            )

    def agree(
        self, file: FileRecord, who: Principal, execution: Execution, provider: str | None
    ) -> None:
        """Whether a create may ask for this of a file whose place was decided at upload.

        Raises ``Forbidden`` for a provider that is unknown or not permitted, ``NotSupported`` when
        a provider is demanded and the file runs here, and ``BadRequest`` for another place.
        """
        placed = file.facts.placement
        if provider is not None and not (
            self._is_provider(provider) and access.uses(who.limits, provider)
        ):
            raise _not_permitted(provider)
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
        what is on record and does nothing else."""
        return self._backends.get(name) or Departed(name, self._backends["local"])

    def shown(self, batch: BatchRecord) -> BatchRecord:
        """A batch of a list, with what its provider last said; asks nobody."""
        backend = self._backends.get(batch.placement.backend)
        return backend.shown(batch) if isinstance(backend, ProviderBackend) else batch

    def _is_provider(self, name: str) -> bool:
        return isinstance(self._backends.get(name), ProviderBackend)


def _not_permitted(provider: str) -> Forbidden:
    return Forbidden(
        f"The key may not use a provider named '{provider[:100]}'.",
        param="X-Tidemill-Provider",
        code="provider_not_permitted",
    )


class Departed:
    """Stands for a provider that the settings no longer name: its objects remain readable."""

    def __init__(self, name: str, local: Backend) -> None:
        self.name = name
        self._local = local

    async def accept(self, upload: Upload) -> FileRecord:
        """Refused."""
        raise self._gone()

    async def open(self, new: NewBatch) -> BatchRecord:
        """Refused."""
        raise self._gone()

    async def refresh(self, batch: BatchRecord) -> BatchRecord:
        """The record."""
        return batch

    async def cancel(self, batch: BatchRecord, by: Actor | None = None) -> BatchRecord:
        """Refused: nobody can be told."""
        raise self._gone()

    def content(
        self, file: FileRecord, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[bytes]:
        """Our copy."""
        return self._local.content(file, start, stop)

    def _gone(self) -> ProviderUnavailable:
        return ProviderUnavailable(f"The provider '{self.name}' is no longer configured here.")
