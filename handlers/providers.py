"""``/providers``: what is known of this server's providers, and forgetting what was learned."""

from __future__ import annotations

from typing import Any

from litestar import delete, get
from litestar.params import FromPath

from tidemill import access, wire
from tidemill.access import ADMIN
from tidemill.errors import NotFound
from tidemill.handlers.deps import Incoming, actor, principal, services
from tidemill.types import Principal


@get("/providers")
async def list_providers(request: Incoming) -> dict[str, Any]:
    """Each provider that the key may use, with its verdict, the verdict's age and reason, and the
    models not batched; of the models those that the key may use there."""
    who, desk = await principal(request), services(request).providers
    rows = [] if desk is None else await desk.report()
    return wire.list_object([_seen_by(who, row) for row in rows if _uses(who, row)], has_more=False)


@delete("/providers/{provider:str}/refusals", status_code=200, opt={"scope": ADMIN})
async def forget_refusals(request: Incoming, provider: FromPath[str]) -> dict[str, Any]:
    """Send a provider again what it refused to batch: one ``model``, or all of them."""
    desk = services(request).providers
    if desk is None:
        raise NotFound(f"No provider is named '{provider[:100]}'.", param="provider")
    models = request.query_params.getall("model", None)
    forgotten = await desk.forget(provider, models, await actor(request))
    return {"object": "provider.refusals", "forgotten": forgotten}


def _uses(who: Principal, row: dict[str, Any]) -> bool:
    return access.uses(who.limits, row["id"])


def _seen_by(who: Principal, row: dict[str, Any]) -> dict[str, Any]:
    def may(model: str) -> bool:
        return access.permits(who.limits, model, row["id"])

    return {
        **row,
        "models": [model for model in row["models"] if may(model)],
        "not_batched": [one for one in row["not_batched"] if may(one["model"])],
    }


ROUTES = (list_providers, forget_refusals)
