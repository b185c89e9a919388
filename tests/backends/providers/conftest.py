"""A provider on loopback for the tests of this folder, as it is on its first day for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from worlds.provider import ProviderWorld


@pytest.fixture(scope="session")
def provider_process() -> Iterator[ProviderWorld]:
    with ProviderWorld() as world:
        yield world


@pytest.fixture
def world(provider_process: ProviderWorld) -> ProviderWorld:
    provider_process.reset()
    return provider_process
