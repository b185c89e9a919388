"""``/providers``: what is known of this server's providers, and forgetting what was learned."""

from __future__ import annotations

from typing import Any

from litestar import delete, get
from litestar.params import FromPath

from tidemill import wire
from tidemill.access import ADMIN
from tidemill.errors import NotFound
from tidemill.handlers.deps import Incoming, principal, services


@get("/providers")
async def list_providers(request: Incoming) -> dict[str, Any]:
    """Each provider with its verdict, the verdict's age and reason, and the models not batched."""
    await principal(request)
    desk = services(request).providers
    return wire.list_object([] if desk is None else await desk.report(), has_more=False)


@delete("/providers/{provider:str}/refusals", status_code=200, opt={"scope": ADMIN})
async def forget_refusals(request: Incoming, provider: FromPath[str]) -> dict[str, Any]:
    """Send a provider again what it refused to batch: one ``model``, or all of them."""
    await principal(request)
    desk = services(request).providers
    if desk is None:
        raise NotFound(f"No provider is named '{provider[:100]}'.", param="provider")
    models = request.query_params.getall("model", None)
    return {"object": "provider.refusals", "forgotten": await desk.forget(provider, models)}


ROUTES = (list_providers, forget_refusals)
