"""What a sequence may say next, looked up in its own tokens: prompt and answer.

An answer that copies from its prompt, or repeats itself, goes on as it did the last time. So the
tokens that followed the last ones earlier are computed ahead as drafts; the engine chooses each
token as ever, and keeps a draft only where it is the token that was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

SHORTEST, LONGEST = 2, 32
"""A match has at least so many tokens, and is measured up to so many."""


class Match(NamedTuple):
    """An earlier place where the sequence was as it is now."""

    at: int
    """Index of the token that followed there."""
    length: int
    """How many tokens before it are the last ones of the sequence; at most ``LONGEST``."""


class Lookup:
    """An index over the tokens of one sequence, which only grow. Each token is indexed once."""

    __slots__ = ("_indexed", "_last", "_pairs", "_seen", "_triples")

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, ...], int] = {}
        self._triples: dict[tuple[int, ...], int] = {}
        """From the tokens to the index behind their latest place."""
        self._indexed = 0
        """Places up to this one are in the index."""
        self._last: Match | None = None
        self._seen = 0
        """The match of the last call, and the length of the sequence then."""

    def match(self, tokens: Seq[int]) -> Match | None:
        """Where the last three tokens, or two, were before. Of the latest such place and the one
        that goes on where the last match was, the place with more tokens in common: fields of a
        table begin alike in every row."""
        self._index(tokens, len(tokens) - 1)
        best = self._going_on(tokens)
        for n, index in ((3, self._triples), (2, self._pairs)):
            at = index.get(tuple(tokens[-n:]))
            if at is not None:
                if best is None or at != best.at:
                    found = Match(at, _in_common(tokens, at, LONGEST))
                    best = found if best is None or found.length >= best.length else best
                break
        self._last, self._seen = best, len(tokens)
        return best

    def _going_on(self, tokens: Seq[int]) -> Match | None:
        """The place behind the last match, when what came since is what followed there."""
        if self._last is None:
            return None
        more = len(tokens) - self._seen
        at = self._last.at + more
        if more < LONGEST and _in_common(tokens, at, more) == more:
            return Match(at, min(LONGEST, self._last.length + more))
        length = _in_common(tokens, at, LONGEST)
        return Match(at, length) if length >= SHORTEST else None

    def _index(self, tokens: Seq[int], upto: int) -> None:
        for n, index in ((2, self._pairs), (3, self._triples)):
            first = max(self._indexed + 1, n)
            if first <= upto:
                some = tokens[first - n : upto]
                grams = zip(*(some[i:] for i in range(n)), strict=False)
                index.update(zip(grams, range(first, upto + 1), strict=True))
        self._indexed = max(self._indexed, upto)


def drafts(tokens: Seq[int], at: int, n: int) -> list[int]:
    """The ``n`` tokens from ``at`` on; when they end, they begin again at ``at``."""
    period = tokens[at : at + n]
    return [period[i % len(period)] for i in range(n)]


def _in_common(tokens: Seq[int], at: int, most: int) -> int:
    end, length = len(tokens), 0
    most = min(most, at)
    while length < most and tokens[at - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length
