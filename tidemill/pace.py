"""Requests and tokens per minute, for interactive traffic, and batches per hour.

One bucket per key, team or user and per kind: it holds what its time allows and fills evenly. A
request takes one from the first and, once it is answered, its tokens from the second. The second
may go below zero, because nobody knows beforehand how many tokens an answer has; the next request
then waits for it. Each server counts for itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

from tidemill.types import Limits, Record

MINUTE_S = 60.0
HOUR_S = 3_600.0
_MOST = 65_536
"""Buckets that are remembered; a forgotten one is full, as one is after its time of rest."""

What = Literal["request", "token", "batch"]


class Late(Record, frozen=True, kw_only=True):
    """Why a request has to wait, and how long."""

    what: What
    limit: int
    wait_s: float


class Pace:
    """All buckets of one server. Times are seconds on a clock that never goes back."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[tuple[str, What], tuple[float, float]] = OrderedDict()

    def admit(self, limits: Sequence[tuple[str, Limits]], now: float) -> Late | None:
        """Take one request from every bucket of ``(id, limits)``, or from none and say why."""
        for id, one in limits:
            for what, limit in _rates(one):
                level = self._level(id, what, limit, now)
                # A request needs a whole one of its own kind, and only some of the tokens.
                missing = 1.0 - level if what == "request" else -level
                if missing > 0 or (what == "token" and level <= 0):
                    wait_s = MINUTE_S if limit == 0 else max(missing, 0.01) * MINUTE_S / limit
                    return Late(what=what, limit=limit, wait_s=wait_s)
        for id, one in limits:
            if one.requests_per_minute is not None:
                self._take(id, "request", one.requests_per_minute, 1, now)
        return None

    def batch(self, owner: str, limit: int, now: float) -> Late | None:
        """Take one of an owner's batches of an hour, or say how long to wait. 0: no limit."""
        if limit == 0:
            return None
        missing = 1.0 - self._level(owner, "batch", limit, now)
        if missing > 0:
            return Late(what="batch", limit=limit, wait_s=missing * HOUR_S / limit)
        self._take(owner, "batch", limit, 1, now)
        return None

    def charge(self, limits: Sequence[tuple[str, Limits]], tokens: int, now: float) -> None:
        """Take the tokens of an answered request."""
        for id, one in limits:
            if one.tokens_per_minute is not None:
                self._take(id, "token", one.tokens_per_minute, tokens, now)

    def _level(self, id: str, what: What, limit: int, now: float) -> float:
        level, at = self._buckets.get((id, what), (float(limit), now))
        return min(float(limit), level + (now - at) * limit / _time_s(what))

    def _take(self, id: str, what: What, limit: int, amount: int, now: float) -> None:
        self._buckets[id, what] = (self._level(id, what, limit, now) - amount, now)
        self._buckets.move_to_end((id, what))
        while len(self._buckets) > _MOST:
            self._buckets.popitem(last=False)


def _time_s(what: What) -> float:
    return HOUR_S if what == "batch" else MINUTE_S


def _rates(limits: Limits) -> list[tuple[What, int]]:
    rates: list[tuple[What, int | None]] = [
        ("request", limits.requests_per_minute),
        ("token", limits.tokens_per_minute),
    ]
    return [(what, limit) for what, limit in rates if limit is not None]
