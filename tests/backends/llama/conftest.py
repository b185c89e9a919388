"""One engine process and one model in this process, shared by all tests of the llama engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tidemill.backends.llama.llama_replica import LlamaReplica
from tidemill.backends.llama.weights import resolve
from tidemill.types import EngineSpec


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Session-wide, as the engine that lives on its event loop."""
    return "asyncio"


@pytest.fixture(scope="session")
async def engine(anyio_backend: str) -> AsyncIterator[LlamaReplica]:
    """A small engine: four slots of 256 tokens on one thread."""
    replica = LlamaReplica(EngineSpec(model="smollm2", slots=4, context_length=256, threads=1))
    await replica.start()
    yield replica
    await replica.close()


@pytest.fixture(scope="session")
def model() -> Iterator[Any]:
    """The weights, loaded into this process, for tests below the replica."""
    from tidemill.backends.llama.model import Model, silence

    log = silence(4)
    model = Model(resolve("smollm2"), 0)
    yield model
    model.close()
    del log
