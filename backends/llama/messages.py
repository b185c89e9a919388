"""What the server and an engine process say to each other.

Both directions are frames: four bytes of length, little-endian, then one msgpack message. The
server numbers its questions with ``key``; every event names the key that it belongs to.
"""

from __future__ import annotations

import socket
import struct

import msgspec

from tidemill.errors import (
    BadRequest,
    ContextLengthExceeded,
    EngineLost,
    EngineUnavailable,
    RequestRefused,
    TidemillError,
)
from tidemill.scheduler.steps import Gauges
from tidemill.types import EngineSpec, Generation, Lane, ModelCard, Piece, Usage

HEADER = struct.Struct("<I")
LARGEST = 256 * 1024 * 1024
"""A frame beyond this is a broken stream, not a message."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of all messages; the class name is the tag."""


# --- server to engine process


class Load(Message, frozen=True, kw_only=True, tag=True):
    """The first message: what to serve."""

    spec: EngineSpec
    path: str
    name: str


class Generate(Message, frozen=True, kw_only=True, tag=True):
    """Answer this; events of ``key`` are its pieces."""

    key: int
    generation: Generation
    alone: bool = False
    """True: in steps of its own, since an engine died in a step that computed this."""


class Embed(Message, frozen=True, kw_only=True, tag=True):
    """Embed these; answered by ``Vectors``."""

    key: int
    inputs: tuple[str | tuple[int, ...], ...]
    lane: Lane = Lane.BATCH


class Count(Message, frozen=True, kw_only=True, tag=True):
    """How many tokens has this prompt, or have these inputs; answered by ``Counted``."""

    key: int
    generation: Generation | None = None
    inputs: tuple[str | tuple[int, ...], ...] = ()


class Cancel(Message, frozen=True, kw_only=True, tag=True):
    """Nobody waits for this key any more."""

    key: int


Question = Load | Generate | Embed | Count | Cancel


# --- engine process to server


class Ready(Message, frozen=True, kw_only=True, tag=True):
    """The model is loaded."""

    card: ModelCard
    slots: int
    embedding_size: int


class Unfit(Message, frozen=True, kw_only=True, tag=True):
    """The model cannot be loaded; the process ends."""

    message: str


class Progress(Message, frozen=True, kw_only=True, tag=True):
    """A piece of an answer."""

    key: int
    piece: Piece


class Computed(Message, frozen=True, kw_only=True, tag=True):
    """So many tokens of an ``Embed`` are computed, and more follow."""

    key: int
    tokens: int


class Vectors(Message, frozen=True, kw_only=True, tag=True):
    """All vectors of an ``Embed``, in order, as little-endian float32."""

    key: int
    vectors: tuple[bytes, ...]
    usage: Usage


class Counted(Message, frozen=True, kw_only=True, tag=True):
    """Prompt tokens of a ``Count``."""

    key: int
    tokens: int


class Fault(Message, frozen=True, kw_only=True, tag=True):
    """An answer that ends in an error."""

    key: int
    kind: str
    message: str
    param: str | None = None
    code: str | None = None


Event = Progress | Computed | Vectors | Counted | Fault


class Events(Message, frozen=True, kw_only=True, tag=True):
    """Everything that one step brought, for all sequences."""

    events: tuple[Event, ...] = ()
    gauges: Gauges = Gauges()


Report = Ready | Unfit | Events

_KINDS: dict[str, type[TidemillError]] = {
    cls.__name__: cls
    for cls in (
        RequestRefused, ContextLengthExceeded, BadRequest, EngineLost, EngineUnavailable,
        TidemillError,
    )
}  # fmt: skip


def fault(key: int, error: TidemillError) -> Fault:
    """An error on its way to the server."""
    kind = type(error).__name__
    return Fault(
        key=key,
        kind=kind if kind in _KINDS else "TidemillError",
        message=error.message,
        param=error.param,
        code=error.code,
    )


def error(fault: Fault) -> TidemillError:
    """The same error on the server's side."""
    return _KINDS[fault.kind](fault.message, param=fault.param, code=fault.code)


_encoder = msgspec.msgpack.Encoder()
_questions = msgspec.msgpack.Decoder(Question)
_reports = msgspec.msgpack.Decoder(Report)


def frame(message: Question | Report) -> bytes:
    """A message with its length in front. Raises what msgspec raises for values that msgpack cannot
    hold (``OverflowError``, ``UnicodeEncodeError``)."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def question(body: bytes) -> Question:
    """Decode a frame's body in the engine process."""
    return _questions.decode(body)


def report(body: bytes) -> Report:
    """Decode a frame's body in the server."""
    return _reports.decode(body)


def read_frame(sock: socket.socket) -> bytes | None:
    """The next frame's body, waiting for it; None at the end of the stream."""
    header = _exactly(sock, HEADER.size)
    return None if header is None else _exactly(sock, HEADER.unpack(header)[0])


def _exactly(sock: socket.socket, n: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < n:
        part = sock.recv(min(n - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
