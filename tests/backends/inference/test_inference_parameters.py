"""Every documented parameter: honoured, accepted without effect, or refused by name."""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec
import openai.types.chat as sdk
import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as text_params
import openai.types.embedding_create_params as embed_params
import openai.types.responses.response_create_params as response_params
import pytest

from tests.backends.inference.conftest import (
    CHAT,
    EMBED,
    RESPONSES,
    TEXT,
    Ask,
    Watched,
    chat,
    minimal,
)
from tidemill.backends.inference import LocalInference, completions, embeddings, responses
from tidemill.backends.inference import chat as chat_module
from tidemill.settings import Settings
from tidemill.types import Answer, BatchParams, Lane, Refusal

pytestmark = pytest.mark.anyio

FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FLAT = {"type": "function", "name": "f", "parameters": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}

ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    *[
        (endpoint, extra)
        for endpoint in (CHAT, TEXT)
        for extra in [
            {"temperature": 0.5},
            {"temperature": 2},
            {"temperature": None},
            {"top_p": 0},
            {"top_k": 40},
            {"min_p": 0.05},
            {"repeat_penalty": 1.1},
            {"frequency_penalty": -2},
            {"presence_penalty": 2.0},
            {"seed": 7},
            {"logit_bias": {"50256": -100}},
            {"logit_bias": {}},
            {"stop": "."},
            {"stop": ["a", "b", "c", "d"]},
            {"stop": None},
            {"n": 2},
            {"max_tokens": 1},
            {"max_context_length": 100},
            {"user": "u"},
            {"stream": False},
            {"stream": None},
            {"stream_options": None},
        ]
    ],
    *[
        (CHAT, extra)
        for extra in [
            {"max_completion_tokens": 5},
            {"max_completion_tokens": 5, "max_tokens": 5},
            {"metadata": {"k": "v"}},
            {"store": True},
            {"service_tier": "flex"},
            {"safety_identifier": "x"},
            {"prompt_cache_key": "k"},
            {"prompt_cache_retention": "24h"},
            {"prompt_cache_options": {"mode": "implicit"}},
            {"parallel_tool_calls": True},
            {"logprobs": True},
            {"logprobs": True, "top_logprobs": 20},
            {"logprobs": False, "top_logprobs": 0},
            {"response_format": {"type": "text"}},
            {"response_format": {"type": "json_object"}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "strict": True, "schema": SCHEMA},
                }
            },
            {"tools": []},
            {"tools": [FUNCTION], "tool_choice": "auto"},
            {"tools": [FUNCTION], "tool_choice": "none"},
            {"tools": [FUNCTION], "tool_choice": "required", "parallel_tool_calls": False},
            {
                "tools": [FUNCTION],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
            {"modalities": ["text"]},
            {"reasoning_effort": "none"},
            {"verbosity": "medium"},
            {"prediction": {"type": "content", "content": "Good"}},
            {"audio": None},
            {"functions": None},
            {"web_search_options": None},
        ]
    ],
    *[
        (TEXT, extra)
        for extra in [
            {"echo": True},
            {"logprobs": 3},
            {"best_of": 1},
            {"suffix": None},
            {"suffix": ""},
            {"prompt": ["a", "b"]},
            {"prompt": [1, 2, 3]},
            {"prompt": [[1, 2], [3]]},
        ]
    ],
    *[
        (EMBED, extra)
        for extra in [
            {"encoding_format": "float"},
            {"encoding_format": "base64"},
            {"dimensions": 4},
            {"user": "u"},
            {"input": ["a", "b"]},
            {"input": [1, 2]},
            {"input": [[1, 2], [3]]},
            {"input": ["x"] * 2048},
        ]
    ],
    *[
        (RESPONSES, extra)
        for extra in [
            {"instructions": "Be brief."},
            {"input": [{"role": "user", "content": "hi"}]},
            {
                "input": [
                    {
                        "type": "message",
                        "role": "user",
                        "content": [{"type": "input_text", "text": "hi"}],
                    },
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "4"},
                    {"type": "reasoning", "id": "rs_1", "summary": []},
                ]
            },
            {"max_output_tokens": 16},
            {"temperature": 1, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "repeat_penalty": 1.2},
            {"max_context_length": 100},
            {"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}},
            {"text": {"format": {"type": "json_object"}, "verbosity": "medium"}},
            {"tools": [FLAT], "tool_choice": {"type": "function", "name": "f"}},
            {"parallel_tool_calls": False},
            {"top_logprobs": 2},
            {"include": ["message.output_text.logprobs"]},
            {"truncation": "disabled"},
            {"metadata": {"k": "v"}, "store": True, "user": "u", "service_tier": "auto"},
            {"safety_identifier": "x", "prompt_cache_key": "k", "prompt_cache_retention": "24h"},
            {"prompt_cache_options": {"mode": "explicit"}},
            {"background": False},
            {"previous_response_id": None, "conversation": None, "reasoning": None},
        ]
    ],
]


@pytest.mark.parametrize(("endpoint", "extra"), ACCEPTED, ids=str)
async def test_an_accepted_parameter_leads_to_an_answer(
    ask: Ask, endpoint: str, extra: dict[str, Any]
) -> None:
    """Honoured parameters and hints without effect do not stand in the way."""
    outcome = await ask(endpoint, {**minimal(endpoint), **extra})
    assert isinstance(outcome, Answer), outcome


UNSUPPORTED, VALUE, TYPE = "unsupported_parameter", "invalid_value", "invalid_type"

REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    *[
        (endpoint, extra, param, code)
        for endpoint in (CHAT, TEXT)
        for extra, param, code in [
            ({"temperature": 2.1}, "temperature", VALUE),
            ({"temperature": -0.1}, "temperature", VALUE),
            ({"temperature": "hot"}, "temperature", TYPE),
            ({"temperature": True}, "temperature", TYPE),
            ({"top_p": 1.5}, "top_p", VALUE),
            ({"top_k": -1}, "top_k", VALUE),
            ({"min_p": 2}, "min_p", VALUE),
            ({"repeat_penalty": 0}, "repeat_penalty", VALUE),
            ({"frequency_penalty": 2.5}, "frequency_penalty", VALUE),
            ({"presence_penalty": -3}, "presence_penalty", VALUE),
            ({"seed": 1.5}, "seed", TYPE),
            ({"seed": 2**64}, "seed", VALUE),
            ({"logit_bias": {"hello": 1}}, "logit_bias", VALUE),
            ({"logit_bias": {"-1": 1}}, "logit_bias", VALUE),
            ({"logit_bias": {"1": 101}}, "logit_bias", VALUE),
            ({"logit_bias": [1]}, "logit_bias", TYPE),
            ({"stop": ["a", "b", "c", "d", "e"]}, "stop", VALUE),
            ({"stop": ""}, "stop", VALUE),
            ({"stop": ["a", ""]}, "stop[1]", VALUE),
            ({"stop": 5}, "stop", TYPE),
            ({"n": 0}, "n", VALUE),
            ({"n": 129}, "n", VALUE),
            ({"n": "2"}, "n", TYPE),
            ({"max_tokens": 0}, "max_tokens", VALUE),
            ({"max_tokens": -5}, "max_tokens", VALUE),
            ({"max_tokens": 1.5}, "max_tokens", TYPE),
            ({"max_context_length": 0}, "max_context_length", VALUE),
            ({"stream": "yes"}, "stream", TYPE),
            ({"stream_options": {"include_usage": True}}, "stream_options", VALUE),
            ({"model": 3}, "model", TYPE),
            ({"model": None}, "model", "missing_required_parameter"),
            ({"foo": 1}, "foo", "unknown_parameter"),
        ]
    ],
    *[
        (CHAT, extra, param, code)
        for extra, param, code in [
            ({"messages": []}, "messages", VALUE),
            ({"messages": "hi"}, "messages", TYPE),
            ({"messages": ["hi"]}, "messages[0]", TYPE),
            (
                {"messages": [{"content": "x"}]},
                "messages[0].role",
                "missing_required_parameter",
            ),
            ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", VALUE),
            ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", TYPE),
            (
                {"messages": [{"role": "user"}]},
                "messages[0].content",
                "missing_required_parameter",
            ),
            ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", VALUE),
            (
                {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
                "messages[0].content[0].text",
                "missing_required_parameter",
            ),
            (
                {"messages": [{"role": "user", "content": "x", "mood": 1}]},
                "messages[0].mood",
                "unknown_parameter",
            ),
            (
                {"messages": [{"role": "tool", "content": "4"}]},
                "messages[0].tool_call_id",
                "missing_required_parameter",
            ),
            ({"max_completion_tokens": 0}, "max_completion_tokens", VALUE),
            ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens", VALUE),
            ({"top_logprobs": 3}, "top_logprobs", VALUE),
            ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", VALUE),
            ({"logprobs": 1}, "logprobs", TYPE),
            ({"audio": {"voice": "x", "format": "mp3"}}, "audio", UNSUPPORTED),
            ({"functions": [{"name": "f"}]}, "functions", UNSUPPORTED),
            ({"function_call": "auto"}, "function_call", UNSUPPORTED),
            ({"moderation": {"model": "m"}}, "moderation", UNSUPPORTED),
            ({"web_search_options": {}}, "web_search_options", UNSUPPORTED),
            ({"modalities": ["text", "audio"]}, "modalities[1]", "unsupported_value"),
            ({"reasoning_effort": "high"}, "reasoning_effort", VALUE),
            ({"verbosity": "low"}, "verbosity", VALUE),
            ({"tool_choice": "required"}, "tool_choice", VALUE),
            (
                {
                    "tools": [FUNCTION],
                    "tool_choice": {"type": "function", "function": {"name": "g"}},
                },
                "tool_choice",
                VALUE,
            ),
            ({"tools": [{"type": "custom"}]}, "tools[0].type", VALUE),
            (
                {"tools": [{"type": "function", "function": {}}]},
                "tools[0].function.name",
                "missing_required_parameter",
            ),
            ({"response_format": {"type": "xml"}}, "response_format.type", VALUE),
            (
                {"response_format": {"type": "json_schema"}},
                "response_format.json_schema",
                "missing_required_parameter",
            ),
            ({"best_of": 2}, "best_of", "unknown_parameter"),
        ]
    ],
    *[
        (TEXT, extra, param, code)
        for extra, param, code in [
            ({"prompt": None}, "prompt", TYPE),
            ({"prompt": []}, "prompt", VALUE),
            ({"prompt": ""}, "prompt", VALUE),
            ({"prompt": ["a", ""]}, "prompt[1]", VALUE),
            ({"prompt": ["a", 1]}, "prompt[1]", VALUE),
            ({"prompt": [1, "a"]}, "prompt", VALUE),
            ({"prompt": ["a"] * 100, "n": 100}, "n", VALUE),
            ({"best_of": 2}, "best_of", "unsupported_value"),
            ({"suffix": "end"}, "suffix", "unsupported_value"),
            ({"echo": True, "logprobs": 1}, "echo", UNSUPPORTED),
            ({"logprobs": 21}, "logprobs", VALUE),
            ({"response_format": {"type": "text"}}, "response_format", "unknown_parameter"),
        ]
    ],
    *[
        (EMBED, extra, param, code)
        for extra, param, code in [
            ({"input": ""}, "input", VALUE),
            ({"input": []}, "input", VALUE),
            ({"input": ["a", ""]}, "input[1]", VALUE),
            ({"input": [[1], []]}, "input[1]", VALUE),
            ({"input": ["x"] * 2049}, "input", VALUE),
            ({"input": [-1]}, "input[0]", VALUE),
            ({"input": {"a": 1}}, "input", TYPE),
            ({"encoding_format": "hex"}, "encoding_format", VALUE),
            ({"dimensions": 0}, "dimensions", VALUE),
            ({"dimensions": 4096}, "dimensions", VALUE),
            ({"temperature": 1}, "temperature", "unknown_parameter"),
        ]
    ],
    *[
        (RESPONSES, extra, param, code)
        for extra, param, code in [
            ({"input": []}, "input", VALUE),
            ({"input": None}, "input", TYPE),
            (
                {"input": [{"role": "user"}]},
                "input[0].content",
                "missing_required_parameter",
            ),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", VALUE),
            (
                {
                    "input": [
                        {
                            "role": "user",
                            "content": [{"type": "input_image", "image_url": "data:"}],
                        }
                    ]
                },
                "input[0].content[0]",
                "unsupported_value",
            ),
            ({"background": True}, "background", UNSUPPORTED),
            ({"previous_response_id": "resp_1"}, "previous_response_id", UNSUPPORTED),
            ({"conversation": "conv_1"}, "conversation", UNSUPPORTED),
            ({"prompt": {"id": "p"}}, "prompt", UNSUPPORTED),
            ({"reasoning": {"effort": "low"}}, "reasoning", UNSUPPORTED),
            ({"max_tool_calls": 1}, "max_tool_calls", UNSUPPORTED),
            ({"context_management": []}, "context_management", UNSUPPORTED),
            ({"moderation": {}}, "moderation", UNSUPPORTED),
            ({"image": {}}, "image", UNSUPPORTED),
            ({"access_programs": {}}, "access_programs", UNSUPPORTED),
            ({"background_options": {}}, "background_options", UNSUPPORTED),
            ({"truncation": "auto"}, "truncation", VALUE),
            ({"tools": [{"type": "web_search"}]}, "tools[0].type", VALUE),
            ({"include": ["reasoning.encrypted_content"]}, "include[0]", VALUE),
            ({"max_output_tokens": 0}, "max_output_tokens", VALUE),
            ({"top_logprobs": 21}, "top_logprobs", VALUE),
            (
                {"text": {"format": {"type": "json_schema", "name": "s"}}},
                "text.format.schema",
                "missing_required_parameter",
            ),
            ({"messages": []}, "messages", "unknown_parameter"),
        ]
    ],
]


@pytest.mark.parametrize(("endpoint", "extra", "param", "code"), REFUSED, ids=str)
async def test_a_refused_parameter_is_named(
    ask: Ask, endpoint: str, extra: dict[str, Any], param: str, code: str
) -> None:
    """One 400 that names the field in ``param`` and in its message; the engine is not asked."""
    outcome = await ask(endpoint, {**minimal(endpoint), **extra})
    assert isinstance(outcome, Refusal)
    assert (outcome.status_code, outcome.param, outcome.code) == (400, param, code)
    assert param in outcome.message
    assert not outcome.retry


@pytest.mark.parametrize(
    ("params", "body"),
    [
        (chat_params, chat_module.Body),
        (text_params, completions.Body),
        (embed_params, embeddings.Body),
        (response_params, responses.Body),
    ],
    ids=["chat", "completions", "embeddings", "responses"],
)
def test_every_parameter_of_the_sdk_is_decided_on(params: Any, body: Any) -> None:
    """No parameter that the SDK can send is merely unknown: each is a field of the body."""
    documented: set[str] = set()
    for name in dir(params):
        if name.endswith(("CreateParamsBase", "CreateParamsNonStreaming", "EmbeddingCreateParams")):
            documented |= set(getattr(params, name).__annotations__)
    assert "model" in documented
    assert documented - set(get_type_hints(body)) == set()


async def test_a_tool_is_refused_where_the_template_cannot_render_it(
    echo: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``tools`` on a model without tool template is a named 400, not silence."""
    plain = msgspec.structs.replace(echo.card, tools=False)
    monkeypatch.setattr(echo, "_card", plain)
    inference = LocalInference({"echo": echo})
    body = msgspec.json.encode(chat(tools=[FUNCTION]))
    outcome = await inference.answer(CHAT, body, lane=Lane.BATCH, owner="o")
    assert isinstance(outcome, Refusal)
    assert (outcome.param, outcome.code) == ("tools", "unsupported_parameter")


@pytest.mark.parametrize("order", [("type", "image_url"), ("image_url", "type")])
async def test_an_image_part_is_named_by_its_place(ask: Ask, order: tuple[str, str]) -> None:
    """``messages[2].content[0]`` is the param, whatever the order of keys."""
    values = {"type": "image_url", "image_url": {"url": "data:,"}}
    part = {key: values[key] for key in order}
    body = chat()
    body["messages"] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "user", "content": [part]},
    ]
    outcome = await ask(CHAT, body)
    assert isinstance(outcome, Refusal)
    assert (outcome.param, outcome.code) == ("messages[2].content[0]", "unsupported_value")


async def test_body_beats_batch_beats_server(echo: Watched, ask: Ask) -> None:
    """Each parameter comes from the first of line, batch and server that gives it."""
    params = BatchParams(
        max_decoding_length=9, temperature=0.7, top_p=0.8, top_k=30, max_context_length=64
    )
    await ask(CHAT, chat(), params)
    await ask(
        CHAT,
        chat(temperature=0, top_p=0.5, top_k=0, max_tokens=3, max_context_length=32),
        params,
    )
    await ask(CHAT, chat())
    batch, line, nothing = echo.asked
    assert (batch.sampling.temperature, batch.sampling.top_p, batch.sampling.top_k) == (
        0.7,
        0.8,
        30,
    )
    assert (batch.max_tokens, batch.max_context) == (9, 64)
    assert (line.sampling.temperature, line.sampling.top_p, line.sampling.top_k) == (0.0, 0.5, 0)
    assert (line.max_tokens, line.max_context) == (3, 32)
    assert (nothing.sampling.temperature, nothing.max_tokens, nothing.max_context) == (
        0.0,
        None,
        None,
    )


async def test_the_server_bounds_answers_where_nobody_else_does(echo: Watched) -> None:
    """``max_decoding_length`` of the settings is the last resort on every endpoint."""
    inference = LocalInference({"echo": echo}, Settings(max_decoding_length=2))
    raw = b'{"model":"echo","messages":[{"role":"user","content":"a b c"}]}'
    await inference.answer(CHAT, raw, lane=Lane.BATCH, owner="o")
    await inference.answer(
        RESPONSES, b'{"model":"echo","input":"a b c"}', lane=Lane.BATCH, owner="o"
    )
    await inference.answer(
        CHAT, raw, lane=Lane.BATCH, owner="o", defaults=BatchParams(max_decoding_length=1)
    )
    assert [g.max_tokens for g in echo.asked] == [2, 2, 1]


async def test_every_parameter_reaches_the_engine(echo: Watched, ask: Ask) -> None:
    """What is honoured arrives in the engine's record as it was given."""
    await ask(
        CHAT,
        chat(
            temperature=0.5,
            top_p=0.9,
            top_k=5,
            min_p=0.1,
            frequency_penalty=0.2,
            presence_penalty=0.3,
            repeat_penalty=1.1,
            seed=42,
            logit_bias={"7": -50},
            stop=["x", "y"],
            max_completion_tokens=11,
            logprobs=True,
            top_logprobs=2,
            response_format={"type": "json_object"},
        ),
    )
    (got,) = echo.asked
    s = got.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p) == (0.5, 0.9, 5, 0.1)
    assert (s.frequency_penalty, s.presence_penalty, s.repeat_penalty) == (0.2, 0.3, 1.1)
    assert (s.seed, s.logit_bias) == (42, {7: -50.0})
    assert (got.stop, got.max_tokens, got.logprobs) == (("x", "y"), 11, 2)
    assert got.json_schema == {}
    assert (got.lane, got.owner, got.stream) == (Lane.BATCH, "owner", False)


async def test_a_fixed_seed_moves_on_from_choice_to_choice(echo: Watched, ask: Ask) -> None:
    """Choices with one seed would all be the same text."""
    await ask(CHAT, chat(n=3, seed=10, temperature=1))
    assert [g.sampling.seed for g in echo.asked] == [10, 11, 12]


async def test_deterministic_batches_have_a_seed(echo: Watched, ask: Ask) -> None:
    """``deterministic`` fixes the seed unless the line has its own."""
    await ask(CHAT, chat(temperature=1), BatchParams(deterministic=True))
    await ask(CHAT, chat(temperature=1, seed=5), BatchParams(deterministic=True))
    assert [g.sampling.seed for g in echo.asked] == [0, 5]


async def test_messages_arrive_as_templates_expect_them(echo: Watched, ask: Ask) -> None:
    """Text parts are joined, roles are kept, calls and their results are kept."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    await ask(
        CHAT,
        {
            "model": "echo",
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "4"},
                {"role": "user", "name": "ann", "content": "and?"},
            ],
        },
    )
    (got,) = echo.asked
    assert got.messages == (
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "user", "content": "and?", "name": "ann"},
    )


async def test_an_answer_can_be_sent_back_as_history(ask: Ask) -> None:
    """The message of an answer, dumped by the SDK, is a valid message of the next request."""
    first = await ask(CHAT, chat())
    assert isinstance(first, Answer)
    message = sdk.ChatCompletion.model_validate_json(first.body).choices[0].message
    body = chat()
    body["messages"] += [message.model_dump(), {"role": "user", "content": "again"}]
    assert isinstance(await ask(CHAT, body), Answer)


async def test_an_unknown_model_is_not_found(ask: Ask) -> None:
    """404 that names the model, on every endpoint."""
    for endpoint in (CHAT, TEXT, EMBED, RESPONSES):
        outcome = await ask(endpoint, minimal(endpoint) | {"model": "gpt-9"})
        assert isinstance(outcome, Refusal)
        assert (outcome.status_code, outcome.code, outcome.param) == (
            404,
            "model_not_found",
            "model",
        )
        assert "gpt-9" in outcome.message


async def test_a_batch_line_cannot_stream(ask: Ask) -> None:
    """``stream: true`` in a line is refused on every completing endpoint."""
    for endpoint in (CHAT, TEXT, RESPONSES):
        outcome = await ask(endpoint, minimal(endpoint, stream=True))
        assert isinstance(outcome, Refusal)
        assert (outcome.code, outcome.param) == ("streaming_unsupported", "body.stream")


async def test_a_deployment_beats_the_body(inference: LocalInference) -> None:
    """``model`` of the URL wins, and the body may leave its own out."""
    for body in (b'{"prompt":"a"}', b'{"prompt":"a","model":"other"}'):
        outcome = await inference.answer(TEXT, body, lane=Lane.INTERACTIVE, owner="o", model="echo")
        assert isinstance(outcome, Answer)
        assert outcome.model == "echo"


def test_models_of_two_engines_share_a_card(echo: Watched) -> None:
    """A chat and an embeddings engine of one name are one model that does both."""
    chatting, embedding = Watched(), Watched()
    chatting._card = msgspec.structs.replace(echo.card, id="m", embeddings=False)
    embedding._card = msgspec.structs.replace(echo.card, id="m", chat=False)
    inference = LocalInference({"m": chatting, "m for embeddings": embedding})
    (card,) = inference.cards()
    assert (card.id, card.chat, card.embeddings) == ("m", True, True)
    assert inference.knows("m")
    assert not inference.knows("m for embeddings")
    assert inference.place("m", CHAT) == "local/m"
    assert inference.place("m", EMBED) == "local/m for embeddings"


async def test_a_model_without_embeddings_says_so(echo: Watched) -> None:
    """The wrong kind of model is a named 400, not a 404."""
    echo._card = msgspec.structs.replace(echo.card, embeddings=False)
    inference = LocalInference({"echo": echo})
    outcome = await inference.answer(
        EMBED, b'{"model":"echo","input":"a"}', lane=Lane.BATCH, owner="o"
    )
    assert isinstance(outcome, Refusal)
    assert (outcome.status_code, outcome.code) == (400, "unsupported_model")
