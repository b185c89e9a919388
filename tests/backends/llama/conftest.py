"""One engine process and one model in this process, shared by tests of the llama engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tidemill.backends.llama.llama_replica import LlamaReplica
from tidemill.backends.llama.weights import resolve
from tidemill.types import EngineSpec


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """As long as the engine that lives on its event loop, and no longer: a loop left open would
    meet tests that start their own."""
    return "asyncio"


@pytest.fixture(scope="module")
async def engine(anyio_backend: str) -> AsyncIterator[LlamaReplica]:
    """A small engine: four slots of 256 tokens on one thread."""
    replica = LlamaReplica(EngineSpec(model="smollm2", slots=4, context_length=256, threads=1))
    await replica.start()
    yield replica
    await replica.close()


@pytest.fixture(scope="package")
def model() -> Iterator[Any]:
    """The weights, loaded into this process, for tests below the replica."""
    from tidemill.backends.llama.model import Model, silence

    silence(4)
    model = Model(resolve("smollm2"), 0)
    yield model
    model.close()
