"""An engine that is instant and deterministic: it answers with what it was asked.

Tokens are whitespace-separated words. For trying how a client or a batch meets failure, a last user
message (or prompt) that is exactly one of these does something else:

=================================  ==========================================================
``!status 429 [retry-after=S]``    fails with that HTTP status (400 to 599)
``!sleep S [text]``                answers with ``text`` after S seconds
``!wait NAME [text]``              answers with ``text`` once ``gate(NAME)`` is set (in process)
``!flaky N [note]``                dies under the first N runs of this very text, then answers
``!lost``                          dies under the request, every time
``!crash``                         raises an error that nobody expects
=================================  ==========================================================
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

from tidemill import clock, ids
from tidemill.errors import (
    AtCapacity,
    BadRequest,
    ContextLengthExceeded,
    EngineLost,
    RequestRefused,
    TidemillError,
)
from tidemill.types import (
    Embedded,
    Embedding,
    EngineSpec,
    FinishReason,
    Generation,
    ModelCard,
    Piece,
    ReplicaStatus,
    TokenLogprob,
    Usage,
)

CONTEXT = 131_072
SLOTS = 1_024
DIMENSIONS = 8
MEMORY = 64 << 20
"""Bytes that it says it takes. It takes none to speak of."""

_WORD = re.compile(r"\s*\S+|\s+$")


def replica(spec: EngineSpec) -> EchoReplica:
    """The entry point of engine ``echo``."""
    return EchoReplica(spec)


class EchoReplica:
    """Serves the model name ``echo``, or what the spec names."""

    def __init__(self, spec: EngineSpec) -> None:
        self._context = spec.context_length or CONTEXT
        self._card = ModelCard(
            id=spec.name or "echo",
            created_at=clock.now(),
            context_length=self._context,
            embeddings=True,
            tools=True,
        )
        self._active = 0
        self._read = 0
        self._written = 0
        self._runs: dict[str, int] = {}
        self._gates: dict[str, asyncio.Event] = {}

    @property
    def card(self) -> ModelCard:
        """What ``/v1/models`` shows."""
        return self._card

    async def examine(self) -> int:
        """A number, so that a memory budget can be tried."""
        return MEMORY

    async def start(self) -> None:
        """Nothing to load."""

    async def close(self) -> None:
        """Nothing to stop."""

    def gate(self, name: str) -> asyncio.Event:
        """The event that ``!wait NAME`` waits for."""
        return self._gates.setdefault(name, asyncio.Event())

    async def generate(self, generation: Generation) -> AsyncIterator[Piece]:
        """The asked text, in one piece or word by word."""
        asked = _asked(generation)
        prompt = self._fits(generation)
        self._active += 1
        try:
            text = asked
            if asked[:1] == "!":
                text = await self._directed(asked)
            text, finish, calls = _shaped(generation, asked, text)
            text, count, finish = _cut(generation, text, finish, self._bound(generation) - prompt)
            if generation.echo:
                text = asked + text
            self._read += prompt
            self._written += count
            usage = Usage(input=prompt, output=count)
            if not generation.stream:
                yield Piece(
                    text=text,
                    logprobs=_logprobs(generation, _words(text)),
                    finish=finish,
                    usage=usage,
                    tool_calls=calls,
                )
                return
            for word in _words(text):
                yield Piece(text=word, logprobs=_logprobs(generation, [word]))
            yield Piece(finish=finish, usage=usage, tool_calls=calls)
        finally:
            self._active -= 1

    async def embed(
        self, embedding: Embedding, told: Callable[[int], None] = lambda tokens: None
    ) -> Embedded:
        """A unit vector per input, made from its hash."""
        size = embedding.dimensions or DIMENSIONS
        if size > DIMENSIONS:
            raise RequestRefused(
                f"Invalid value for 'dimensions': at most {DIMENSIONS} are possible with "
                f"'{self._card.id}'.",
                param="dimensions",
                code="invalid_value",
            )
        tokens = 0
        vectors = []
        for one in embedding.inputs:
            count = _size(one)
            if count > self._context:
                raise _too_long(count, self._context, "input")
            tokens += count
            vectors.append(_vector(one, size))
        self._read += tokens
        return Embedded(vectors=tuple(vectors), usage=Usage(input=tokens))

    async def count(self, asked: Generation | Embedding) -> int:
        """Words of all messages, of the prompt or of all inputs."""
        if isinstance(asked, Embedding):
            return sum(map(_size, asked.inputs))
        return _count(asked)

    def status(self) -> ReplicaStatus:
        """Always healthy."""
        return ReplicaStatus(
            healthy=True,
            active=self._active,
            slots=SLOTS,
            tokens_generated=self._written,
            tokens_prefilled=self._read,
        )

    def _bound(self, generation: Generation) -> int:
        return min(self._context, generation.max_context or self._context)

    def _fits(self, generation: Generation) -> int:
        count = _count(generation)
        context = self._bound(generation)
        if count > context:
            field = "prompt" if generation.messages is None else "messages"
            raise _too_long(count, context, field)
        return count

    async def _directed(self, asked: str) -> str:
        """Do what a ``!`` text says; the answer's text. Anything else is text like any other."""
        verb, _, rest = asked.partition(" ")
        if verb == "!lost":
            raise EngineLost("The engine died under this request.")
        if verb == "!crash":
            raise RuntimeError("asked to crash")
        first, _, text = rest.partition(" ")
        if verb == "!flaky" and first.isdecimal():
            self._runs[asked] = self._runs.get(asked, 0) + 1
            if self._runs[asked] <= int(first):
                raise EngineLost("The engine died under this request.")
        elif verb == "!status" and first.isdecimal() and 400 <= int(first) <= 599:
            raise _failure(int(first), text)
        elif verb == "!sleep" and re.fullmatch(r"\d+(\.\d+)?", first):
            await asyncio.sleep(float(first))
            return text
        elif verb == "!wait" and first:
            await self.gate(first).wait()
            return text
        return asked


def _failure(status: int, options: str) -> TidemillError:
    match = re.fullmatch(r"retry-after=(\d+(?:\.\d+)?)", options)
    after = float(match[1]) if match else None
    message = f"The prompt asked for status {status}."
    error: TidemillError
    if status == 429:
        error = AtCapacity(message, code="rate_limit_exceeded", retry_after_s=after)
    elif status < 500:
        error = BadRequest(message, code=f"status_{status}", retry_after_s=after)
    else:
        error = TidemillError(message, code=f"status_{status}", retry_after_s=after)
    error.status = status
    return error


def _too_long(count: int, context: int, field: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"Prompt length {count} exceeds model context {context}", param=field
    )


def _asked(generation: Generation) -> str:
    """The text to give back: the last user message, else the last message, or the prompt."""
    if generation.messages is not None:
        last = generation.messages[-1]
        if last["role"] != "user":
            for message in reversed(generation.messages):
                if message["role"] == "user":
                    last = message
                    break
        return last["content"] or ""
    if generation.text is not None:
        return generation.text
    return " ".join(str(token) for token in generation.tokens or ())


def _size(input: str | tuple[int, ...]) -> int:
    return len(input.split()) if isinstance(input, str) else len(input)


def _count(generation: Generation) -> int:
    if generation.messages is not None:
        return sum([len((message["content"] or "").split()) for message in generation.messages])
    if generation.text is not None:
        return len(generation.text.split())
    return len(generation.tokens or ())


def _words(text: str) -> list[str]:
    """Words with the space before them; joined they are the text again."""
    return _WORD.findall(text)


def _cut(
    generation: Generation, text: str, finish: FinishReason, room: int
) -> tuple[str, int, FinishReason]:
    """Apply stop texts and the limit: text, words, why it ended."""
    for stop in generation.stop:
        at = text.find(stop)
        if at >= 0:
            text = text[:at]
    count = len(text.split())
    limit = min(room, generation.max_tokens or room)
    if count > limit:
        return "".join(_words(text)[:limit]), limit, "length"
    return text, count, finish


def _logprobs(generation: Generation, words: list[str]) -> tuple[TokenLogprob, ...]:
    if generation.logprobs is None:
        return ()
    entries = []
    for word in words:
        raw = tuple(word.encode())
        top = ((word, 0.0, raw),) if generation.logprobs else ()
        entries.append(TokenLogprob(token=word, logprob=0.0, bytes=raw, top=top))
    return tuple(entries)


def _shaped(
    generation: Generation, asked: str, text: str
) -> tuple[str, FinishReason, tuple[dict[str, Any], ...]]:
    """The answer as a tool call or as JSON where one was asked for."""
    if generation.tools and generation.tool_choice is not None:
        wanted = generation.tools[0]["function"]
        if isinstance(generation.tool_choice, dict):
            name = generation.tool_choice["function"]["name"]
            wanted = next(t["function"] for t in generation.tools if t["function"]["name"] == name)
        arguments = json.dumps(_instance(wanted.get("parameters") or {"type": "object"}, text))
        call = {
            "id": ids.call_id(),
            "type": "function",
            "function": {"name": wanted["name"], "arguments": arguments},
        }
        return "", "tool_calls", (call,)
    if generation.json_schema is None:
        return text, "stop", ()
    made = _instance(generation.json_schema, text) if generation.json_schema else {"echo": text}
    return json.dumps(made, ensure_ascii=False), "stop", ()


_EMPTY: dict[str, Any] = {"integer": 0, "number": 0, "boolean": False, "null": None, "array": []}
_UNDERSTOOD = frozenset(
    {"type", "properties", "required", "additionalProperties", "enum", "const", "items"}
    | {"title", "description", "$schema"}
)


def _instance(schema: dict[str, Any], text: str) -> Any:
    """A small value that matches a plain schema; its strings are the asked text."""
    unknown = sorted(set(schema) - _UNDERSTOOD)
    if unknown:
        raise RequestRefused(
            f"The echo engine does not understand '{unknown[0]}' in a schema.",
            param="response_format",
            code="invalid_value",
        )
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type", "object")
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "string":
        return text
    if kind == "object":
        named = schema.get("properties", {})
        return {name: _instance(part, text) for name, part in named.items()}
    if kind in _EMPTY:
        return _EMPTY[kind]
    raise RequestRefused(
        f"The echo engine does not understand type '{kind}' in a schema.",
        param="response_format",
        code="invalid_value",
    )


def _vector(one: str | tuple[int, ...], size: int) -> tuple[float, ...]:
    raw = one.encode() if isinstance(one, str) else repr(one).encode()
    digest = hashlib.sha256(raw).digest()
    values = [int.from_bytes(digest[i * 4 : i * 4 + 4], "little") / 2**31 - 1 for i in range(size)]
    norm = math.sqrt(sum(v * v for v in values)) or 1.0
    return tuple(v / norm for v in values)
