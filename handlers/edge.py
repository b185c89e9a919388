"""What every request meets first and every answer last: its id, its log line, its metrics."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import structlog
from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from tidemill import clock, ids, telemetry
from tidemill.errors import TidemillError
from tidemill.handlers.azure import requoted
from tidemill.wire import error_object

log = structlog.get_logger()

DRAIN_BYTES = 64 * 1024 * 1024
DRAIN_S = 30.0


class Edge:
    """Wraps the routing of one application. ``x-request-id`` is on every answer, a refusal too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        with structlog.contextvars.bound_contextvars(request_id=exchange.id):
            try:
                await self._app(scope, exchange.receive, exchange.send)
            except Exception as exc:
                log.error("unexpected error", exc_info=exc)
                if exchange.status:
                    raise  # half an answer is out: only a broken connection can tell the client
                await exchange.fail()
            finally:
                exchange.note()


class _Exchange:
    """One request and its answer."""

    def __init__(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        self.id = ids.request_id()
        self.status = 0
        self._scope, self._receive, self._send = scope, receive, send
        self._started = clock.monotonic()
        self._taken = 0
        self._ended = False
        self._expects = any(name == b"expect" for name, _ in scope["headers"])
        scope["state"]["request_id"] = self.id
        scope["state"]["path"] = scope["path"]
        scope["path"] = requoted(scope["path"])

    async def receive(self) -> Any:
        """The next part of the body."""
        message: Any = await self._receive()
        self._ended = not (message["type"] == "http.request" and message.get("more_body"))
        self._taken += len(message.get("body") or b"")
        return message

    async def send(self, message: Message) -> None:
        """The next part of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.status >= 400:
                await self._drain()
            message["headers"] = [*message["headers"], (b"x-request-id", self.id.encode())]
        await self._send(message)

    async def _drain(self) -> None:
        """Swallow what the client still sends, within bounds: a client that is writing its upload
        would see a broken connection, not the refusal, and upload again."""
        if self._expects and not self._taken:
            return  # it waits for leave to send, and will not get it
        with anyio.move_on_after(DRAIN_S):
            while not self._ended and self._taken < DRAIN_BYTES:
                await self.receive()

    async def fail(self) -> None:
        """The answer where even the making of an answer failed."""
        body = msgspec.json.encode(error_object(TidemillError("The server met an error.")))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ]
        await self.send({"type": "http.response.start", "status": 500, "headers": headers})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    def note(self) -> None:
        """Write the log line and count the request. Neither headers nor queries are written."""
        took = clock.monotonic() - self._started
        route = self._scope.get("path_template") or "unmatched"
        method = self._scope["method"] if len(self._scope["method"]) < 8 else "other"
        telemetry.REQUESTS.labels(method, route, str(self.status)).inc()
        telemetry.REQUEST_SECONDS.labels(route).observe(took)
        log.info(
            "request", method=method, route=route, status=self.status, ms=round(took * 1000, 1)
        )
