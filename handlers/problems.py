"""Every error in one shape: the OpenAI envelope, and the headers that steer the SDKs' retries."""

from __future__ import annotations

import math

import msgspec
import structlog
from litestar import MediaType, Response
from litestar.exceptions import HTTPException, MethodNotAllowedException, NotFoundException

from tidemill.errors import (
    BadRequest,
    MethodNotAllowed,
    NotFound,
    RangeNotSatisfiable,
    TidemillError,
    TooLarge,
)
from tidemill.handlers.deps import Incoming
from tidemill.wire import error_object

log = structlog.get_logger()


def answer_error(request: Incoming, exc: Exception) -> Response[bytes]:
    """The answer to any exception; an unexpected one says nothing of its inside."""
    error = _translate(request, exc)
    return Response(
        content=msgspec.json.encode(error_object(error)),
        status_code=error.status,
        headers=_headers(error, exc),
        media_type=MediaType.JSON,
    )


def _translate(request: Incoming, exc: Exception) -> TidemillError:
    if isinstance(exc, TidemillError):
        if exc.status >= 500:
            log.warning("request failed", code=exc.code, error=exc.message)
        return exc
    path = request.scope["state"].get("path", request.scope["path"])
    where = f"{request.scope['method']} {path if len(path) <= 200 else path[:200] + '…'}"
    if isinstance(exc, NotFoundException):
        return NotFound(f"Invalid URL ({where})", code="unknown_url")
    if isinstance(exc, MethodNotAllowedException):
        return MethodNotAllowed(f"Invalid method for URL ({where})")
    if isinstance(exc, HTTPException) and exc.status_code == 413:
        return TooLarge("The body is too large.", code="body_too_large")
    if isinstance(exc, HTTPException) and 400 <= exc.status_code < 500:
        return BadRequest(exc.detail, code="invalid_request")
    log.error("unexpected error", exc_info=exc)
    return TidemillError(
        "The server met an error that it did not expect; its log has the details under this "
        "answer's x-request-id."
    )


def _headers(error: TidemillError, exc: Exception) -> dict[str, str]:
    headers = {}
    if error.should_retry is not None:
        headers["x-should-retry"] = "true" if error.should_retry else "false"
    if error.retry_after_s is not None:
        # Past 60 s Node ignores the value, past 120 s Python does not retry at all.
        headers["Retry-After"] = str(min(60, max(1, math.ceil(error.retry_after_s))))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, RangeNotSatisfiable):
        headers["Content-Range"] = f"bytes */{error.size}"
    if isinstance(exc, MethodNotAllowedException):
        headers |= {"Allow": (exc.headers or {}).get("allow", "").upper()}
    return headers
