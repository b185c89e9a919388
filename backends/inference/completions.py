"""``/v1/completions``: the body, the generations it asks for, the answer and its stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tidemill import clock, ids
from tidemill.backends.inference import plan as planning
from tidemill.backends.inference.decoding import decoder, invalid, unsupported
from tidemill.backends.inference.fields import MAX_INPUTS, Sampled, TokenId, TopLogprobs
from tidemill.backends.inference.pieces import total
from tidemill.backends.inference.plan import Ask
from tidemill.backends.inference.shapes import (
    DONE,
    FINGERPRINT,
    UsageShape,
    encode,
    event,
    finite,
    usage_shape,
)
from tidemill.types import Generation, Piece, TokenLogprob, Usage

Prompt = str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]


class Body(Sampled):
    """A text completion request."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None


body_decoder = decoder(Body)


def inputs(value: str | list[str | int | list[int]], param: str) -> list[str | tuple[int, ...]]:
    """A string, a list of strings, one token list, or several, told apart by the first element.

    Raises ``RequestRefused`` for a mixture, an empty prompt and more than ``MAX_INPUTS``.
    """
    if isinstance(value, str):
        found: list[str | tuple[int, ...]] = [value]
    elif isinstance(value[0], int):
        found = [_token_list([t for t in value if isinstance(t, int)], len(value), param)]
    else:
        if len(value) > MAX_INPUTS:
            raise invalid(param, f"{len(value)} items; at most {MAX_INPUTS} are possible.")
        kind = type(value[0])
        found = []
        for index, item in enumerate(value):
            if type(item) is not kind:
                raise invalid(f"{param}[{index}]", "strings and token lists cannot be mixed.")
            found.append(item if isinstance(item, str) else tuple(item))
    for index, one in enumerate(found):
        if not one:
            raise invalid(param if len(found) == 1 else f"{param}[{index}]", "it is empty.")
    return found


def _token_list(tokens: list[int], expected: int, param: str) -> tuple[int, ...]:
    if len(tokens) != expected:
        raise invalid(param, "strings and token ids cannot be mixed.")
    return tuple(tokens)


def plan(body: Body, ask: Ask) -> list[Generation]:
    """``n`` generations per prompt, prompts in order.

    Raises ``RequestRefused`` naming the field.
    """
    planning.check_stream_options(body)
    prompts = inputs(body.prompt, "prompt")
    n = body.n or 1
    if len(prompts) * n > MAX_INPUTS:
        raise invalid("n", f"{len(prompts)} prompts times {n} is over {MAX_INPUTS} choices.")
    if body.echo and body.logprobs is not None:
        raise unsupported("echo", "Log-probabilities of prompt tokens are not computed here.")
    base = planning.body_sampling(body, ask.params)
    made = []
    for prompt in prompts:
        text = isinstance(prompt, str)
        for choice in range(n):
            made.append(
                Generation(
                    model=ask.model,
                    lane=ask.lane,
                    text=prompt if text else None,  # type: ignore[arg-type]
                    tokens=None if text else prompt,  # type: ignore[arg-type]
                    max_tokens=planning.max_tokens(ask, body.max_tokens),
                    max_context=body.max_context_length or ask.params.max_context_length,
                    sampling=planning.nth(base, choice),
                    stop=planning.stops(body.stop),
                    logprobs=body.logprobs,
                    echo=bool(body.echo),
                    stream=ask.stream,
                    owner=ask.owner,
                    batch=ask.batch,
                    deterministic=bool(ask.params.deterministic),
                )
            )
    return made


# --- the answer -------------------------------------------------------------------------------


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class _Choice(msgspec.Struct):
    index: int
    text: str
    logprobs: _Logprobs | None
    finish_reason: str | None


class _Completion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[_Choice]
    system_fingerprint: str
    usage: UsageShape | UnsetType | None = UNSET


def _logprobs(entries: tuple[TokenLogprob, ...], offset: int) -> _Logprobs:
    """The older shape: four parallel lists. ``offset`` is where the first token begins, in
    characters of the answer's text."""
    shaped = _Logprobs([], [], [], [])
    for entry in entries:
        shaped.tokens.append(entry.token)
        shaped.token_logprobs.append(finite(entry.logprob))
        shaped.top_logprobs.append({token: finite(value) for token, value, _ in entry.top})
        shaped.text_offset.append(offset)
        offset += len(entry.token)
    return shaped


def answer(body: Body, ask: Ask, pieces: Sequence[Piece]) -> tuple[bytes, Usage]:
    """A ``Completion`` and what it cost."""
    usage = total(pieces, body.n or 1)
    choices = [
        _Choice(
            index,
            piece.text,
            _logprobs(piece.logprobs, 0) if body.logprobs is not None else None,
            piece.finish or "stop",
        )
        for index, piece in enumerate(pieces)
    ]
    completion = _Completion(
        ids.completion_id(),
        "text_completion",
        clock.now(),
        ask.model,
        choices,
        FINGERPRINT,
        usage_shape(usage),
    )
    return encode(completion), usage


async def stream(
    body: Body, ask: Ask, pieces: AsyncIterator[tuple[int, Piece]], ended: dict[int, Piece]
) -> AsyncIterator[bytes]:
    """``text_completion`` events; last pieces are put into ``ended`` by choice."""
    id, created = ids.completion_id(), clock.now()
    with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)

    def chunk(choices: list[_Choice], usage: UsageShape | UnsetType | None) -> bytes:
        return event(
            _Completion(id, "text_completion", created, ask.model, choices, FINGERPRINT, usage)
        )

    offsets: dict[int, int] = {}
    async for index, piece in pieces:
        offset = offsets.get(index, 0)
        offsets[index] = offset + len(piece.text)
        scores = _logprobs(piece.logprobs, offset) if body.logprobs is not None else None
        if piece.finish is not None:
            ended[index] = piece
        yield chunk(
            [_Choice(index, piece.text, scores, piece.finish)], None if with_usage else UNSET
        )
    if with_usage:
        yield chunk([], usage_shape(cost(body, ended)))
    yield DONE


def cost(body: Body, ended: dict[int, Piece]) -> Usage:
    """Usage of the choices that ended, each prompt once."""
    return total([ended[index] for index in sorted(ended)], body.n or 1) if ended else Usage()
