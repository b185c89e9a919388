"""The HTTP client below the SDK: no redirects, no address that no credential may reach."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

import openai

from tidemill.errors import ProviderUnavailable, SettingsError
from tidemill.providers import Provider, forbidden_address


async def refuse_forbidden_hosts(request: Any) -> None:
    """Resolve the host of a request about to be sent and refuse link-local and metadata addresses.

    A name that was harmless when the settings were read may point elsewhere by now.
    """
    host, port = request.url.host, request.url.port
    if (reason := forbidden_address(host)) is None:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                host, port or 443, type=socket.SOCK_STREAM
            )
        except OSError:
            return  # the connection itself fails next, with the better words
        reasons = (forbidden_address(str(info[4][0])) for info in found)
        reason = next((why for why in reasons if why is not None), None)
    if reason is not None:
        raise ProviderUnavailable(f"The provider's host '{host}' resolves to {reason}.")


def http_client(provider: Provider) -> Any:
    """An ``AsyncClient`` of whichever httpx the SDK stands on."""
    return openai.DefaultAsyncHttpxClient(
        follow_redirects=False,
        event_hooks={"request": [refuse_forbidden_hosts]},
        timeout=timeout(provider),
    )


def timeout(provider: Provider) -> openai.Timeout:
    """The provider's time-outs as the SDK takes them."""
    return openai.Timeout(provider.timeout_s, connect=provider.connect_timeout_s)


def key_of(provider: Provider, environ: Mapping[str, str]) -> str:
    """The provider's key out of the environment; ``-`` for one that needs none."""
    if not provider.api_key_env:
        return "-"
    key = environ.get(provider.api_key_env, "").strip()
    if not key:
        raise SettingsError(
            f"Provider '{provider.name}': the environment variable {provider.api_key_env} "
            "that should hold its key is not set."
        )
    return key
