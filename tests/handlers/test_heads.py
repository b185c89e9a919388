"""Bytes on a connection that are no request yet, or never will be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from tidemill.handlers import heads

pytestmark = pytest.mark.anyio


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Reads all, and answers with the path."""
    while (await receive()).get("more_body"):
        continue
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


@asynccontextmanager
async def connected(
    application: Any = app,
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    config = uvicorn.Config(
        application, lifespan="off", log_config=None, ws="none", http=heads.Doorstep
    )
    config.load()
    loop = asyncio.get_running_loop()
    state = ServerState()
    server = await loop.create_server(
        lambda: heads.Doorstep(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            yield reader, writer
        finally:
            writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        body = (await reader.readuntil(b"0\r\n\r\n")).split(b"\r\n")[1]
    return int(head[0].split()[1]), headers, body


def code(body: bytes) -> Any:
    return json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    "endless",
    [b"GET / HTTP/1.1\r\nX-A: ", b"GET /", b"GET / HTTP/1.1\r\n" + b"X-A: b\r\n" * 20_000],
)
async def test_a_head_has_a_size(endless: bytes) -> None:
    """431 in the envelope, and the connection ends, whichever part of the head has no end."""
    async with connected() as (reader, writer):
        writer.write(endless)
        for _ in range(100):
            writer.write(b"a" * 16_384)
        status, headers, body = await answer(reader)
        assert (status, code(body)) in ((431, "headers_too_large"), (400, "invalid_http"))
        assert headers["x-request-id"]
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)


async def test_a_large_head_passes() -> None:
    """The bound is far above what clients send: a token of 16 KiB, many headers."""
    async with connected() as (reader, writer):
        writer.write(
            b"GET /a HTTP/1.1\r\n" + b"X-A: b\r\n" * 500 + b"X-T: " + b"t" * 16_384 + b"\r\n\r\n"
        )
        assert (await answer(reader))[0] == 200


async def test_a_body_is_no_head() -> None:
    """However long, and in however many pieces; and the next head is bounded again."""
    async with connected() as (reader, writer):
        for _ in range(2):
            writer.write(b"POST /a HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (64 * 16_384))
            for _ in range(64):
                writer.write(b"x" * 16_384)
            status, _, body = await answer(reader)
            assert (status, body) == (200, b"/a")
        writer.write(b"GET / HTTP/1.1\r\nX-A: " + b"a" * 1_000_000)
        assert (await answer(reader))[0] == 431


async def test_a_request_in_one_piece() -> None:
    """Head and body together are more than a head may have, again and again."""
    async with connected() as (reader, writer):
        for _ in range(5):
            writer.write(b"POST /a HTTP/1.1\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100_000)
            assert (await answer(reader))[0] == 200


@pytest.mark.parametrize("begun", [b"", b"GET / HTT", b"GET / HTTP/1.1\r\nX-A: b\r\n"])
async def test_a_head_has_a_time(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that never say anything do not stay for ever."""
    monkeypatch.setattr(heads, "HEAD_S", 0.05)
    async with connected() as (reader, writer):
        writer.write(begun)
        status, _, body = await answer(reader)
        assert (status, code(body)) == (408, "request_timeout")
        assert await reader.read() == b""


async def test_a_slow_body_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is the head's: an upload takes as long as it takes."""
    arrived = asyncio.Event()

    async def reads(scope: Any, receive: Any, send: Any) -> None:
        arrived.set()
        await app(scope, receive, send)

    async with connected(reads) as (reader, writer):
        writer.write(b"POST /a HTTP/1.1\r\nContent-Length: 3\r\n\r\n")
        await arrived.wait()
        loop = asyncio.get_running_loop()
        later = loop.time() + 2 * heads.HEAD_S
        monkeypatch.setattr(loop, "time", lambda: later)
        for piece in (b"a", b"b", b"c"):
            await asyncio.sleep(0)
            writer.write(piece)
        assert (await answer(reader))[0] == 200


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"FOO / HTTP/1.1\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\n\r\n",
        "GET /ü HTTP/1.1\r\n\r\n".encode(),
        b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
async def test_what_is_no_http(garbage: bytes) -> None:
    """400 in the envelope with an id, as for every other wrong request."""
    async with connected() as (reader, writer):
        writer.write(garbage)
        status, headers, body = await answer(reader)
        assert (status, code(body)) == (400, "invalid_http")
        assert (headers["content-type"], headers["connection"]) == ("application/json", "close")
        assert headers["x-request-id"].startswith("req_")
