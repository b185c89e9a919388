"""``/v1/chat/completions``: the body, the generations it asks for, the answer and its stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tidemill import clock, ids
from tidemill.backends.inference import plan as planning
from tidemill.backends.inference.decoding import decoder, invalid, missing, unsupported
from tidemill.backends.inference.fields import (
    Content,
    Message,
    ResponseFormat,
    Sampled,
    Tokens,
    Tool,
    ToolChoice,
    TopLogprobs,
)
from tidemill.backends.inference.pieces import total
from tidemill.backends.inference.plan import Ask
from tidemill.backends.inference.shapes import (
    DONE,
    FINGERPRINT,
    LogprobShape,
    UsageShape,
    encode,
    event,
    logprob_shapes,
    usage_shape,
)
from tidemill.types import Generation, Piece, Usage


class Body(Sampled):
    """A chat completion request. ``prediction`` and ``verbosity: medium`` promise nothing that
    greedy or sampled decoding breaks; they are accepted without effect."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: Literal["medium"] | None = None
    prediction: dict[str, Any] | None = None
    audio: None = None
    functions: None = None
    function_call: None = None
    moderation: None = None
    web_search_options: None = None


body_decoder = decoder(Body)


def plan(body: Body, ask: Ask) -> list[Generation]:
    """``n`` generations. Raises ``RequestRefused`` naming the field."""
    planning.check_stream_options(body)
    tools, tool_choice = offered(body.tools, body.tool_choice, ask)
    own = body.max_completion_tokens
    if own is None:
        own = body.max_tokens
    elif body.max_tokens is not None and body.max_tokens != own:
        raise invalid("max_tokens", "it contradicts 'max_completion_tokens'; give one of them.")
    logprobs = body.top_logprobs
    if not body.logprobs:
        if logprobs:
            raise invalid("top_logprobs", "it needs 'logprobs': true.")
        logprobs = None
    elif logprobs is None:
        logprobs = 0
    first = Generation(
        model=ask.model,
        lane=ask.lane,
        messages=tuple([message(m, i) for i, m in enumerate(body.messages)]),
        tools=tools,
        tool_choice=tool_choice,
        max_tokens=planning.max_tokens(ask, own),
        max_context=body.max_context_length or ask.params.max_context_length,
        sampling=planning.body_sampling(body, ask.params),
        stop=planning.stops(body.stop),
        logprobs=logprobs,
        json_schema=schema_of(body.response_format, "response_format"),
        stream=ask.stream,
        owner=ask.owner,
        batch=ask.batch,
        deterministic=bool(ask.params.deterministic),
    )
    return copies(first, body.n or 1)


def copies(first: Generation, n: int) -> list[Generation]:
    """The same generation for every choice."""
    if n == 1:
        return [first]
    return [
        msgspec.structs.replace(first, sampling=planning.nth(first.sampling, i)) for i in range(n)
    ]


def text_of(content: Content) -> str | None:
    """The text of a message; its parts are put on lines of their own."""
    if content is None or isinstance(content, str):
        return content
    return "\n".join([part.text or "" for part in content])


def message(m: Message, index: int) -> dict[str, Any]:
    """A message as templates expect it, its content as plain text."""
    role = m.role
    content = m.content
    if not isinstance(content, str):
        if content is not None:
            for number, part in enumerate(content):
                if part.text is None:
                    raise missing(f"messages[{index}].content[{number}].text")
            content = text_of(content)
        elif not (role == "assistant" and (m.tool_calls or m.refusal)):
            raise missing(f"messages[{index}].content")
    shaped: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        if content is None and m.refusal:
            shaped["content"] = m.refusal
        if m.tool_calls:
            shaped["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": call.function.arguments,
                    },
                }
                for call in m.tool_calls
            ]
        if m.reasoning_content:
            shaped["reasoning_content"] = m.reasoning_content
    elif m.tool_calls is not None:
        raise invalid(f"messages[{index}].tool_calls", "only an assistant message has them.")
    if role == "tool":
        if m.tool_call_id is None:
            raise missing(f"messages[{index}].tool_call_id")
        shaped["tool_call_id"] = m.tool_call_id
    if m.name is not None:
        shaped["name"] = m.name
    return shaped


def offered(
    tools: Sequence[Tool] | None,
    choice: Literal["none", "auto", "required"] | ToolChoice | None,
    ask: Ask,
) -> tuple[tuple[dict[str, Any], ...] | None, Any]:
    """Tools and choice for the engine; ``none`` offers nothing."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "it is only allowed when 'tools' are given.")
        return None, None
    if not ask.card.tools:
        raise unsupported("tools", f"The template of model '{ask.model}' cannot render them.")
    if choice == "none":
        return None, None
    shaped = tuple(
        {"type": "function", "function": {k: v for k, v in _fields(tool) if v is not None}}
        for tool in tools
    )
    if isinstance(choice, ToolChoice):
        name = choice.function.name
        if all(tool.function.name != name for tool in tools):
            raise invalid("tool_choice", f"no tool is named '{name}'.")
        return shaped, {"type": "function", "function": {"name": name}}
    return shaped, None if choice == "auto" else choice


def _fields(tool: Tool) -> list[tuple[str, Any]]:
    f = tool.function
    return [
        ("name", f.name),
        ("description", f.description),
        ("parameters", f.parameters),
        ("strict", f.strict),
    ]


def schema_of(format: ResponseFormat | None, param: str) -> dict[str, Any] | None:
    """The schema that the answer must match: ``{}`` is any object, None is free text."""
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return {}
    if format.json_schema is None:
        raise missing(f"{param}.json_schema")
    return format.json_schema.schema or {}


# --- the answer -------------------------------------------------------------------------------


class _Logprobs(msgspec.Struct):
    content: list[LogprobShape]
    refusal: None = None


class _Message(msgspec.Struct):
    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class _Choice(msgspec.Struct):
    index: int
    message: _Message
    logprobs: _Logprobs | None
    finish_reason: str


class _Completion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[_Choice]
    usage: UsageShape
    service_tier: str
    system_fingerprint: str


def answer(body: Body, ask: Ask, pieces: Sequence[Piece]) -> tuple[bytes, Usage]:
    """A ``ChatCompletion`` and what it cost."""
    usage = total(pieces, len(pieces))
    choices = [
        _Choice(
            index,
            _message(piece, body),
            _Logprobs(logprob_shapes(piece.logprobs)) if body.logprobs else None,
            piece.finish or "stop",
        )
        for index, piece in enumerate(pieces)
    ]
    completion = _Completion(
        ids.chat_id(),
        "chat.completion",
        clock.now(),
        ask.model,
        choices,
        usage_shape(usage),
        "default",
        FINGERPRINT,
    )
    return encode(completion), usage


def _message(piece: Piece, body: Body) -> _Message:
    shaped = _Message("assistant", piece.text)
    if piece.reasoning:
        shaped.reasoning_content = piece.reasoning
    if piece.tool_calls:
        shaped.tool_calls = calls(piece, body.parallel_tool_calls)
        shaped.content = piece.text or None
    return shaped


def calls(piece: Piece, parallel: bool | None) -> list[dict[str, Any]]:
    """Tool calls of an answer; ``parallel_tool_calls: false`` promises at most one."""
    return list(piece.tool_calls[:1] if parallel is False else piece.tool_calls)


# --- the stream -------------------------------------------------------------------------------


class _Delta(msgspec.Struct, omit_defaults=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class _ChunkChoice(msgspec.Struct):
    index: int
    delta: _Delta
    logprobs: _Logprobs | None
    finish_reason: str | None


class _Chunk(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[_ChunkChoice]
    service_tier: str
    system_fingerprint: str
    usage: UsageShape | UnsetType | None = UNSET


async def stream(
    body: Body, ask: Ask, pieces: AsyncIterator[tuple[int, Piece]], ended: dict[int, Piece]
) -> AsyncIterator[bytes]:
    """``chat.completion.chunk`` events: per choice its role, then text as it comes, then why it
    ended; at the end usage where asked for. Last pieces are put into ``ended`` by choice."""
    id, created = ids.chat_id(), clock.now()
    with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    later = None if with_usage else UNSET

    def chunk(index: int, delta: _Delta, logprobs: Any = None, finish: str | None = None) -> bytes:
        choice = _ChunkChoice(index, delta, logprobs, finish)
        return event(
            _Chunk(
                id,
                "chat.completion.chunk",
                created,
                ask.model,
                [choice],
                "default",
                FINGERPRINT,
                later,
            )
        )

    begun: set[int] = set()
    async for index, piece in pieces:
        if index not in begun:
            begun.add(index)
            yield chunk(index, _Delta(role="assistant", content="", refusal=None))
        if piece.reasoning:
            yield chunk(index, _Delta(reasoning_content=piece.reasoning))
        if piece.text or piece.logprobs:
            scores = _Logprobs(logprob_shapes(piece.logprobs)) if body.logprobs else None
            yield chunk(index, _Delta(content=piece.text), scores)
        if piece.tool_calls:
            numbered = [
                {"index": number, **call}
                for number, call in enumerate(calls(piece, body.parallel_tool_calls))
            ]
            yield chunk(index, _Delta(tool_calls=numbered))
        if piece.finish is not None:
            ended[index] = piece
            yield chunk(index, _Delta(), None, piece.finish)
    if with_usage:
        yield event(
            _Chunk(
                id,
                "chat.completion.chunk",
                created,
                ask.model,
                [],
                "default",
                FINGERPRINT,
                usage_shape(cost(body, ended)),
            )
        )
    yield DONE


def cost(body: Body, ended: dict[int, Piece]) -> Usage:
    """Usage of the choices that ended: the prompt once, every answer."""
    return total(list(ended.values()), len(ended)) if ended else Usage()
