"""Streams: the same answer in pieces, closed and booked however they end."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.backends.inference.conftest import CHAT, RESPONSES, TEXT, Ask, Watched, chat
from tidemill.backends.echo import CONTEXT
from tidemill.backends.inference import LocalInference
from tidemill.errors import ContextLengthExceeded, EngineLost, RequestRefused, TidemillError
from tidemill.types import Answer, Embedded, Embedding, Generation, Lane, Piece, Usage

pytestmark = pytest.mark.anyio

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class Booked(list[tuple[str, Usage]]):
    """What was booked."""

    def __call__(self, model: str, usage: Usage) -> None:
        self.append((model, usage))


async def events(
    inference: LocalInference, endpoint: str, body: dict[str, Any], booked: Booked | None = None
) -> list[str]:
    """The data of all events."""
    raw = json.dumps({**body, "stream": True}).encode()
    text = b"".join(
        [e async for e in inference.stream(endpoint, raw, owner="o", booked=booked)]
    ).decode()
    assert text.endswith("\n\n")
    found = []
    for block in text[:-2].split("\n\n"):
        *head, data = block.split("\n")
        assert data.startswith("data: ")
        assert all(line.startswith("event: ") for line in head)
        found.append(data.removeprefix("data: "))
    return found


async def test_chat_chunks_add_up_to_the_answer(inference: LocalInference, ask: Ask) -> None:
    """Role first, text in between, the reason last, ``[DONE]`` at the end, per choice."""
    body = chat("one two\n three", n=3, logprobs=True)
    *data, done = await events(inference, CHAT, body)
    assert done == "[DONE]"
    chunks = [ChatCompletionChunk.model_validate_json(d, strict=True) for d in data]
    whole = await ask(CHAT, body)
    assert isinstance(whole, Answer)
    for index, choice in enumerate(json.loads(whole.body)["choices"]):
        own = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in own) == choice["message"]["content"]
        assert [c.finish_reason for c in own] == [None] * (len(own) - 1) + ["stop"]
        scored = [t for c in own if c.logprobs for t in c.logprobs.content or ()]
        assert [t.token for t in scored] == [t["token"] for t in choice["logprobs"]["content"]]
    assert len({c.id for c in chunks}) == 1
    assert all("usage" not in json.loads(d) for d in data)


async def test_usage_chunk_comes_last_where_asked_for(inference: LocalInference) -> None:
    """``include_usage`` adds one chunk without choices; the others say null."""
    booked = Booked()
    body = chat("a b", n=2, stream_options={"include_usage": True})
    *data, last, _ = await events(inference, CHAT, body, booked)
    assert all(json.loads(d)["usage"] is None for d in data)
    final = ChatCompletionChunk.model_validate_json(last, strict=True)
    assert final.choices == []
    assert final.usage is not None
    assert (final.usage.prompt_tokens, final.usage.completion_tokens) == (2, 4)
    assert booked == [("echo", Usage(input=2, output=4))]


async def test_streamed_tool_calls_are_numbered(inference: LocalInference) -> None:
    """A call in a stream has its index."""
    tool = {"type": "function", "function": {"name": "f"}}
    *data, _ = await events(inference, CHAT, chat("hi", tools=[tool], tool_choice="required"))
    chunks = [ChatCompletionChunk.model_validate_json(d, strict=True) for d in data]
    calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or ()]
    assert [(c.index, c.function.name if c.function else None) for c in calls] == [(0, "f")]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_text_chunks_add_up_to_the_answer(inference: LocalInference) -> None:
    """Choices of several prompts are told apart by index."""
    body = {
        "model": "echo",
        "prompt": ["a b c", "d e"],
        "logprobs": 0,
        "stream_options": {"include_usage": True},
    }
    *data, done = await events(inference, TEXT, body)
    assert done == "[DONE]"
    chunks = [Completion.construct(**json.loads(d)) for d in data]
    ends = [c.choices[0].finish_reason for c in chunks[:-1]]
    assert sorted(map(str, ends)) == ["None"] * 5 + ["stop"] * 2
    texts = {0: "", 1: ""}
    offsets: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        assert choice.logprobs is not None
        offsets[choice.index] += choice.logprobs.text_offset or []
    assert texts == {0: "a b c", 1: "d e"}
    assert offsets == {0: [0, 1, 3], 1: [0, 1]}
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 10


async def test_response_events_add_up_to_the_response(inference: LocalInference) -> None:
    """Events are numbered from 0, valid, and end with the complete response."""
    body = {"model": "echo", "input": "one two three", "top_logprobs": 1}
    data = await events(inference, RESPONSES, body)
    parsed = [EVENT.validate_json(d, strict=True) for d in data]
    assert [e.sequence_number for e in parsed] == list(range(len(parsed)))
    assert [e.type for e in parsed] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(e.delta for e in parsed if e.type == "response.output_text.delta") == (
        "one two three"
    )
    final: Response = parsed[-1].response
    assert final.output_text == "one two three"
    assert final.usage is not None
    assert final.usage.output_tokens == 3
    assert parsed[0].response.id == final.id


async def test_response_events_of_calls_and_cut_answers(inference: LocalInference) -> None:
    """A call has its own item; an answer that was cut ends with ``response.incomplete``."""
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    body = {"model": "echo", "input": "hi", "tools": [tool], "tool_choice": "required"}
    parsed = [EVENT.validate_json(d, strict=True) for d in await events(inference, RESPONSES, body)]
    assert [e.type for e in parsed][2:] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    body = {"model": "echo", "input": "a b c", "max_output_tokens": 1}
    data = await events(inference, RESPONSES, body)
    assert EVENT.validate_json(data[-1], strict=True).type == "response.incomplete"


class Scripted(Watched):
    """An engine that gives these pieces and then fails, or stops short."""

    def __init__(self, pieces: list[Piece], error: TidemillError | None = None) -> None:
        super().__init__()
        self.pieces = pieces
        self.error = error

    async def generate(self, generation: Generation) -> AsyncIterator[Piece]:
        """The script."""
        for piece in self.pieces:
            yield piece
        if self.error is not None:
            raise self.error


async def test_reasoning_is_kept_apart_from_the_text() -> None:
    """What a model thought has its own field, delta and output item."""
    end = Piece(finish="stop", usage=Usage(input=1, output=4, reasoning=2))
    script = [Piece(reasoning="hm "), Piece(reasoning="so"), Piece(text="yes"), end]
    inference = LocalInference({"echo": Scripted(script)})
    *data, _ = await events(inference, CHAT, chat())
    deltas = [json.loads(d)["choices"][0]["delta"] for d in data]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "hm so"
    assert "".join(d.get("content") or "" for d in deltas) == "yes"
    parsed = [
        EVENT.validate_json(d, strict=True)
        for d in await events(inference, RESPONSES, {"model": "echo", "input": "x"})
    ]
    final = parsed[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert final.usage.output_tokens_details.reasoning_tokens == 2
    assert [e.sequence_number for e in parsed] == list(range(len(parsed)))
    assert [e.output_index for e in parsed if e.type == "response.output_item.done"] == [0, 1]


async def test_a_refusal_before_the_first_event_is_raised(inference: LocalInference) -> None:
    """Bad parameters, unknown models and long prompts are errors of the request."""
    booked = Booked()
    for body in (
        chat(temperature=9),
        chat() | {"model": "nope"},
        chat("a b c", max_context_length=1),
    ):
        with pytest.raises(TidemillError):
            await events(inference, CHAT, body, booked)
    with pytest.raises(RequestRefused):
        await events(inference, RESPONSES, {"model": "echo", "input": "a b"} | {"n": 1}, booked)
    with pytest.raises(ContextLengthExceeded) as caught:
        await events(inference, RESPONSES, {"model": "echo", "input": "w " * (CONTEXT + 1)}, booked)
    assert caught.value.param == "input"
    assert booked == []


async def test_a_failure_in_mid_stream_is_an_event() -> None:
    """After the first event an error is sent in the envelope, and no ``[DONE]`` follows."""
    booked = Booked()
    inference = LocalInference({"echo": Scripted([Piece(text="a")], EngineLost("gone"))})
    data = await events(inference, CHAT, chat(), booked)
    assert json.loads(data[-1])["error"]["code"] == "engine_restarted"
    assert "[DONE]" not in data
    assert booked == [("echo", Usage(input=4, output=1))]
    data = await events(inference, RESPONSES, {"model": "echo", "input": "x"})
    last = EVENT.validate_json(data[-1], strict=True)
    assert (last.type, last.code) == ("error", "engine_restarted")


async def test_pieces_that_stop_short_are_a_lost_engine(ask: Ask) -> None:
    """An engine that ends without ``finish`` was lost, streamed or not."""
    inference = LocalInference({"echo": Scripted([Piece(text="a")])})
    data = await events(inference, CHAT, chat())
    assert json.loads(data[-1])["error"]["code"] == "engine_restarted"


async def test_a_choice_that_fails_ends_the_others(
    inference: LocalInference, echo: Watched
) -> None:
    """With several prompts one failure is the answer, and nothing is left running."""
    with pytest.raises(EngineLost):
        await events(inference, TEXT, {"model": "echo", "prompt": ["!lost", "!wait forever"]})
    assert echo.open == 0


async def test_closing_a_stream_frees_its_slots(inference: LocalInference, echo: Watched) -> None:
    """A reader that leaves closes every generation and is billed for what it got."""
    for n in (1, 3):
        booked = Booked()
        raw = json.dumps(chat("a b c d", n=n, stream=True)).encode()
        stream = inference.stream(CHAT, raw, owner="o", booked=booked)
        assert b"assistant" in await anext(stream)
        assert b'"a"' in await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        assert echo.open == 0
        ((model, usage),) = booked
        assert model == "echo"
        assert usage.input == 4
        assert 1 <= usage.output <= 4 * n


async def test_a_cancelled_answer_frees_its_slots(ask: Ask, echo: Watched) -> None:
    """Cancelling whoever waits for an answer closes its generations."""
    for n in (1, 2):
        waiting = asyncio.ensure_future(ask(CHAT, chat("!wait forever", n=n)))
        await echo.opened(n)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert echo.open == 0


class Halting(Watched):
    """An engine that stops in the middle: choices after the first after two tokens, the first after
    three, or once it has ended."""

    def __init__(self, *, first_ends: bool) -> None:
        super().__init__()
        self.first_ends = first_ends
        self.halted = asyncio.Semaphore(0)

    async def generate(self, generation: Generation) -> AsyncIterator[Piece]:
        """Word by word."""
        self.asked.append(generation)
        first = len(self.asked) == 1
        for text in "abc" if first else "ab":
            yield Piece(text=text)
        if first and self.first_ends:
            yield Piece(finish="stop", usage=Usage(input=4, output=3))
        self.halted.release()
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("n", "first_ends", "output"), [(1, False, 3), (2, False, 5), (2, True, 5), (3, True, 7)]
)
async def test_a_cancelled_answer_is_billed_by_its_tokens(
    n: int, first_ends: bool, output: int
) -> None:
    """Once: the prompt, and what each choice had until then."""
    engine, booked = Halting(first_ends=first_ends), Booked()
    inference = LocalInference({"echo": engine})
    waiting = asyncio.ensure_future(
        inference.answer(
            CHAT, json.dumps(chat(n=n)).encode(), lane=Lane.BATCH, owner="o", booked=booked
        )
    )
    for _ in range(n):
        await engine.halted.acquire()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert booked == [("echo", Usage(input=4, output=output))]


@pytest.mark.parametrize(("n", "input"), [(1, 3), (2, 3)])
async def test_a_cancelled_answer_is_billed_for_each_of_its_prompts(n: int, input: int) -> None:
    """Each once, however many answers it was to have."""
    engine, booked = Halting(first_ends=False), Booked()
    body = {"model": "echo", "prompt": ["one two", "three"], "n": n}
    waiting = asyncio.ensure_future(
        LocalInference({"echo": engine}).answer(
            TEXT, json.dumps(body).encode(), lane=Lane.BATCH, owner="o", booked=booked
        )
    )
    for _ in range(2 * n):
        await engine.halted.acquire()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert booked == [("echo", Usage(input=input, output=2 * 2 * n + 1))]


@pytest.mark.parametrize("computed", [(), (3, 7)])
async def test_cancelled_embeddings_are_billed_by_what_was_computed(
    echo: Watched, monkeypatch: pytest.MonkeyPatch, computed: tuple[int, ...]
) -> None:
    """Once, by the tokens of the inputs that have their vectors; nothing before the first has."""
    halted = asyncio.Event()

    async def embed(asked: Embedding, told: Callable[[int], None]) -> Embedded:
        for tokens in computed:
            told(tokens)
        halted.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(echo, "embed", embed)
    booked = Booked()
    body = b'{"model": "echo", "input": ["a b c", "d e f g", "h"]}'
    waiting = asyncio.ensure_future(
        LocalInference({"echo": echo}).answer(
            "/v1/embeddings", body, lane=Lane.INTERACTIVE, owner="o", booked=booked
        )
    )
    await halted.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert booked == [("echo", Usage(input=tokens)) for tokens in computed[-1:]]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, chat(n=2, logprobs=True, stop="dear", max_tokens=3)),
        (CHAT, chat(response_format={"type": "json_object"})),
        (
            CHAT,
            chat(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="required"),
        ),
        (TEXT, {"model": "echo", "prompt": ["one two", "three"], "echo": True}),
        (RESPONSES, {"model": "echo", "input": "one two"}),
    ],
)
async def test_an_answer_is_the_same_where_it_may_be_billed_early(
    inference: LocalInference, ask: Ask, endpoint: str, body: dict[str, Any]
) -> None:
    """The engine tells as it goes, and nobody can see that in the answer; it is booked as any."""
    booked = Booked()
    told = await inference.answer(
        endpoint, json.dumps(body).encode(), lane=Lane.BATCH, owner="o", booked=booked
    )
    plain = await ask(endpoint, body)
    assert isinstance(told, Answer)
    assert isinstance(plain, Answer)
    assert _timeless(told.body) == _timeless(plain.body)
    assert told.usage == plain.usage
    assert booked == []


def _timeless(body: bytes) -> Any:
    """Without ids and times, which no two answers share."""
    hidden = re.sub(
        rb'"(id|call_id)":"[^"]*"|"(created|created_at|completed_at)":\d+', b'"":0', body
    )
    return json.loads(hidden)


async def test_line_separators_are_escaped_in_events(inference: LocalInference) -> None:
    """No event is cut in two by a reader that splits at U+2028 or U+0085."""
    raw = json.dumps(chat("a\u2028b\x85c d", stream=True)).encode()
    text = b"".join([e async for e in inference.stream(CHAT, raw, owner="o")]).decode()
    assert "\u2028" not in text
    assert "\x85" not in text
    said = "".join(
        json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") or ""
        for line in text.split("\n\n")[:-2]
    )
    assert said == "a\u2028b\x85c d"
