"""What a connection may cost before its bytes are a request.

The protocol under the application keeps a request's head in memory until it is whole, for as long
as it takes; here a head has a size and a time. What is no HTTP at all is refused in the envelope.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import msgspec
import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tidemill import ids
from tidemill.errors import BadRequest
from tidemill.wire import error_object

log = structlog.get_logger()

MAX_HEAD_BYTES = 64 * 1024
"""Checked as the bytes arrive: what one read of the socket brings may go past it."""

HEAD_S = 60.0


class Doorstep(HttpToolsProtocol):
    """One HTTP/1.1 connection."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_head = True
        self._ended = False
        self._head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head is awaited from here."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._wait_no_more()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a head, or of a body, which has limits of its own."""
        self._ended = False
        super().data_received(data)
        # A piece in which a request ends says nothing about the size of the head after it.
        if self._ended or not self._in_head or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                "headers_too_large",
                f"The request's line and headers are longer than {MAX_HEAD_BYTES} bytes.",
            )

    def on_message_begin(self) -> None:
        """A further head on the same connection."""
        super().on_message_begin()
        if self._timer is None:
            self._wait()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._in_head = False
        self._head_bytes = 0
        self._wait_no_more()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is whole; what follows is a head."""
        super().on_message_complete()
        self._in_head = self._ended = True

    def send_400_response(self, msg: str) -> None:
        """The parser gave up."""
        self._refuse(
            HTTPStatus.BAD_REQUEST, "invalid_http", "The connection sent what is not HTTP/1.1."
        )

    def _wait(self) -> None:
        self._timer = self.loop.call_later(HEAD_S, self._late)

    def _wait_no_more(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait()  # an answer is still being sent; the head after it has time
            return
        self._refuse(
            HTTPStatus.REQUEST_TIMEOUT,
            "request_timeout",
            f"The request's line and headers were not complete after {HEAD_S:g} seconds.",
        )

    def _refuse(self, status: HTTPStatus, code: str, message: str) -> None:
        """Answer and hang up. There is no request yet that the application could answer."""
        body = msgspec.json.encode(error_object(BadRequest(message, code=code)))
        request_id = ids.request_id()
        log.warning("no request", status=int(status), code=code, request_id=request_id)
        head = (
            f"HTTP/1.1 {int(status)} {status.phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            f"x-request-id: {request_id}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()
