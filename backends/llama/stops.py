"""From token bytes to text that may be shown: stop strings, and characters cut by a token."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import AnyStr


def held(buffer: AnyStr, needles: Sequence[AnyStr]) -> int:
    """Length of the longest suffix of ``buffer`` that some needle begins with, whole needles apart:
    what must not be shown yet."""
    longest = max((len(needle) for needle in needles), default=0) - 1
    for n in range(min(longest, len(buffer)), 0, -1):
        tail = buffer[-n:]
        if any(len(needle) > n and needle.startswith(tail) for needle in needles):
            return n
    return 0


def find(buffer: AnyStr, needles: Sequence[AnyStr]) -> tuple[int, AnyStr] | None:
    """The first place where a needle is, and which; of two at one place the longer."""
    places = [(at, -len(n), n) for n in needles if (at := buffer.find(n)) >= 0]
    if not places:
        return None
    at, _, needle = min(places)
    return at, needle


class StopBuffer:
    """Text on its way out. The match is on bytes, never on tokens: a stop string may begin and end
    anywhere within one.

    ``emitted`` counts the bytes that were let through.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop.encode("utf-8", "replace") for stop in stops if stop]
        self._buffer = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.emitted = 0
        self.stopped = False

    def feed(self, piece: bytes) -> str:
        """Add a token's bytes; returns the text that is certain now, without the stop string."""
        if self.stopped:
            return ""
        self._buffer += piece
        match = find(self._buffer, self._stops)
        if match is not None:
            self.stopped = True
            return self._let(match[0], final=True)
        return self._let(len(self._buffer) - held(self._buffer, self._stops))

    def end(self) -> str:
        """The rest, when no more tokens come. A half character becomes U+FFFD."""
        return "" if self.stopped else self._let(len(self._buffer), final=True)

    def _let(self, n: int, *, final: bool = False) -> str:
        out, self._buffer = self._buffer[:n], self._buffer[n:]
        self.emitted += n
        return self._decoder.decode(out, final)
