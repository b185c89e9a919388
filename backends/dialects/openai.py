"""OpenAI, those that imitate it, and other Tidemills."""

from __future__ import annotations

from collections.abc import Mapping

from openai import AsyncOpenAI

from tidemill.backends.dialects.transport import http_client, key_of, timeout
from tidemill.providers import Provider


class OpenAIDialect:
    """Implements ``Dialect`` for every kind but Azure."""

    file_expiry_s: int | None = None
    expires_batches = True

    def __init__(self, provider: Provider, environ: Mapping[str, str]) -> None:
        self.provider = provider
        self.client = AsyncOpenAI(
            base_url=provider.base_url,
            api_key=key_of(provider, environ),
            max_retries=0,
            timeout=timeout(provider),
            http_client=http_client(provider),
        )
        if provider.kind != "openai":
            # The SDK reads these from the environment; they are OpenAI's business only.
            self.client.organization = None
            self.client.project = None

    def spelled(self, endpoint: str) -> str:
        """Canonical already."""
        return endpoint

    async def close(self) -> None:
        """Close the connections."""
        await self.client.close()
