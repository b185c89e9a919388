"""Entra tokens for Azure through azure-identity, refreshed before they expire."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

from tidemill import clock
from tidemill.errors import ProviderUnavailable, SettingsError
from tidemill.providers import Provider

_MARGIN_S = 300
"""A token with less than this left is replaced: a request under way must not outlive it."""


class EntraToken:
    """An async callable that gives a valid token; the SDK calls it for every request.

    azure-identity's asynchronous half needs aiohttp, so the synchronous one runs on a thread, at
    most one at a time and only when the token in hand runs out.
    """

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._credential = _credential(provider)
        self._lock = asyncio.Lock()
        self._token = ""
        self._fresh_until = 0.0

    async def __call__(self) -> str:
        """A token for the provider's scope. Raises ``ProviderUnavailable`` when there is none."""
        if clock.now_f() < self._fresh_until:
            return self._token
        async with self._lock:
            if clock.now_f() >= self._fresh_until:
                await self._renew()
        return self._token

    async def close(self) -> None:
        """Close the connections to whoever gives tokens."""
        await asyncio.to_thread(self._credential.close)

    async def _renew(self) -> None:
        try:
            token = await asyncio.to_thread(self._credential.get_token, self._provider.scope)
        except Exception as exc:
            # azure-identity raises classes of several packages; the first line says what failed.
            words = str(exc).strip().splitlines() or [type(exc).__name__]
            raise ProviderUnavailable(
                f"Provider '{self._provider.name}': no Entra token ({words[0]})",
                code="provider_credential",
            ) from exc
        self._token = token.token
        self._fresh_until = token.expires_on - _MARGIN_S


def _credential(provider: Provider) -> Any:
    try:
        identity = importlib.import_module("azure.identity")
    except ImportError as exc:
        raise SettingsError(
            f"Provider '{provider.name}': credential '{provider.credential}' needs a package that "
            "is not installed; install tidemill[azure]."
        ) from exc
    try:
        if provider.credential == "managed_identity":
            return identity.ManagedIdentityCredential(client_id=provider.client_id or None)
        if provider.credential == "workload_identity":
            return identity.WorkloadIdentityCredential(
                **({"client_id": provider.client_id} if provider.client_id else {})
            )
        if provider.credential == "client_secret":
            return identity.EnvironmentCredential()
        return identity.DefaultAzureCredential(
            managed_identity_client_id=provider.client_id or None,
            exclude_interactive_browser_credential=True,
        )
    except ValueError as exc:
        raise SettingsError(f"Provider '{provider.name}': {exc}") from exc
