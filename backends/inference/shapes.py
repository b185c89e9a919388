"""Wire pieces that several answers share: usage, log-probabilities, server-sent events."""

from __future__ import annotations

from typing import Any

import msgspec

from tidemill import __version__, wire
from tidemill.types import TokenLogprob, Usage

FINGERPRINT = f"tidemill-{__version__}"
"""``system_fingerprint``: which build answered."""

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode
"""Plain compact JSON. Result rows escape line separators themselves (``wire.result_row``)."""


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class AnswerDetails(msgspec.Struct):
    reasoning_tokens: int


class UsageShape(msgspec.Struct):
    """``CompletionUsage``."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: AnswerDetails


def usage_shape(usage: Usage) -> UsageShape:
    """Usage under the names of the completion endpoints."""
    return UsageShape(
        usage.input,
        usage.output,
        usage.input + usage.output,
        PromptDetails(usage.cached),
        AnswerDetails(usage.reasoning),
    )


class TopShape(msgspec.Struct):
    token: str
    logprob: float
    bytes: tuple[int, ...]


class LogprobShape(msgspec.Struct):
    """``ChatCompletionTokenLogprob``."""

    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: list[TopShape]


def finite(logprob: float) -> float:
    """JSON has no infinity: an impossible token is -9999, as in OpenAI's answers."""
    return logprob if logprob > -9999.0 else -9999.0


def logprob_shapes(entries: tuple[TokenLogprob, ...]) -> list[LogprobShape]:
    """Log-probabilities per token, with alternatives."""
    return [
        LogprobShape(
            e.token,
            finite(e.logprob),
            e.bytes,
            [TopShape(token, finite(value), raw) for token, value, raw in e.top],
        )
        for e in entries
    ]


def event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event. Line separators are escaped, so that no reader cuts it in two."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + wire.encode(value) + b"\n\n"
