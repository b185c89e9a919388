"""From a ``Call`` to httpx, for both clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx

from tidemill import __version__
from tidemill.client.core import Call, Lost

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def options(root: str, api_key: str | None, timeout: float) -> dict[str, Any]:
    """Arguments of the httpx client. A proxy of the environment is not asked for loopback."""
    headers = {"User-Agent": f"tidemill/{__version__}"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return {
        "base_url": root,
        "headers": headers,
        "timeout": httpx.Timeout(timeout, connect=min(timeout, 10.0)),
        "trust_env": urlsplit(root).hostname not in _LOOPBACK,
    }


@contextmanager
def request(call: Call) -> Iterator[dict[str, Any]]:
    """Arguments of ``httpx.Client.stream`` for one attempt; an upload is opened for just that."""
    arguments: dict[str, Any] = {
        "method": call.method,
        "url": call.path,
        "params": dict(call.params),
        "headers": dict(call.headers),
    }
    if call.json is not None:
        arguments["json"] = call.json
    if call.upload is None:
        yield arguments
        return
    with call.upload.open() as file:
        arguments["data"] = dict(call.form)
        arguments["files"] = {"file": (call.upload.name, file, "application/jsonl")}
        yield arguments


def lost(exc: httpx.TransportError) -> Lost:
    """A broken connection as a value. A request that can never be sent is raised again."""
    if isinstance(exc, (httpx.UnsupportedProtocol, httpx.LocalProtocolError)):
        raise exc
    asked = exc.request.url
    root = f"{asked.scheme}://{asked.netloc.decode('ascii')}"
    return Lost(f"{root}: {str(exc) or type(exc).__name__}")


def lower(headers: httpx.Headers) -> dict[str, str]:
    """Header names in lower case, each once."""
    return {name.lower(): value for name, value in headers.items()}
