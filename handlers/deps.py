"""What handlers are given: the services of this server, who is asking, and what was sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from litestar import Request
from litestar.connection import ASGIConnection
from litestar.handlers.base import BaseRouteHandler

from tidemill import access
from tidemill.errors import BadRequest, Forbidden, TooLarge
from tidemill.handlers import neighbours
from tidemill.handlers.arrears import Arrears
from tidemill.handlers.identity import LOCAL, Identities
from tidemill.pace import Pace
from tidemill.ports import Inference, ProviderDesk, Registry, Store
from tidemill.prices import Catalogue
from tidemill.settings import Settings
from tidemill.types import Actor, PoolStatus, Principal


class Services(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a handler may touch, wired by ``tidemill.app``; kept in ``app.state.services``."""

    settings: Settings
    store: Store
    backends: Registry
    inference: Inference
    pool_status: Callable[[], Awaitable[PoolStatus]]
    health: Callable[[], str | None]
    """None when healthy, else the reason."""
    identities: Identities
    """Who a secret stands for."""
    prices: Catalogue = Catalogue()
    pace: Pace = msgspec.field(default_factory=Pace)
    """Requests and tokens per minute that interactive traffic has used."""
    arrears: Arrears = msgspec.field(default_factory=Arrears)
    """What interactive traffic used and nobody could book yet."""
    providers: ProviderDesk | None = None
    wait_rows: Callable[[int, float], Awaitable[bool]] | None = None
    """True when a batch (``seq``) has new result rows or another status; False after so many
    seconds or when the server stops. None: who waits for rows is answered at once."""


Connection = ASGIConnection[Any, Any, Any, Any]
Incoming = Request[Any, Any, Any]


def services(connection: Connection) -> Services:
    """The services of the server that the request came to."""
    found: Services = connection.app.state.services
    return found


# --- who is asking ----------------------------------------------------------------------------


async def principal(connection: Connection) -> Principal:
    """Who sends this request, by ``Authorization: Bearer`` or ``api-key``; asked before the body is
    read. Raises ``Unauthenticated``; a key is never repeated in the answer. Without any key, raises
    ``Forbidden`` for a page in somebody's browser."""
    if "user" not in connection.scope:
        given = services(connection)
        who = await given.identities.of(_secret(connection))
        if who is LOCAL and not given.settings.insecure:
            neighbours.check(connection.headers)
        connection.scope["user"] = who
    found: Principal = connection.scope["user"]
    return found


async def actor(connection: Connection) -> Actor:
    """Who does what this request asks for, for the audit trail."""
    who = await principal(connection)
    return Actor(id=who.key_id or who.owner, request_id=connection.scope["state"].get("request_id"))


async def authenticated(connection: Connection, handler: BaseRouteHandler) -> None:
    """Guard of every route that is not marked ``public``; a route may need a scope of the key."""
    if handler.opt.get("public"):
        return
    who = await principal(connection)
    scope = handler.opt.get("scope")
    if scope is not None and not access.may(who, scope):
        raise Forbidden(f"This key does not have the scope '{scope}'.")


def _secret(connection: Connection) -> str:
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return connection.headers.get("api-key", "").strip()


# --- what was sent ----------------------------------------------------------------------------


async def pieces(request: Incoming) -> AsyncIterator[bytes]:
    """The body as it arrives. Raises ``BadRequest`` when the client goes away in the middle."""
    while True:
        message: Any = await request.receive()
        if message["type"] == "http.disconnect":
            raise BadRequest(
                "The connection was closed before the whole body was sent.", code="incomplete_body"
            )
        if piece := message.get("body"):
            yield piece
        if not message.get("more_body", False):
            return


async def body(request: Incoming, limit: int) -> bytes:
    """The whole body. Raises ``TooLarge`` past ``limit`` bytes."""
    parts, size = [], 0
    async for piece in pieces(request):
        size += len(piece)
        if size > limit:
            raise TooLarge(
                f"The body is larger than the limit of {limit} bytes.", code="body_too_large"
            )
        parts.append(piece)
    return b"".join(parts)


def whole_number(connection: Connection, name: str, default: int, low: int, high: int) -> int:
    """An integer of the query string. Raises ``BadRequest`` when it is none or out of range."""
    text = connection.query_params.get(name)
    if text is None or text == "":
        return default
    if not (text.isascii() and text.lstrip("-").isdigit() and len(text) < 19):
        raise BadRequest(
            f"Invalid value for '{name}': expected an integer.", param=name, code="invalid_type"
        )
    if not low <= int(text) <= high:
        raise BadRequest(
            f"Invalid value for '{name}': expected {low} to {high}, got {text}.", param=name
        )
    return int(text)
