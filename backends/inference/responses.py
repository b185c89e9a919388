"""``/v1/responses``: the body, the generation it asks for, and the response object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tidemill import clock, ids
from tidemill.backends.inference import plan as planning
from tidemill.backends.inference.chat import offered, text_of
from tidemill.backends.inference.decoding import decoder, invalid, missing, unsupported
from tidemill.backends.inference.fields import (
    Content,
    Function,
    Hint,
    Labels,
    Nested,
    Probability,
    RepeatPenalty,
    StreamOptions,
    Temperature,
    Tokens,
    Tool,
    ToolChoice,
    ToolName,
    TopK,
    TopLogprobs,
)
from tidemill.backends.inference.pieces import total
from tidemill.backends.inference.plan import Ask
from tidemill.backends.inference.shapes import encode, logprob_shapes
from tidemill.types import Generation, Piece, Usage


class Format(Nested):
    """``text.format``: the schema stands beside its name here."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Nested):
    """``text``: what the answer looks like."""

    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class FlatTool(Nested):
    """A function; tools that a service hosts are refused by their type."""

    type: Literal["function"]
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatToolChoice(Nested):
    """The function that ``tool_choice`` insists on."""

    type: Literal["function"]
    name: str


class Item(Nested):
    """A part of the conversation: a message, a call that a model made, or its output.

    ``reasoning`` items of earlier answers may come back; they are left out of the prompt.
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None
    summary: Any = None
    encrypted_content: str | None = None


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A response request: text in, text out, nothing kept. ``store`` has no effect."""

    model: str | None = None
    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Tokens | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    repeat_penalty: RepeatPenalty | None = None
    max_context_length: Tokens | None = None
    text: TextConfig | None = None
    tools: list[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: TopLogprobs | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    truncation: Literal["disabled"] | None = None
    metadata: Labels | None = None
    store: bool | None = None
    user: Hint = None
    service_tier: Hint = None
    safety_identifier: Hint = None
    prompt_cache_key: Hint = None
    prompt_cache_retention: Hint = None
    prompt_cache_options: dict[str, Any] | None = None
    access_programs: None = None
    background: bool | None = None
    background_options: None = None
    context_management: None = None
    conversation: None = None
    image: None = None
    max_tool_calls: None = None
    moderation: None = None
    previous_response_id: None = None
    prompt: None = None
    reasoning: None = None


body_decoder = decoder(Body)


def plan(body: Body, ask: Ask) -> list[Generation]:
    """One generation. Raises ``RequestRefused`` naming the field."""
    if body.background:
        raise unsupported("background", "Use a batch for work that nobody waits for.")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "it is only allowed when 'stream' is true.")
    nested = [
        Tool(
            type="function",
            function=Function(
                name=tool.name,
                description=tool.description,
                parameters=tool.parameters,
                strict=tool.strict,
            ),
        )
        for tool in body.tools or ()
    ]
    named = body.tool_choice
    tools, tool_choice = offered(
        nested,
        ToolChoice(type="function", function=ToolName(name=named.name))
        if isinstance(named, FlatToolChoice)
        else named,
        ask,
    )
    return [
        Generation(
            model=ask.model,
            lane=ask.lane,
            messages=tuple(_messages(body)),
            tools=tools,
            tool_choice=tool_choice,
            max_tokens=planning.max_tokens(ask, body.max_output_tokens),
            max_context=body.max_context_length or ask.params.max_context_length,
            sampling=planning.sampling(
                ask.params,
                temperature=body.temperature,
                top_p=body.top_p,
                top_k=body.top_k,
                min_p=body.min_p,
                repeat_penalty=body.repeat_penalty,
            ),
            logprobs=(body.top_logprobs or 0) if scored(body) else None,
            json_schema=_schema(body.text),
            stream=ask.stream,
            owner=ask.owner,
            batch=ask.batch,
            deterministic=bool(ask.params.deterministic),
        )
    ]


def scored(body: Body) -> bool:
    """True when log-probabilities were asked for."""
    return body.top_logprobs is not None or bool(body.include)


def _schema(text: TextConfig | None) -> dict[str, Any] | None:
    if text is None or text.format is None or text.format.type == "text":
        return None
    if text.format.type == "json_object":
        return {}
    if text.format.schema is None:
        raise missing("text.format.schema")
    return text.format.schema


def _messages(body: Body) -> list[dict[str, Any]]:
    """Instructions, then the input, as chat messages."""
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
        return messages
    for index, item in enumerate(body.input):
        if item.type != "reasoning":
            messages.append(_message(item, f"input[{index}]"))
    if not messages:
        raise invalid("input", "it holds no message.")
    return messages


def _message(item: Item, at: str) -> dict[str, Any]:
    if item.type == "message":
        if item.role is None:
            raise missing(f"{at}.role")
        if item.content is None:
            raise missing(f"{at}.content")
        if not isinstance(item.content, str):
            for number, part in enumerate(item.content):
                if part.text is None:
                    raise missing(f"{at}.content[{number}].text")
        return {"role": item.role, "content": text_of(item.content)}
    if item.call_id is None:
        raise missing(f"{at}.call_id")
    if item.type == "function_call":
        if item.name is None or item.arguments is None:
            raise missing(f"{at}.name" if item.name is None else f"{at}.arguments")
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if item.output is None:
        raise missing(f"{at}.output")
    return {"role": "tool", "content": item.output, "tool_call_id": item.call_id}


# --- the answer -------------------------------------------------------------------------------


def response_object(
    body: Body, ask: Ask, id: str, created_at: int, status: str, output: list[dict[str, Any]]
) -> dict[str, Any]:
    """A ``Response`` that has not ended: what was asked, and the output so far."""
    format = body.text.format if body.text is not None else None
    shown = {"type": "text"} if format is None else _given(format)
    return {
        "id": id,
        "object": "response",
        "created_at": created_at,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": ask.model,
        "output": output,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature if body.temperature is not None else 0.0,
        "text": {"format": shown},
        "tool_choice": _given(body.tool_choice) or "auto",
        "tools": [
            {"parameters": None, "strict": None, **_given(tool)} for tool in body.tools or ()
        ],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p if body.top_p is not None else 1.0,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _given(value: Any) -> Any:
    """What the client sent, without the fields that it left out."""
    if isinstance(value, msgspec.Struct):
        return {k: v for k, v in msgspec.structs.asdict(value).items() if v is not None}
    return value


def ended_object(opened: dict[str, Any], piece: Piece, output: list[dict[str, Any]]) -> Usage:
    """Complete a ``Response`` in place from its last piece; what it cost."""
    usage = total([piece])
    cut = piece.finish == "length"
    opened["status"] = "incomplete" if cut else "completed"
    opened["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
    opened["completed_at"] = None if cut else clock.now()
    opened["output"] = output
    opened["usage"] = {
        "input_tokens": usage.input,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.input + usage.output,
    }
    return usage


def text_part(body: Body, piece: Piece) -> dict[str, Any]:
    """An ``output_text`` part."""
    return {
        "type": "output_text",
        "text": piece.text,
        "annotations": [],
        "logprobs": logprob_shapes(piece.logprobs) if scored(body) else [],
    }


def message_item(id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    """An assistant message in ``output``."""
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}


def reasoning_item(id: str, text: str) -> dict[str, Any]:
    """What the model thought before it answered."""
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"id": id, "type": "reasoning", "summary": [], "content": content}


def call_items(body: Body, piece: Piece) -> list[dict[str, Any]]:
    """``function_call`` items; ``parallel_tool_calls: false`` promises at most one."""
    made = piece.tool_calls[:1] if body.parallel_tool_calls is False else piece.tool_calls
    return [
        {
            "id": ids.function_call_id(),
            "type": "function_call",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
            "status": "completed",
        }
        for call in made
    ]


def answer(body: Body, ask: Ask, pieces: Sequence[Piece]) -> tuple[bytes, Usage]:
    """A ``Response`` and what it cost."""
    piece = pieces[0]
    output: list[dict[str, Any]] = []
    if piece.reasoning:
        output.append(reasoning_item(ids.reasoning_id(), piece.reasoning))
    if piece.text or not piece.tool_calls:
        status = "incomplete" if piece.finish == "length" else "completed"
        output.append(message_item(ids.message_id(), status, [text_part(body, piece)]))
    output.extend(call_items(body, piece))
    response = response_object(body, ask, ids.response_id(), clock.now(), "in_progress", [])
    usage = ended_object(response, piece, output)
    return encode(response), usage


def cost(body: Body, ended: dict[int, Piece]) -> Usage:
    """Usage of the answer that ended."""
    return total(list(ended.values())) if ended else Usage()
