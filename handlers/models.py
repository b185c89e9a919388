"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, get
from litestar.params import FromPath

from tidemill import access, wire
from tidemill.errors import ModelNotFound
from tidemill.handlers.deps import principal, services
from tidemill.types import ModelCard


@get("/models")
async def list_models(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Models served here that the key may use, in configured order; never paged."""
    data = [model_object(card) for card in await _cards(request)]
    return _json({"object": "list", "data": data})


@get("/models/{id:path}")
async def retrieve_model(request: Request[Any, Any, Any], id: FromPath[str]) -> Response[bytes]:
    """One model; its name may hold slashes, plain or as ``%2F``."""
    name = id.removeprefix("/")
    for card in await _cards(request):
        if card.id == name:
            return _json(model_object(card))
    raise ModelNotFound(f"The model '{name}' does not exist or is not served here.", param="model")


ROUTES = (list_models, retrieve_model)


async def _cards(request: Request[Any, Any, Any]) -> list[ModelCard]:
    who, inference = await principal(request), services(request).inference
    return [
        card
        for card in inference.cards()
        if access.permits(who.limits, card.id, inference.where(card.id))
    ]


def model_object(card: ModelCard) -> dict[str, Any]:
    """A ``Model`` with what this server knows about it."""
    return {
        "id": card.id,
        "object": "model",
        "created": card.created_at,
        "owned_by": card.owned_by,
        "context_length": card.context_length,
        "state": card.state,
        "capabilities": {
            "chat": card.chat,
            "embeddings": card.embeddings,
            "tools": card.tools,
        },
    }


def _json(value: dict[str, Any]) -> Response[bytes]:
    return Response(wire.encode(value), media_type="application/json")
