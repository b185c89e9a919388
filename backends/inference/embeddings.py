"""``/v1/embeddings``: the body, the inputs, the list of vectors."""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tidemill.backends.inference.completions import Prompt, inputs
from tidemill.backends.inference.decoding import decoder, unsupported
from tidemill.backends.inference.fields import Hint
from tidemill.backends.inference.plan import Ask
from tidemill.backends.inference.shapes import encode
from tidemill.types import Embedded, Embedding, Usage


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An embeddings request. The SDKs ask for base64 unless told otherwise."""

    model: str | None = None
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    user: Hint = None
    stream: bool | None = None


body_decoder = decoder(Body)


def plan(body: Body, ask: Ask) -> Embedding:
    """One record for all inputs. Raises ``RequestRefused`` naming the field."""
    if body.stream:
        raise unsupported("stream", "Vectors come in one piece.")
    return Embedding(
        model=ask.model,
        inputs=tuple(inputs(body.input, "input")),
        lane=ask.lane,
        dimensions=body.dimensions,
        owner=ask.owner,
    )


class _Item(msgspec.Struct):
    object: str
    index: int
    embedding: tuple[float, ...] | str


class _Usage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class _List(msgspec.Struct):
    object: str
    data: list[_Item]
    model: str
    usage: _Usage


def base64_floats(vector: tuple[float, ...]) -> str:
    """Little-endian float32 in base64."""
    floats = array("f", vector)
    if sys.byteorder == "big":
        floats.byteswap()
    return b64encode(floats.tobytes()).decode()


def answer(body: Body, ask: Ask, embedded: Embedded) -> tuple[bytes, Usage]:
    """A ``CreateEmbeddingResponse`` and what it cost."""
    packed = body.encoding_format == "base64"
    data = [
        _Item("embedding", index, base64_floats(vector) if packed else vector)
        for index, vector in enumerate(embedded.vectors)
    ]
    tokens = embedded.usage.input
    return encode(_List("list", data, ask.model, _Usage(tokens, tokens))), embedded.usage
