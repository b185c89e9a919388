"""How long to wait before trying again, and how many may try at once.

Pure but for ``Gate``, which holds back calls to one place: its limit grows by one for each round
of successes and halves when the place says "too fast" (AIMD, as TCP does).
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import anyio

from tidemill import clock
from tidemill.ports import Clock
from tidemill.types import Lane


def backoff_s(failures: int, *, first_s: float = 1.0, longest_s: float = 300.0) -> float:
    """Seconds to wait after ``failures`` failures in a row: doubling, at most ``longest_s``."""
    return float(min(longest_s, first_s * 2.0 ** min(max(0, failures - 1), 30)))


def jittered(seconds: float, *, by: float = 0.2, draw: float | None = None) -> float:
    """``seconds`` made up to ``by`` shorter, so that what began together does not stay together.

    Never longer: an interval is a promise. ``draw`` in [0, 1) replaces the random number.
    """
    return seconds * (1.0 - by * (random.random() if draw is None else draw))


class Rests:
    """Places where nothing can run for a while: each rest is twice as long as the one before, until
    something ran there."""

    def __init__(self) -> None:
        self._rests: dict[str, tuple[int, float]] = {}

    def add(self, place: str, now: float) -> float:
        """Nothing runs there. Returns until when it rests; lines that were under way together make
        one rest."""
        failures, until = self._rests.get(place, (0, 0.0))
        if until <= now:
            failures += 1
            until = now + backoff_s(failures, longest_s=60.0)
            self._rests[place] = failures, until
        return until

    def end(self, place: str) -> None:
        """Something ran there."""
        self._rests.pop(place, None)

    def awake(self, wants: Mapping[str, int], now: float) -> dict[str, int]:
        """``wants`` with nothing for the places that rest."""
        return {
            place: 0 if self._rests.get(place, (0, 0.0))[1] > now else lines
            for place, lines in wants.items()
        }


_LETS_PASS_S = {Lane.INTERACTIVE: 0.0, Lane.JOB: 10.0}
"""How long after it a call of a better lane may come and still go first; lines wait for ever."""


_PERSON_WAITS_S = 10.0
"""A longer rest is told to an interactive request instead of waited out."""


class Resting(Exception):
    """The place rests for longer than somebody should be kept waiting."""

    def __init__(self, rest_s: float) -> None:
        super().__init__(f"rests for {rest_s:.0f} s")
        self.rest_s = rest_s


class _Waiter:
    """A call that waits; woken to look again, and admitted when it is its turn."""

    def __init__(self) -> None:
        self.woken = anyio.Event()
        self.admitted = False


class Gate:
    """At most ``limit`` calls at once to one place, better lanes first, none while it rests.

    A call that keeps batches known and settled is not put off for ever by people who ask: it goes
    before those that came more than ten seconds after it.
    """

    def __init__(self, ceiling: int, *, now: Clock = clock.monotonic) -> None:
        self.ceiling = ceiling
        self.limit = float(ceiling)
        """May be fractional between two steps of growth; at least 1."""
        self.active = 0
        self._now = now
        self._rest_until = 0.0
        self._waiting: list[tuple[float, int, _Waiter]] = []
        self._turn = 0
        self._halved_at = -1e9

    @property
    def waiting(self) -> int:
        """Calls that wait for their turn."""
        return len(self._waiting)

    @asynccontextmanager
    async def enter(self, lane: Lane = Lane.INTERACTIVE) -> AsyncIterator[None]:
        """Hold one place of the gate. Raises ``Resting`` for an interactive call."""
        await self._wait(lane)
        try:
            yield
        finally:
            self.active -= 1
            self._admit()

    def succeeded(self) -> None:
        """A call was answered: a round of ``limit`` such calls raises the limit by one."""
        self.limit = min(float(self.ceiling), self.limit + 1.0 / self.limit)
        self._admit()

    def throttled(self, rest_s: float | None) -> None:
        """The place said "too fast": halve the limit, once for all calls of the same moment, and
        start nothing for ``rest_s`` seconds."""
        now = self._now()
        if now - self._halved_at > 1.0:
            self.limit = max(1.0, self.limit / 2)
            self._halved_at = now
        self._rest_until = max(self._rest_until, now + (1.0 if rest_s is None else rest_s))
        for _, _, waiter in self._waiting:
            waiter.woken.set()  # nobody else may come by when the rest is over

    async def _wait(self, lane: Lane) -> None:
        waiter = _Waiter()
        self._turn += 1
        entry = (self._now() + _LETS_PASS_S.get(lane, math.inf), self._turn, waiter)
        heapq.heappush(self._waiting, entry)
        self._admit()
        try:
            while not waiter.admitted:
                waiter.woken = anyio.Event()
                rest_s = self._rest_until - self._now()
                if lane is Lane.INTERACTIVE and rest_s > _PERSON_WAITS_S:
                    raise Resting(rest_s)
                with anyio.move_on_after(rest_s if rest_s > 0 else None):
                    await waiter.woken.wait()
                self._admit()
        except BaseException:
            if waiter.admitted:  # the place was ours already; it goes to the next
                self.active -= 1
                self._admit()
            else:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            raise

    def _admit(self) -> None:
        """Give free places to those who wait, in order."""
        if self._now() < self._rest_until:
            return
        while self._waiting and self.active < int(self.limit):
            self.active += 1
            waiter = heapq.heappop(self._waiting)[2]
            waiter.admitted = True
            waiter.woken.set()
