"""A model whose memory can be neither cut nor copied: everything is computed, and that is said."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tidemill.backends.llama import supervisor
from tidemill.backends.llama.llama_replica import LlamaReplica
from tidemill.types import EngineSpec, Generation, Lane, Usage

pytestmark = [pytest.mark.anyio, pytest.mark.llama]

STORY = "Once upon a time there was a little fox who lived in a small house by the sea. Every day"


async def told(
    engine: LlamaReplica,
    lane: Lane = Lane.BATCH,
    *,
    tokens: int = 60,
    begun: asyncio.Event | None = None,
) -> tuple[str, Usage]:
    """A story and its usage; ``begun`` is set at the first token."""
    text, usage = "", Usage()
    asked = Generation(
        model="m", text=STORY, lane=lane, max_tokens=tokens, owner="mill", stream=True
    )
    async with aclosing(engine.generate(asked)) as pieces:
        async for piece in pieces:
            text, usage = text + piece.text, piece.usage or usage
            if begun is not None:
                begun.set()
    return text, usage


async def test_nothing_is_shared_or_parked_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts that begin alike are computed each, a line that makes way is computed again, nothing
    is drafted, and all say what they would have said."""
    monkeypatch.setattr(supervisor, "CHILD", (str(Path(__file__).with_name("rigid.py")),))
    engine = LlamaReplica(EngineSpec(model="smollm2", slots=1, context_length=256, threads=1))
    with capture_logs() as logs:
        await engine.start()
        try:
            alone, used = await told(engine)
            assert used.output == 60
            begun = asyncio.Event()
            line = asyncio.create_task(told(engine, tokens=220, begun=begun))
            await begun.wait()
            person, asked = await told(engine, Lane.INTERACTIVE)
            again, usage = await line
        finally:
            await engine.close()
    assert person == alone
    assert again[:20] == alone[:20]
    assert (used.cached, asked.cached, usage.cached) == (0, 0, 0)
    status = engine.status()
    assert status.requeues == 1
    assert (status.parks, status.tokens_reused, status.tokens_drafted) == (0, 0, 0)
    said = [line["text"] for line in logs if "not shared" in line.get("text", "")]
    assert said == [
        "Prompts are not shared and sequences not parked: its attention has a sliding window."
    ]
