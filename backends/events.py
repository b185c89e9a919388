"""Server-sent events of a provider on their way through: renamed, and read for their usage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tidemill import wire
from tidemill.backends.rewriting import renamed, usage_of
from tidemill.backends.words import in_our_words, without_credential
from tidemill.errors import TidemillError
from tidemill.types import Usage

_DONE = b"[DONE]"


class _Chunk(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    usage: dict[str, Any] | None = None
    type: str | None = None
    response: dict[str, msgspec.Raw] | None = None
    error: msgspec.Raw = msgspec.Raw()


_chunk = msgspec.json.Decoder(_Chunk)


class Events:
    """Cuts a byte stream into events and passes each on, changed only where it must be.

    ``model`` is put in place of the provider's name for it; None leaves events as they come.
    ``names`` (ours → theirs) are replaced in the words of an error.
    ``wants_usage`` False drops the chunk that only carries usage: it was asked for by us.
    """

    def __init__(
        self, model: str | None, *, wants_usage: bool, names: Mapping[str, str] | None = None
    ) -> None:
        self._model = model
        self._names = names or {}
        self._wants_usage = wants_usage
        self._rest = b""
        self.credentials: list[str] = []
        """What the request carried, to be kept out of what goes wrong."""
        self.usage = Usage()
        """Of the whole answer, once the stream has said it."""
        self.passed = 0
        """Events that were passed on."""
        self.pieces = 0
        """Pieces of answers that were read."""
        self.ended = False
        """The stream has said its last word; ``usage`` is final."""

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that end in this piece, each with its blank line."""
        *whole, self._rest = (self._rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        passed = [event for event in map(self._pass, whole) if event is not None]
        self.passed += len(passed)
        return passed

    def finish(self) -> list[bytes]:
        """The last event, where the stream ended without the blank line behind it."""
        rest = self._rest.strip()
        if not rest.startswith((b"data:", b"event:")) or not rest.endswith((b"}", _DONE)):
            return []
        return self.feed(b"\n\n")

    def _pass(self, event: bytes) -> bytes | None:
        lines = event.split(b"\n")
        data = b"\n".join(
            line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")
        )
        self.ended |= data == _DONE
        if not data or data == _DONE:
            return event + b"\n\n"
        try:
            chunk = _chunk.decode(data)
            self.pieces += len(chunk.choices or ())
            self.pieces += (chunk.type or "").endswith(".delta")
            if chunk.usage is not None:
                self.usage = usage_of(data)
                if chunk.choices == [] and not self._wants_usage:
                    return None
            if chunk.response is not None and "usage" in chunk.response:
                self.usage = usage_of(msgspec.json.encode(chunk.response))
                self.ended |= self.usage != Usage()
            wrong = chunk.error or chunk.type == "error"
            if self._model is None and not wrong:
                return event + b"\n\n"
            if wrong:
                said = without_credential(msgspec.json.decode(data), self.credentials)
                data = wire.encode(in_our_words(said, self._names))
            if self._model is not None:
                data = self._renamed(data, chunk)
        except msgspec.DecodeError:
            return event + b"\n\n"
        others = [line for line in lines if not line.startswith(b"data:")]
        return b"\n".join([*others, b"data: " + data]) + b"\n\n"

    def _renamed(self, data: bytes, chunk: _Chunk) -> bytes:
        assert self._model is not None
        if chunk.response is None:
            return renamed(data, self._model)
        fields: dict[str, Any] = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        response = msgspec.json.encode(chunk.response)
        fields["response"] = msgspec.Raw(renamed(response, self._model))
        return msgspec.json.encode(fields)


def broken(error: TidemillError, endpoint: str, after: int) -> bytes:
    """The last event of a stream that failed ``after`` so many; readers of either API know it."""
    if endpoint != "/v1/responses":
        return b"data: " + wire.encode(wire.error_object(error)) + b"\n\n"
    fields = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return b"event: error\ndata: " + wire.encode({**fields, "sequence_number": after}) + b"\n\n"
