"""From a decoded body to engine records: what both completion endpoints and responses share."""

from __future__ import annotations

import msgspec

from tidemill.backends.inference.decoding import invalid
from tidemill.backends.inference.fields import Sampled
from tidemill.types import BatchParams, Lane, ModelCard, Sampling

GREEDY = Sampling()
NO_PARAMS = BatchParams()


class Ask(msgspec.Struct, frozen=True):
    """Who asks for what, besides the body.

    ``params`` are a batch's defaults; ``limit`` is the server's answer length where neither line
    nor batch gives one (0: to the end of the context).
    """

    model: str
    card: ModelCard
    lane: Lane
    owner: str
    params: BatchParams
    limit: int
    stream: bool = False
    batch: str = ""


def sampling(
    params: BatchParams,
    *,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    repeat_penalty: float | None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    seed: int | None = None,
    logit_bias: dict[int, float] | None = None,
) -> Sampling:
    """Body over batch over server; greedy where nobody says anything."""
    if temperature is None:
        temperature = params.temperature
    if top_p is None:
        top_p = params.top_p
    if top_k is None:
        top_k = params.top_k
    if seed is None and params.deterministic:
        seed = 0
    return Sampling(
        temperature=0.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=top_k or 0,
        min_p=min_p or 0.0,
        frequency_penalty=frequency_penalty or 0.0,
        presence_penalty=presence_penalty or 0.0,
        repeat_penalty=1.0 if repeat_penalty is None else repeat_penalty,
        seed=seed,
        logit_bias=logit_bias or {},
    )


def body_sampling(body: Sampled, params: BatchParams) -> Sampling:
    """``sampling`` of a chat or text completion."""
    return sampling(
        params,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repeat_penalty=body.repeat_penalty,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        seed=body.seed,
        logit_bias=body.logit_bias,
    )


def nth(base: Sampling, choice: int) -> Sampling:
    """The same for choice ``choice`` (0 is the first): a fixed seed moves on, or all choices would
    be equal."""
    if choice == 0 or base.seed is None:
        return base
    return msgspec.structs.replace(base, seed=base.seed + choice)


def max_tokens(ask: Ask, own: int | None) -> int | None:
    """Answer length: body over batch over server; None is to the end of the context."""
    return own or ask.params.max_decoding_length or ask.limit or None


def stops(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop texts as a tuple."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def check_stream_options(body: Sampled) -> None:
    """``stream_options`` needs ``stream``, as in OpenAI's API."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "it is only allowed when 'stream' is true.")
