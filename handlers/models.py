"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, get
from litestar.params import FromPath

from tidemill import wire
from tidemill.errors import ModelNotFound
from tidemill.handlers.deps import principal, services
from tidemill.types import ModelCard


@get("/models")
async def list_models(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Models served here, in configured order; never paged."""
    await principal(request)
    data = [model_object(card) for card in services(request).inference.cards()]
    return _json({"object": "list", "data": data})


@get("/models/{id:path}")
async def retrieve_model(request: Request[Any, Any, Any], id: FromPath[str]) -> Response[bytes]:
    """One model; its name may hold slashes, plain or as ``%2F``."""
    await principal(request)
    name = id.removeprefix("/")
    for card in services(request).inference.cards():
        if card.id == name:
            return _json(model_object(card))
    raise ModelNotFound(f"The model '{name}' does not exist or is not served here.", param="model")


ROUTES = (list_models, retrieve_model)


def model_object(card: ModelCard) -> dict[str, Any]:
    """A ``Model`` with what this server knows about it."""
    return {
        "id": card.id,
        "object": "model",
        "created": card.created_at,
        "owned_by": card.owned_by,
        "context_length": card.context_length,
        "capabilities": {
            "chat": card.chat,
            "embeddings": card.embeddings,
            "tools": card.tools,
        },
    }


def _json(value: dict[str, Any]) -> Response[bytes]:
    return Response(wire.encode(value), media_type="application/json")
