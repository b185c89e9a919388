"""How each kind of provider is spoken to: its SDK client, its credential, its spellings.

Everything that differs between OpenAI, Azure and those that imitate them is in this folder; the
rest of the provider path sees a ``Dialect``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol

from openai import AsyncOpenAI

from tidemill.backends.dialects.azure import AzureDialect
from tidemill.backends.dialects.openai import OpenAIDialect
from tidemill.providers import Provider


class Dialect(Protocol):
    """One provider's way of speaking."""

    @property
    def provider(self) -> Provider:
        """Its settings."""

    @property
    def client(self) -> AsyncOpenAI:
        """The official SDK, told never to retry by itself and never to follow a redirect."""

    @property
    def file_expiry_s(self) -> int | None:
        """Expiry to ask for on uploads; None: the provider's own default is right."""

    @property
    def expires_batches(self) -> bool:
        """False where the completion window is a goal and not a deadline."""

    def spelled(self, endpoint: str) -> str:
        """A canonical endpoint (``/v1/...``) as lines and batches of this surface name it."""

    async def close(self) -> None:
        """Close the connections."""


def dialect_of(provider: Provider, environ: Mapping[str, str] | None = None) -> Dialect:
    """The dialect of a provider. Raises ``SettingsError`` when its credential is missing."""
    environ = os.environ if environ is None else environ
    if provider.kind == "azure":
        return AzureDialect(provider, environ)
    return OpenAIDialect(provider, environ)


__all__ = ["AzureDialect", "Dialect", "OpenAIDialect", "dialect_of"]
