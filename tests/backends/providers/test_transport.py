"""Where a provider's name leads, and that nobody gets a credential who was not looked at."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from worlds.certificates import self_signed

from tidemill.backends.dialects import OpenAIDialect
from tidemill.errors import ProviderUnavailable
from tidemill.providers import Provider

pytestmark = pytest.mark.anyio

NAME = "provider.test"
METADATA = "169.254.169.254"


class Resolver:
    """Answers for ``NAME``: each question gets the next of the answers, the last one for ever."""

    def __init__(self, *answers: tuple[str, ...]) -> None:
        self.answers = list(answers)
        self.asked = 0
        self._real = socket.getaddrinfo

    def __call__(self, host: Any, port: Any, *more: Any, **named: Any) -> Any:
        if host not in (NAME, NAME.encode()):
            return self._real(host, port, *more, **named)
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if not answer:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in answer]


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes a certificate for a name, the only one that clients trust."""

    def made(name: str) -> Path:
        path = self_signed(tmp_path / "certificate.pem", name)
        monkeypatch.setenv("SSL_CERT_FILE", str(path))
        return path

    return made


class There:
    """What a TLS server on loopback saw."""

    def __init__(self) -> None:
        self.port = 0
        self.names: list[str | None] = []
        self.heads: list[str] = []


@asynccontextmanager
async def tls_server(certificate: Path) -> AsyncIterator[There]:
    """Answers every request with an empty list."""
    there = There()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.sni_callback = lambda _sock, name, _context: there.names.append(name)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        body = b'{"object": "list", "data": []}'
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
            + b"Content-Length: %d\r\n\r\n" % len(body)
            + body
        )
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    there.port = server.sockets[0].getsockname()[1]
    try:
        yield there
    finally:
        server.close()
        await server.wait_closed()


@asynccontextmanager
async def client_of(port: int) -> AsyncIterator[openai.AsyncOpenAI]:
    """The client of a provider of that name."""
    provider = Provider(
        name="up", kind="openai_compatible", base_url=f"https://{NAME}:{port}/v1", models={}
    )
    dialect = OpenAIDialect(provider, {})
    try:
        yield dialect.client
    finally:
        await dialect.close()


@pytest.mark.parametrize("addresses", [("127.0.0.1",), ("127.0.0.9", "127.0.0.1")])
async def test_the_address_that_was_checked_is_connected_to(
    certificate: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    addresses: tuple[str, ...],
) -> None:
    """The name is resolved once, so a second answer reaches nobody; it stays the name for TLS and
    in the request, and an address that takes no connection leaves the turn to the next."""
    resolver = Resolver(addresses, (METADATA,))
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    async with tls_server(certificate(NAME)) as there, client_of(there.port) as client:
        assert (await client.models.list()).data == []
        assert resolver.asked == 1
        assert there.names == [NAME]
        assert f"host: {NAME}:{there.port}" in there.heads[0].lower()
        with pytest.raises(ProviderUnavailable, match="resolves to a link-local address"):
            await client.models.list()
        assert len(there.heads) == 1


@pytest.mark.parametrize("answer", [(METADATA,), ("127.0.0.1", METADATA), ("fe80::1",), ()])
async def test_a_name_that_leads_astray_is_not_connected_to(
    certificate: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, answer: tuple[str, ...]
) -> None:
    """Not even where another of its addresses is right; nor one that is not known."""
    monkeypatch.setattr(socket, "getaddrinfo", Resolver(answer))
    async with tls_server(certificate(NAME)) as there, client_of(there.port) as client:
        with pytest.raises(ProviderUnavailable if answer else openai.APIConnectionError):
            await client.models.list()
        assert there.names == there.heads == []


async def test_a_certificate_of_another_name_is_refused(
    certificate: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connecting to an address does not loosen what TLS checks."""
    monkeypatch.setattr(socket, "getaddrinfo", Resolver(("127.0.0.1",)))
    async with tls_server(certificate("other.test")) as there, client_of(there.port) as client:
        with pytest.raises(openai.APIConnectionError, match="Connection error"):
            await client.models.list()
        assert there.heads == []


async def test_behind_a_proxy_the_name_is_the_proxys(
    certificate: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for the name, and never where the name is known here to lead astray."""
    asked: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    proxy = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = proxy.sockets[0].getsockname()[1]
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
    certificate(NAME)
    for answer, lines in (((), 1), ((METADATA,), 0)):
        asked.clear()
        monkeypatch.setattr(socket, "getaddrinfo", Resolver(answer))
        async with client_of(443) as client:
            with pytest.raises(ProviderUnavailable if answer else openai.APIConnectionError):
                await client.models.list()
        assert len(asked) == lines
        assert all(line.startswith(b"CONNECT " + NAME.encode()) for line in asked)
    proxy.close()
    await proxy.wait_closed()
