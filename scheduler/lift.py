"""Which batches would miss their deadline at the pace at which they are served.

Such a batch is *lifted*: ``queue`` gives it turns ahead of others, within a bound.

Pure: never awaits, never reads a clock. Times are epoch seconds.
"""

from __future__ import annotations

import math

from tidemill.types import BatchRecord

LATE, IN_TIME = 2.0, 3.0
"""A batch is lifted when what is left of its time is less than so many times what its lines need,
and is so no more when it is this many times that. Between the two it stays as it is: the pace of a
batch that was lifted rises, and it would be dropped at once."""
LAST = 0.1
"""In this part of its window a batch is lifted whatever its pace: it may have had no turn yet."""
LOOK_S = 5.0
"""Between two looks at all batches."""


class Pace:
    """Lines per second of one batch, recent ones counting more.

    Each line's weight falls by 63 % in ``MEMORY_S`` seconds. So a batch without a turn for long is
    slow, yet not as if it never had one, and a batch whose lines take minutes has a pace, too.
    """

    MEMORY_S = 300.0

    def __init__(self, now: float) -> None:
        """``now``: when its lines could start."""
        self._began = self._at = now
        self._weight = 0.0

    def add(self, lines: int, now: float) -> None:
        """Lines ended."""
        self._weight = self._weight * self._faded(now - self._at) + lines
        self._at = max(now, self._at)

    def per_second(self, now: float) -> float:
        """Lines per second; 0.0 before the first one ended."""
        seen = 1.0 - self._faded(max(1.0, now - self._began))
        return self._weight * self._faded(now - self._at) / (self.MEMORY_S * seen)

    def _faded(self, seconds: float) -> float:
        return math.exp(-max(0.0, seconds) / self.MEMORY_S)


def late(
    *, now: float, began_at: float, expires_at: float, lines: int, rate: float, lifted: bool
) -> bool:
    """True when a batch is to be lifted.

    ``lines``: those without an end; ``rate``: their pace, lines per second, 0.0 where it is not
    known; ``lifted``: what it is now.
    """
    left_s = expires_at - now
    if lines <= 0 or left_s <= 0:
        return False
    if left_s <= LAST * (expires_at - began_at):
        return True
    if rate <= 0:
        return False
    return left_s < (IN_TIME if lifted else LATE) * lines / rate


class _Watched:
    """A batch whose lines may start."""

    __slots__ = ("began_at", "expires_at", "lines", "pace")

    def __init__(self, batch: BatchRecord, now: float) -> None:
        self.began_at, self.expires_at = batch.created_at, batch.expires_at
        self.lines = batch.total - batch.completed - batch.failed
        self.pace = Pace(now)


class Lifts:
    """The batches whose lines may start, and which of them are lifted."""

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self._lifted: set[int] = set()
        self._look_at = -math.inf

    def add(self, batch: BatchRecord, now: float) -> None:
        """Lines of a batch may start; it is looked at as soon as somebody asks."""
        self._watched[batch.seq] = _Watched(batch, now)
        self._look_at = -math.inf

    def remove(self, seq: int) -> None:
        """No line of it may start any more."""
        self._watched.pop(seq, None)
        self._lifted.discard(seq)

    def ended(self, seq: int, lines: int, now: float) -> None:
        """Lines of a batch have their answer, or the reason why there is none."""
        if seq in self._watched:
            self._watched[seq].lines -= lines
            self._watched[seq].pace.add(lines, now)

    def look(self, now: float) -> set[int] | None:
        """Those that are lifted, by ``seq``; None: as they were, it is too early to look again."""
        if now < self._look_at:
            return None
        self._look_at = now + LOOK_S
        self._lifted = {
            seq
            for seq, one in self._watched.items()
            if late(
                now=now,
                began_at=one.began_at,
                expires_at=one.expires_at,
                lines=one.lines,
                rate=one.pace.per_second(now),
                lifted=seq in self._lifted,
            )
        }
        return self._lifted
