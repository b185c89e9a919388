"""Bounded types and nested objects that several request bodies share.

A parameter that this server cannot honour is declared with type ``None``: ``null`` passes, anything
else is refused by name in ``decoding``. What is accepted without effect is typed, so that a wrong
type is still told.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Temperature = Annotated[float, Meta(ge=0, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepeatPenalty = Annotated[float, Meta(gt=0, le=10)]
TopK = Annotated[int, Meta(ge=0, le=1_000_000)]
Choices = Annotated[int, Meta(ge=1, le=128)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
LogitBias = dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]]
StopText = Annotated[str, Meta(min_length=1)]
Stop = StopText | Annotated[list[StopText], Meta(max_length=4)]
MAX_INPUTS = 2_048
"""Prompts or embedding inputs of one request (the API's own limit)."""

Labels = dict[str, str]
Hint = str | None
"""Routing and caching hints to a hosted service; they mean nothing on this server."""


class Nested(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of all nested objects: an unknown key is refused, not lost."""


class StreamOptions(Nested):
    """``include_obfuscation`` pads chunks against traffic analysis on the way to a hosted service;
    accepted without effect."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextPart(Nested):
    """A content part; only text is read here, the other kinds are refused by position."""

    type: Literal["text", "input_text", "output_text"]
    text: str | None = None
    image_url: None = None
    input_audio: None = None
    file: None = None
    refusal: None = None
    annotations: Any = None
    logprobs: Any = None
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None


Content = str | Annotated[list[TextPart], Meta(min_length=1)] | None


class JsonSchema(Nested):
    """``strict`` changes nothing: the grammar always holds the answer to the schema."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Nested):
    """``text``, any JSON object, or one that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class FunctionCall(Nested):
    """Name and JSON-encoded arguments of a call that a model made."""

    name: str
    arguments: str


class ToolCall(Nested):
    """A call as an assistant message carries it."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | None = None


class Function(Nested):
    """A function that a model may call."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Nested):
    """Only functions can be offered to a model here."""

    type: Literal["function"]
    function: Function


class ToolName(Nested):
    """The function that ``tool_choice`` insists on."""

    name: str


class ToolChoice(Nested):
    """``tool_choice`` as an object."""

    type: Literal["function"]
    function: ToolName


class Sampled(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What chat and text completions have in common.

    ``top_k``, ``min_p``, ``repeat_penalty`` and ``max_context_length`` are this server's extras.
    ``service_tier``, ``user`` and their like are accepted without effect.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repeat_penalty: RepeatPenalty | None = None
    seed: Seed | None = None
    logit_bias: LogitBias | None = None
    stop: Stop | None = None
    max_tokens: Tokens | None = None
    max_context_length: Tokens | None = None
    user: Hint = None
    metadata: Labels | None = None
    store: bool | None = None
    service_tier: Hint = None
    safety_identifier: Hint = None
    prompt_cache_key: Hint = None
    prompt_cache_retention: Hint = None
    prompt_cache_options: dict[str, Any] | None = None


class Message(Nested):
    """A chat message of any role."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Any = None
    audio: None = None
    function_call: None = None
