"""An echo engine behind ``LocalInference``, and a look at what reaches it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tidemill.backends.echo import EchoReplica
from tidemill.backends.inference import LocalInference
from tidemill.types import (
    BatchParams,
    EngineSpec,
    Generation,
    Lane,
    Outcome,
    Piece,
)

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
EMBED = "/v1/embeddings"
RESPONSES = "/v1/responses"

Ask = Callable[..., Awaitable[Outcome]]


class Watched(EchoReplica):
    """The echo engine, which keeps what it was asked and counts iterators that were closed."""

    def __init__(self) -> None:
        super().__init__(EngineSpec(model="echo"))
        self.asked: list[Generation] = []
        self.open = 0
        self._change = asyncio.Event()

    async def opened(self, n: int) -> None:
        """Wait until ``n`` generations run."""
        while self.open < n:
            self._change.clear()
            await self._change.wait()

    async def generate(self, generation: Generation) -> AsyncIterator[Piece]:
        """Echo, watched."""
        self.asked.append(generation)
        self.open += 1
        self._change.set()
        try:
            async for piece in super().generate(generation):
                yield piece
        finally:
            self.open -= 1


@pytest.fixture
def echo() -> Watched:
    """The engine."""
    return Watched()


@pytest.fixture
def inference(echo: Watched) -> LocalInference:
    """Inference on that engine."""
    return LocalInference({"echo": echo})


@pytest.fixture
def ask(inference: LocalInference) -> Ask:
    """Ask an endpoint with a body as a dict or as raw bytes."""

    async def asking(
        endpoint: str, body: dict[str, Any] | bytes, defaults: BatchParams | None = None
    ) -> Outcome:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await inference.answer(
            endpoint, raw, lane=Lane.BATCH, owner="owner", defaults=defaults
        )

    return asking


def chat(text: str = "Good morning dear tide", **more: Any) -> dict[str, Any]:
    """A chat body."""
    return {"model": "echo", "messages": [{"role": "user", "content": text}], **more}


def minimal(endpoint: str, **more: Any) -> dict[str, Any]:
    """The smallest body of an endpoint."""
    if endpoint == CHAT:
        return chat(**more)
    field = "prompt" if endpoint == TEXT else "input"
    return {"model": "echo", field: "Good morning dear tide", **more}
