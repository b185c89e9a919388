"""Azure OpenAI: batches at the resource level, never below a deployment.

Two spellings of the same routes: ``{resource}/openai/v1/…`` and, when an API version is set, the
dated ``{resource}/openai/…?api-version=…``, whose lines name their endpoint without ``/v1``.
"""

from __future__ import annotations

from collections.abc import Mapping

from openai import AsyncAzureOpenAI, AsyncOpenAI

from tidemill.backends.dialects.credentials import EntraToken
from tidemill.backends.dialects.transport import http_client, key_of, timeout
from tidemill.providers import Provider

_TWO_WEEKS_S = 1_209_600


class AzureDialect:
    """Implements ``Dialect`` for kind ``azure``."""

    # Azure's least; with an expiry a resource holds 10,000 input files, without one only 500.
    file_expiry_s: int | None = _TWO_WEEKS_S
    expires_batches = False

    def __init__(self, provider: Provider, environ: Mapping[str, str]) -> None:
        self.provider = provider
        self._dated = bool(provider.api_version)
        self.client: AsyncOpenAI
        self._token = token = None if provider.credential == "key" else EntraToken(provider)
        key = key_of(provider, environ) if token is None else None
        if self._dated:
            self.client = AsyncAzureOpenAI(
                azure_endpoint=provider.base_url,
                api_version=provider.api_version,
                api_key=key,
                azure_ad_token_provider=token,
                max_retries=0,
                timeout=timeout(provider),
                http_client=http_client(provider),
            )
        else:
            self.client = AsyncOpenAI(
                base_url=f"{provider.base_url}/openai/v1",
                api_key=key if token is None else token,
                max_retries=0,
                timeout=timeout(provider),
                http_client=http_client(provider),
            )
        self.client.organization = None
        self.client.project = None

    def spelled(self, endpoint: str) -> str:
        """Without ``/v1`` on the dated surface."""
        return endpoint.removeprefix("/v1") if self._dated else endpoint

    async def close(self) -> None:
        """Close the connections."""
        await self.client.close()
        if self._token is not None:
            await self._token.close()
