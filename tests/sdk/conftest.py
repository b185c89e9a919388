"""One live server on the echo engine for all SDK tests, with two keys: two owners."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from openai import AsyncAzureOpenAI, AsyncOpenAI, AzureOpenAI, OpenAI

from tests.worlds.server import Server

KEY, OTHER_KEY = "tm-test-key-one", "tm-test-key-two"
API_VERSION = "2025-04-01-preview"


@pytest.fixture(scope="session")
def live() -> Iterator[Server]:
    """The server: four lines at a time, so that a batch can be met in the middle of its run."""
    with Server(api_keys=f"{KEY},{OTHER_KEY}", batch_local_concurrency=4) as server:
        yield server


# How each kind of client is told where the server is.
SURFACES: dict[str, Callable[[str, str], OpenAI]] = {
    "v1": lambda root, key: OpenAI(
        base_url=f"{root}/v1", api_key=key, _strict_response_validation=True
    ),
    "openai-v1": lambda root, key: OpenAI(
        base_url=f"{root}/openai/v1/", api_key=key, _strict_response_validation=True
    ),
    "jobs-v1": lambda root, key: OpenAI(
        base_url=f"{root}/jobs/v1", api_key=key, _strict_response_validation=True
    ),
    "azure": lambda root, key: AzureOpenAI(
        azure_endpoint=root, api_key=key, api_version=API_VERSION, _strict_response_validation=True
    ),
    "azure-deployment": lambda root, key: AzureOpenAI(
        azure_endpoint=root,
        azure_deployment="echo",
        api_key=key,
        api_version=API_VERSION,
        _strict_response_validation=True,
    ),
    "azure-base-url": lambda root, key: AzureOpenAI(
        base_url=f"{root}/openai/v1",
        api_key=key,
        api_version="preview",
        _strict_response_validation=True,
    ),
    "azure-token": lambda root, key: AzureOpenAI(
        azure_endpoint=root,
        azure_ad_token_provider=lambda: key,
        api_version=API_VERSION,
        _strict_response_validation=True,
    ),
}


@pytest.fixture(params=list(SURFACES))
def client(request: pytest.FixtureRequest, live: Server) -> Iterator[OpenAI]:
    """The official client, in every way that it can be pointed here; answers are validated."""
    with SURFACES[request.param](live.base_url, KEY) as client:
        yield client


@pytest.fixture
def plain(live: Server) -> Iterator[OpenAI]:
    """The client as most people have it, without repeating what fails."""
    with OpenAI(
        base_url=f"{live.base_url}/v1",
        api_key=KEY,
        max_retries=0,
        _strict_response_validation=True,
    ) as client:
        yield client


@pytest.fixture
def other(live: Server) -> Iterator[OpenAI]:
    """Somebody else on the same server."""
    with OpenAI(base_url=f"{live.base_url}/v1", api_key=OTHER_KEY, max_retries=0) as client:
        yield client


@pytest.fixture(params=["v1", "azure"])
def aclient(request: pytest.FixtureRequest, live: Server) -> AsyncOpenAI:
    """The asyncio client; the test closes it."""
    if request.param == "v1":
        return AsyncOpenAI(
            base_url=f"{live.base_url}/v1", api_key=KEY, _strict_response_validation=True
        )
    return AsyncAzureOpenAI(
        azure_endpoint=live.base_url,
        api_key=KEY,
        api_version=API_VERSION,
        _strict_response_validation=True,
    )
