"""``GET /files/{id}/content``: the stored bytes, streamed, whole or in part (RFC 9110)."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any
from urllib.parse import quote

from litestar import Response, route
from litestar.params import FromPath
from litestar.response import Stream

from tidemill.access import BATCH
from tidemill.errors import RangeNotSatisfiable
from tidemill.handlers.deps import Incoming, services
from tidemill.handlers.files import owned_file

_RANGE = re.compile(r"bytes\s*=\s*(\d{0,18})\s*-\s*(\d{0,18})", re.ASCII)
_TAG = re.compile(r'(?:W/)?("[^"]*")')


@route("/files/{file_id:str}/content", http_method=["GET", "HEAD"], opt={"scope": BATCH})
async def file_content(request: Incoming, file_id: FromPath[str]) -> Response[Any]:
    """The exact bytes of a file. One range is honoured; several are answered with the whole."""
    file = await owned_file(request, file_id)
    etag = f'"{file.id}"'  # an id never gets other bytes
    headers = {
        "ETag": etag,
        "Accept-Ranges": "bytes",
        "Cache-Control": "private",
        "X-Content-Type-Options": "nosniff",
    }
    if _matches(request.headers.get("if-none-match"), etag):
        return Response(None, status_code=304, headers=headers)

    start, stop, status = 0, file.bytes, 200
    asked = request.headers.get("range")
    condition = request.headers.get("if-range")
    if asked and (condition is None or condition.strip() == etag):
        part = _part(asked, file.bytes)
        if part is not None:
            start, stop, status = *part, 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{file.bytes}"
    headers["Content-Length"] = str(stop - start)
    headers["Content-Disposition"] = _disposition(file.filename)
    if request.method == "HEAD":
        headers["Content-Type"] = "application/octet-stream"
        return Response(None, status_code=status, headers=headers)
    backend = services(request).backends.named(file.facts.placement.backend)
    stream = await _started(backend.content(file, start, stop))
    return Stream(
        stream, status_code=status, headers=headers, media_type="application/octet-stream"
    )


ROUTES = (file_content,)


async def _started(source: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The stream with its first piece read, so that what fails at once fails as an answer."""
    first = await anext(source, b"")

    async def rest() -> AsyncGenerator[bytes, None]:
        if isinstance(source, AsyncGenerator):
            async with aclosing(source):
                yield first
                async for piece in source:
                    yield piece
        else:
            yield first
            async for piece in source:
                yield piece

    return rest()


def _part(asked: str, size: int) -> tuple[int, int] | None:
    """``[start, stop)`` of a single range; None: answer with the whole file.

    Raises ``RangeNotSatisfiable`` for a range beyond the end.
    """
    found = _RANGE.fullmatch(asked.strip())
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:
        start, stop = max(0, size - int(found[2])), size
    else:
        start, stop = int(found[1]), min(size, int(found[2]) + 1) if found[2] else size
        if found[2] and int(found[2]) < start:
            return None
    if start >= size:
        raise RangeNotSatisfiable(size)
    return start, stop


def _matches(header: str | None, etag: str) -> bool:
    return header is not None and (header.strip() == "*" or etag in _TAG.findall(header))


def _disposition(filename: str) -> str:
    """RFC 6266: an ASCII name for everybody, and the real one for those who can read it."""
    plain = "".join(c if " " <= c <= "~" and c not in '"\\%/' else "_" for c in filename)
    value = f'attachment; filename="{plain}"'
    if plain != filename:
        value += f"; filename*=UTF-8''{quote(filename, safe='')}"
    return value
