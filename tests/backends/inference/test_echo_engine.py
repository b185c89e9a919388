"""The echo engine: what it answers, and how it fails on request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

import pytest

from tests.backends.inference.conftest import CHAT, EMBED, TEXT, Ask, Watched, chat
from tidemill.backends.echo import CONTEXT, replica
from tidemill.ports import Replica
from tidemill.types import (
    Answer,
    Embedding,
    EngineSpec,
    Generation,
    Outcome,
    Piece,
    Refusal,
)

pytestmark = pytest.mark.anyio


async def pieces(stream: AsyncIterator[Piece]) -> list[Piece]:
    """All pieces."""
    return [piece async for piece in stream]


def test_its_card_follows_the_spec() -> None:
    """It serves ``echo`` unless the spec names it, with the spec's context."""
    plain: Replica = replica(EngineSpec(model="echo"))
    assert (plain.card.id, plain.card.context_length) == ("echo", CONTEXT)
    named = replica(EngineSpec(model="echo", name="other", context_length=10))
    assert (named.card.id, named.card.context_length) == ("other", 10)


async def test_streamed_words_are_the_text() -> None:
    """Word pieces joined are the exact text, spaces and line ends included."""
    engine = replica(EngineSpec(model="echo"))
    text = "  one\n\ntwo\tthree \n"
    got = await pieces(engine.generate(Generation(model="echo", text=text, stream=True)))
    assert "".join(p.text for p in got) == text
    assert len(got) > 3
    whole = await pieces(engine.generate(Generation(model="echo", text=text)))
    assert [p.text for p in whole] == [text]
    assert whole[0].usage == got[-1].usage


async def test_stops_cut_the_text() -> None:
    """The earliest stop text ends the answer and is not part of it."""
    engine = replica(EngineSpec(model="echo"))
    got = await pieces(engine.generate(Generation(model="echo", text="a b c d", stop=("d", " c"))))
    assert got[0].text == "a b"
    assert got[0].finish == "stop"


async def test_the_context_bounds_prompt_and_answer(ask: Ask) -> None:
    """An answer stops where the context is full."""
    outcome = await ask(TEXT, {"model": "echo", "prompt": "a b c", "max_context_length": 4})
    assert isinstance(outcome, Answer)
    assert b'"finish_reason":"length"' in outcome.body
    assert outcome.usage.output == 1


async def test_vectors_are_deterministic_units() -> None:
    """Equal inputs have equal vectors of length one; others differ."""
    engine = replica(EngineSpec(model="echo"))
    got = await engine.embed(Embedding(model="echo", inputs=("a", "b", "a", (1, 2))))
    a, b, again, tokens = got.vectors
    assert a == again
    assert a != b != tokens
    assert all(math.isclose(math.hypot(*v), 1.0) for v in got.vectors)
    assert got.usage.input == 5


async def refused(ask: Ask, text: str) -> Refusal:
    """The refusal that a text leads to."""
    outcome: Outcome = await ask(CHAT, chat(text))
    assert isinstance(outcome, Refusal)
    return outcome


async def test_a_status_on_request(ask: Ask) -> None:
    """Statuses map to refusals; only those that may pass are worth a retry."""
    limited = await refused(ask, "!status 429 retry-after=1.5")
    assert (limited.status_code, limited.retry, limited.retry_after_s) == (429, True, 1.5)
    assert (await refused(ask, "!status 500")).retry
    assert (await refused(ask, "!status 503")).retry
    bad = await refused(ask, "!status 422")
    assert (bad.status_code, bad.retry) == (422, False)


async def test_a_dead_engine_on_request(ask: Ask) -> None:
    """``!lost`` always dies, ``!flaky N`` N times for the same text."""
    assert (await refused(ask, "!lost")).retry
    for text in ("!flaky 2 x", "!flaky 2 y"):
        assert (await refused(ask, text)).retry
        assert (await refused(ask, text)).retry
        assert isinstance(await ask(CHAT, chat(text)), Answer)


async def test_waiting_on_request(ask: Ask, echo: Watched) -> None:
    """``!wait`` answers once its gate opens, ``!sleep`` after its time."""
    waiting = asyncio.ensure_future(ask(CHAT, chat("!wait tide high water")))
    await echo.opened(1)
    assert not waiting.done()
    echo.gate("tide").set()
    outcome = await waiting
    assert isinstance(outcome, Answer)
    assert b'"high water"' in outcome.body
    assert echo.status().active == 0
    assert isinstance(await ask(CHAT, chat("!sleep 0.001 done")), Answer)


@pytest.mark.parametrize(
    "text", ["!hello", "!status", "!status 200", "!sleep x", "! lost", "!wait"]
)
async def test_other_exclamations_are_text(ask: Ask, text: str) -> None:
    """Only the exact directives are special."""
    outcome = await ask(CHAT, chat(text))
    assert isinstance(outcome, Answer)


async def test_a_schema_beyond_it_is_refused_clearly(ask: Ask) -> None:
    """The refusal names the keyword."""
    schema = {"type": "object", "properties": {"a": {"$ref": "#/x"}}}
    format = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    outcome = await ask(CHAT, chat(response_format=format))
    assert isinstance(outcome, Refusal)
    assert "$ref" in outcome.message
    assert outcome.param == "response_format"


async def test_it_counts_what_it_read_and_wrote(ask: Ask, echo: Watched) -> None:
    """Status adds up over answers and vectors."""
    await ask(CHAT, chat("a b", max_tokens=1))
    await ask(EMBED, {"model": "echo", "input": "c"})
    status = echo.status()
    assert (status.tokens_prefilled, status.tokens_generated) == (3, 1)
    assert status.healthy
