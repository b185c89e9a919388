"""Answers are what the SDK's types say, strictly."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any, TypeVar

import pytest
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import BaseModel

from tests.backends.inference.conftest import CHAT, EMBED, RESPONSES, TEXT, Ask, chat, minimal
from tidemill.backends.echo import CONTEXT
from tidemill.backends.inference import LocalInference
from tidemill.types import Answer, Refusal, Usage

pytestmark = pytest.mark.anyio

M = TypeVar("M", bound=BaseModel)

ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"why": {"type": "string"}, "a": {"type": "integer"}},
    },
}


async def got(ask: Ask, endpoint: str, body: dict[str, Any], model: type[M]) -> tuple[M, Answer]:
    """The answer as the SDK's type, validated strictly."""
    outcome = await ask(endpoint, body)
    assert isinstance(outcome, Answer), outcome
    return model.model_validate_json(outcome.body, strict=True), outcome


async def test_a_chat_answer(ask: Ask) -> None:
    """A chat completion has its text, its end, its counts and who made it."""
    completion, outcome = await got(ask, CHAT, chat("one two  three"), ChatCompletion)
    (choice,) = completion.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", "one two  three")
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 3
    assert completion.usage.completion_tokens == 3
    assert completion.usage.total_tokens == 6
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 0
    assert completion.usage.completion_tokens_details is not None
    assert completion.usage.completion_tokens_details.reasoning_tokens == 0
    assert completion.id.startswith("chatcmpl-")
    assert completion.system_fingerprint
    assert completion.model == outcome.model == "echo"
    assert outcome.usage == Usage(input=3, output=3)
    assert "content" in json.loads(outcome.body)["choices"][0]["message"]


async def test_several_choices_count_the_prompt_once(ask: Ask) -> None:
    """``n`` choices are numbered; the prompt is paid for once."""
    completion, outcome = await got(ask, CHAT, chat("a b", n=3), ChatCompletion)
    assert [c.index for c in completion.choices] == [0, 1, 2]
    assert outcome.usage == Usage(input=2, output=6)


async def test_a_cut_answer_says_length(ask: Ask) -> None:
    """``max_tokens`` ends an answer with ``finish_reason: length``."""
    completion, _ = await got(ask, CHAT, chat("a b c d", max_tokens=2), ChatCompletion)
    assert completion.choices[0].message.content == "a b"
    assert completion.choices[0].finish_reason == "length"


async def test_chat_logprobs(ask: Ask) -> None:
    """Log-probabilities come per token with bytes, and alternatives where asked for."""
    completion, _ = await got(ask, CHAT, chat("é b", logprobs=True), ChatCompletion)
    scores = completion.choices[0].logprobs
    assert scores is not None
    assert scores.content is not None
    assert [e.token for e in scores.content] == ["é", " b"]
    assert scores.content[0].bytes == [0xC3, 0xA9]
    assert scores.content[0].top_logprobs == []
    completion, _ = await got(ask, CHAT, chat("a", logprobs=True, top_logprobs=2), ChatCompletion)
    scores = completion.choices[0].logprobs
    assert scores is not None
    assert scores.content is not None
    assert scores.content[0].top_logprobs[0].token == "a"


async def test_a_tool_call(ask: Ask) -> None:
    """A call has id, name and JSON arguments; the text is null then."""
    body = chat("hi", tools=[{"type": "function", "function": ADD}], tool_choice="required")
    completion, _ = await got(ask, CHAT, body, ChatCompletion)
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "add"
    assert json.loads(call.function.arguments) == {"why": "hi", "a": 0}


async def test_json_answers(ask: Ask) -> None:
    """``json_object`` and ``json_schema`` give JSON."""
    completion, _ = await got(
        ask, CHAT, chat("hi", response_format={"type": "json_object"}), ChatCompletion
    )
    assert json.loads(completion.choices[0].message.content or "") == {"echo": "hi"}
    schema = {"type": "object", "properties": {"why": {"type": "string"}}}
    format = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    completion, _ = await got(ask, CHAT, chat("hi", response_format=format), ChatCompletion)
    assert json.loads(completion.choices[0].message.content or "") == {"why": "hi"}


async def test_text_completions(ask: Ask) -> None:
    """Prompts times ``n`` choices, prompts in order, each prompt paid for once."""
    body = {"model": "echo", "prompt": ["a b", "c"], "n": 2}
    completion, outcome = await got(ask, TEXT, body, Completion)
    assert [(c.index, c.text) for c in completion.choices] == [
        (0, "a b"),
        (1, "a b"),
        (2, "c"),
        (3, "c"),
    ]
    assert outcome.usage == Usage(input=3, output=6)
    assert completion.object == "text_completion"


async def test_text_completion_of_tokens(ask: Ask) -> None:
    """A token list is one prompt."""
    completion, outcome = await got(
        ask, TEXT, {"model": "echo", "prompt": [5, 6, 7], "echo": True}, Completion
    )
    assert len(completion.choices) == 1
    assert outcome.usage.input == 3


async def test_text_logprobs(ask: Ask) -> None:
    """The older shape has parallel lists; offsets count characters."""
    completion, _ = await got(
        ask, TEXT, {"model": "echo", "prompt": "ab  cd", "logprobs": 1}, Completion
    )
    scores = completion.choices[0].logprobs
    assert scores is not None
    assert scores.tokens == ["ab", "  cd"]
    assert scores.text_offset == [0, 2]
    assert scores.token_logprobs == [0.0, 0.0]
    assert scores.top_logprobs == [{"ab": 0.0}, {"  cd": 0.0}]


async def test_embeddings_as_floats_and_base64(ask: Ask) -> None:
    """Both encodings are the same float32 vectors, in input order."""
    body = {"model": "echo", "input": ["a", "b c"]}
    floats, outcome = await got(ask, EMBED, body, CreateEmbeddingResponse)
    assert [e.index for e in floats.data] == [0, 1]
    assert outcome.usage == Usage(input=3)
    assert floats.usage.total_tokens == 3
    packed = await ask(EMBED, {**body, "encoding_format": "base64"})
    assert isinstance(packed, Answer)
    for one, other in zip(floats.data, json.loads(packed.body)["data"], strict=True):
        raw = base64.b64decode(other["embedding"])
        assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == pytest.approx(one.embedding)


async def test_a_response(ask: Ask) -> None:
    """A response object is complete: output, usage with all details, what was asked."""
    body = {
        "model": "echo",
        "instructions": "Be brief.",
        "input": "one two",
        "metadata": {"k": "v"},
    }
    response, outcome = await got(ask, RESPONSES, body, Response)
    assert response.status == "completed"
    assert response.output_text == "one two"
    assert response.usage is not None
    assert response.usage.input_tokens_details.cache_write_tokens == 0
    assert response.usage.input_tokens == 4
    assert response.metadata == {"k": "v"}
    assert response.instructions == "Be brief."
    assert outcome.usage == Usage(input=4, output=2)


async def test_a_cut_response_is_incomplete(ask: Ask) -> None:
    """``max_output_tokens`` gives status ``incomplete`` and its reason."""
    response, _ = await got(
        ask, RESPONSES, {"model": "echo", "input": "a b c", "max_output_tokens": 1}, Response
    )
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


async def test_a_response_with_calls_logprobs_and_json(ask: Ask) -> None:
    """Function calls are output items; logprobs and JSON are where the types want them."""
    tools = [{"type": "function", **ADD}]
    response, _ = await got(
        ask,
        RESPONSES,
        {
            "model": "echo",
            "input": "hi",
            "tools": tools,
            "tool_choice": {"type": "function", "name": "add"},
        },
        Response,
    )
    (item,) = response.output
    assert item.type == "function_call"
    assert item.name == "add"
    response, _ = await got(
        ask,
        RESPONSES,
        {
            "model": "echo",
            "input": "hi",
            "top_logprobs": 1,
            "text": {"format": {"type": "json_object"}},
        },
        Response,
    )
    assert json.loads(response.output_text) == {"echo": "hi"}


async def test_a_prompt_beyond_the_context_never_ran(ask: Ask) -> None:
    """The refusal has no status, so that the line's row is an error without response."""
    outcome = await ask(CHAT, chat("w " * 101, max_context_length=100))
    assert isinstance(outcome, Refusal)
    assert outcome.status_code is None
    assert outcome.code == "context_length_exceeded"
    assert outcome.message == "Prompt length 101 exceeds model context 100"


@pytest.mark.parametrize(
    ("endpoint", "field"),
    [(CHAT, "messages"), (TEXT, "prompt"), (RESPONSES, "input"), (EMBED, "input")],
)
async def test_a_prompt_that_is_too_long_is_named_as_the_client_named_it(
    ask: Ask, endpoint: str, field: str
) -> None:
    """Not as the engine calls it."""
    words = "w " * (CONTEXT + 1)
    body = chat(words) if endpoint == CHAT else {**minimal(endpoint), field: words}
    outcome = await ask(endpoint, body)
    assert isinstance(outcome, Refusal)
    assert (outcome.code, outcome.param) == ("context_length_exceeded", field)


async def test_a_schema_that_cannot_be_is_named_as_the_client_named_it(ask: Ask) -> None:
    """``text.format`` is what ``response_format`` is elsewhere."""
    format = {"type": "json_schema", "name": "x", "schema": {"type": "wat"}}
    outcome = await ask(RESPONSES, minimal(RESPONSES, text={"format": format}))
    assert isinstance(outcome, Refusal)
    assert (outcome.status_code, outcome.param) == (400, "text.format")


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, chat("one two", n=2)),
        (TEXT, {"model": "echo", "prompt": "one two"}),
        (TEXT, {"model": "echo", "prompt": ["one two", "three"], "n": 2}),
        (TEXT, {"model": "echo", "prompt": [[5, 6], [7]]}),
        (RESPONSES, {"model": "echo", "input": "one two"}),
        (EMBED, {"model": "echo", "input": "one two"}),
        (EMBED, {"model": "echo", "input": ["one two", "three"]}),
        (EMBED, {"model": "echo", "input": [[5, 6], [7]]}),
    ],
)
async def test_a_prompt_is_counted_as_it_is_billed(
    inference: LocalInference, ask: Ask, endpoint: str, body: dict[str, Any]
) -> None:
    """On every endpoint, before anything is computed."""
    counted = await inference.count(endpoint, json.dumps(body).encode())
    answer = await ask(endpoint, body)
    assert isinstance(answer, Answer)
    assert counted == answer.usage.input > 0


async def test_what_cannot_run_has_no_count(inference: LocalInference) -> None:
    """A broken body, a model that is not here, an input of no kind."""
    for endpoint, body in (
        (CHAT, b"{"),
        (TEXT, b'{"model": "other", "prompt": "a"}'),
        (EMBED, b'{"model": "other", "input": "a"}'),
        (EMBED, b'{"model": "echo", "input": ["a", [1]]}'),
    ):
        assert await inference.count(endpoint, body) is None
