"""The HTTP client below the SDK: no redirects, no address that no credential may reach."""

from __future__ import annotations

import asyncio
import importlib
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import openai

from tidemill.backends.words import NO_KEY
from tidemill.errors import ProviderUnavailable, SettingsError
from tidemill.providers import Provider, forbidden_address


async def checked_addresses(host: str, port: int) -> list[str]:
    """The addresses of a host, each once. Raises ``ProviderUnavailable`` when one is link-local or
    a metadata service, and ``OSError`` when there are none.

    A name that was harmless when the settings were read may point elsewhere by now.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
    for address in (host, *addresses):
        if (reason := forbidden_address(address)) is not None:
            raise ProviderUnavailable(f"The provider's host '{host}' resolves to {reason}.")
    return addresses


class Pinned:
    """An HTTP transport that connects to the addresses that were checked.

    Who resolves a name twice may be told two things: the first harmless, the second not. So the
    request goes to ``inner`` with an address in the place of the name, which TLS and the ``Host``
    header keep. Addresses are tried in turn until one takes the connection.
    """

    def __init__(self, inner: Any, library: Any) -> None:
        self._inner = inner
        self._library = library

    async def __aenter__(self) -> Pinned:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *failed: Any) -> None:
        await self._inner.__aexit__(*failed)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request; its client's hook."""
        library, url = self._library, request.url
        try:
            addresses = await checked_addresses(url.host, url.port or 443)
        except OSError as exc:
            raise library.ConnectError(str(exc), request=request) from exc
        failed: Exception | None = None
        for address in addresses:
            sent = library.Request(
                request.method,
                url.copy_with(host=address),
                headers=request.headers,
                stream=request.stream,
                extensions={**request.extensions, "sni_hostname": url.host},
            )
            try:
                return await self._inner.handle_async_request(sent)
            except (library.ConnectError, library.ConnectTimeout) as exc:
                failed = exc  # nothing of the request was sent
        assert failed is not None, "a name that resolves has an address"
        raise failed


def http_client(provider: Provider) -> Any:
    """An ``AsyncClient`` of whichever httpx the SDK stands on.

    Behind a proxy of the environment names are the proxy's to resolve: there they are only checked.
    """
    # Its name changes with the SDK's version; the client's base class tells.
    name = openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0]
    library: Any = importlib.import_module(name)
    given: dict[str, Any] = {"event_hooks": {"request": [refuse_forbidden_hosts]}}
    if not _proxied(provider.base_url):
        limits = openai.DEFAULT_CONNECTION_LIMITS
        given = {"transport": Pinned(library.AsyncHTTPTransport(limits=limits), library)}
    return openai.DefaultAsyncHttpxClient(
        follow_redirects=False, timeout=timeout(provider), **given
    )


async def refuse_forbidden_hosts(request: Any) -> None:
    """Refuse a request to a host that is known here as a forbidden one."""
    with suppress(OSError):  # a name that only the proxy knows
        await checked_addresses(request.url.host, request.url.port or 443)


def _proxied(url: str) -> bool:
    parts, proxies = urlsplit(url), getproxies()
    return (parts.scheme in proxies or "all" in proxies) and not proxy_bypass(parts.hostname or "")


def timeout(provider: Provider) -> openai.Timeout:
    """The provider's time-outs as the SDK takes them."""
    return openai.Timeout(provider.timeout_s, connect=provider.connect_timeout_s)


def key_of(provider: Provider, environ: Mapping[str, str]) -> str:
    """The provider's key out of the environment; ``NO_KEY`` for one that needs none."""
    if not provider.api_key_env:
        return NO_KEY
    key = environ.get(provider.api_key_env, "").strip()
    if not key:
        raise SettingsError(
            f"Provider '{provider.name}': the environment variable {provider.api_key_env} "
            "that should hold its key is not set."
        )
    return key
