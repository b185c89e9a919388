"""What handlers are given: the services of this server, who is asking, and what was sent."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import lru_cache
from typing import Any

import msgspec
from litestar import Request
from litestar.connection import ASGIConnection
from litestar.handlers.base import BaseRouteHandler

from tidemill import clock
from tidemill.errors import BadRequest, TooLarge, Unauthenticated
from tidemill.ports import Inference, Registry, Store
from tidemill.settings import Settings
from tidemill.types import PoolStatus, Principal


class Services(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a handler may touch, wired by ``tidemill.app``; kept in ``app.state.services``."""

    settings: Settings
    store: Store
    backends: Registry
    inference: Inference
    pool_status: Callable[[], Awaitable[PoolStatus]]
    health: Callable[[], str | None]
    """None when healthy, else the reason."""
    wait_rows: Callable[[int, float], Awaitable[Any]] | None = None
    """Returns when a batch (``seq``) has new result rows or another status, at the latest after so
    many seconds. None: who waits for rows is answered at once."""


Connection = ASGIConnection[Any, Any, Any, Any]
Incoming = Request[Any, Any, Any]


def services(connection: Connection) -> Services:
    """The services of the server that the request came to."""
    found: Services = connection.app.state.services
    return found


# --- who is asking ----------------------------------------------------------------------------

LOCAL = Principal(owner="local", name="local")
"""Everybody, on a server without any key."""


async def principal(connection: Connection) -> Principal:
    """Who sends this request, by ``Authorization: Bearer`` or ``api-key``; asked before the body is
    read. Raises ``Unauthenticated``; a key is never repeated in the answer."""
    if "user" not in connection.scope:
        connection.scope["user"] = await _identify(connection)
    found: Principal = connection.scope["user"]
    return found


async def authenticated(connection: Connection, handler: BaseRouteHandler) -> None:
    """Guard of every route that is not marked ``public``."""
    if not handler.opt.get("public"):
        await principal(connection)


async def _identify(connection: Connection) -> Principal:
    given = services(connection)
    configured = _configured(given.settings.api_keys)
    secret = _secret(connection)
    if secret:
        digest = hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
        if digest in configured:
            return configured[digest]
        key = await given.store.keys.find(digest)
        if key is not None and hmac.compare_digest(key.digest, digest):
            if key.revoked_at is not None:
                raise Unauthenticated("This API key was revoked.")
            if key.expires_at is not None and key.expires_at <= clock.now():
                raise Unauthenticated("This API key has expired.")
            return Principal(owner=key.owner, name=key.name, key_id=key.id, scopes=key.scopes)
    # Revoked keys count: revoking the last one must not open the server to everybody.
    if not configured and not await given.store.keys.page():
        return LOCAL
    if secret:
        raise Unauthenticated("The API key is not valid on this server.")
    raise Unauthenticated(
        "No API key was sent. Send 'Authorization: Bearer <key>' or 'api-key: <key>'."
    )


@lru_cache(maxsize=8)
def _configured(api_keys: str) -> dict[str, Principal]:
    """The keys of the settings, by digest; each is an owner of its own."""
    table = {}
    for secret in filter(None, (part.strip() for part in api_keys.split(","))):
        digest = hashlib.sha256(secret.encode()).hexdigest()
        owner = "env-" + hashlib.sha256(b"owner:" + secret.encode()).hexdigest()[:24]
        table[digest] = Principal(owner=owner, name=owner)
    return table


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
