"""All backends of one server: a dict and two errors."""

from __future__ import annotations

from collections.abc import Mapping

from tidemill.errors import Forbidden, NotFound, NotSupported
from tidemill.ports import Backend
from tidemill.types import FileRecord, Upload


class BackendRegistry:
    """Implements ``ports.Registry``."""

    def __init__(self, backends: Mapping[str, Backend]) -> None:
        self._backends = dict(backends)

    async def accept(self, upload: Upload) -> FileRecord:
        """Check and store an upload, and decide where its batch will run."""
        if upload.provider is not None:
            raise Forbidden(
                f"The key may not use a provider named '{upload.provider}'.",
                param="X-Tidemill-Provider",
            )
        if upload.execution == "provider":
            raise NotSupported(
                "No provider with a batch API is configured; send X-Tidemill-Execution: auto or "
                "local to run the batch here."
            )
        return await self.named("local").accept(upload)

    def named(self, name: str) -> Backend:
        """The backend of a placement."""
        try:
            return self._backends[name]
        except KeyError:
            raise NotFound(f"The backend '{name}' of this object is not configured.") from None
