"""``GET /pool/status``: how full the server is; the field names are BatchGen's."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import get

from tidemill.handlers.deps import Incoming, principal, services


@get("/pool/status")
async def pool_status(request: Incoming) -> dict[str, Any]:
    """Lines that wait and run, over all owners: numbers only."""
    await principal(request)
    status: dict[str, Any] = msgspec.to_builtins(await services(request).pool_status())
    return status


ROUTES = (pool_status,)
