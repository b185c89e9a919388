"""How much may wait and how much may run: the intake pool and the scheduling pool.

    intake pool (waiting) ──lease──► scheduling pool (in flight) ──settle──► done
            ▲                                 │
            └──────────── release ────────────┘

The names, defaults and status fields are BatchGen's. Both pools only count: the lines themselves
are in the store.
"""

from __future__ import annotations

import math
from collections import deque

from tidemill import clock
from tidemill.errors import AtCapacity


class DrainRate:
    """Lines settled per second over the last minute."""

    WINDOW_S = 60.0

    def __init__(self) -> None:
        self._settled: deque[tuple[float, int]] = deque()
        self._sum = 0
        self.measured = 0.0
        """The rate when lines were last settled: of use to who asks while there is nothing to do.
        0.0 before the first."""

    def add(self, lines: int, now: float | None = None) -> None:
        """Note that ``lines`` were settled."""
        self._trim(now := clock.monotonic() if now is None else now)
        if lines:
            self._settled.append((now, lines))
            self._sum += lines
            self.measured = self.per_second(now)

    def per_second(self, now: float | None = None) -> float:
        """Lines per second; 0.0 when nothing was settled within the window."""
        self._trim(now := clock.monotonic() if now is None else now)
        if not self._settled:
            return 0.0
        return self._sum / max(1.0, min(self.WINDOW_S, now - self._settled[0][0]))

    def _trim(self, now: float) -> None:
        while self._settled and now - self._settled[0][0] > self.WINDOW_S:
            self._sum -= self._settled.popleft()[1]


class IntakePool:
    """Lines that wait, over all batches: ``waiting`` in the store, ``reserved`` for batches whose
    lines are still being read."""

    def __init__(self, capacity: int, rate: DrainRate) -> None:
        self.capacity = capacity
        self.waiting = 0
        self.reserved = 0
        self._rate = rate

    @property
    def size(self) -> int:
        """Lines that wait or will in a moment."""
        return self.waiting + self.reserved

    def reserve(self, lines: int) -> int:
        """Take room for a batch about to be created and return how much was taken.

        Raises ``AtCapacity`` with when to come again. A batch that is larger than the whole pool
        takes no room: its validation fails it, since waiting would never help.
        """
        if not self.fits_ever(lines):
            return 0
        missing = self.size + lines - self.capacity
        if missing > 0:
            raise AtCapacity(
                f"The server holds {self.size} of at most {self.capacity} waiting lines; "
                f"this batch of {lines} does not fit now.",
                retry_after_s=self.retry_after_s(missing),
            )
        self.reserved += lines
        return lines

    def release(self, reserved: int) -> None:
        """Give a reservation back: the batch's lines were added, or there will be none."""
        self.reserved = max(0, self.reserved - reserved)

    def retry_after_s(self, lines: int) -> int:
        """Seconds until ``lines`` are likely to have drained: 1 to 60, which every SDK honours."""
        rate = self._rate.per_second()
        return 30 if rate <= 0 else max(1, min(60, math.ceil(lines / rate)))

    def fits_ever(self, lines: int) -> bool:
        """False when the pool is too small for the batch even when empty."""
        return lines <= self.capacity

    def add(self, lines: int) -> None:
        """Lines were added, came back, or were found at start."""
        self.waiting += lines

    def remove(self, lines: int) -> None:
        """Lines left: leased or closed."""
        self.waiting = max(0, self.waiting - lines)


class SchedulingPool:
    """Lines in flight: at most ``capacity``, and no more than the executor wants."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.active = 0

    def enter(self, lines: int) -> None:
        self.active += lines

    def leave(self, lines: int) -> None:
        """So many lines have ended, however they ended."""
        self.active -= lines
        assert self.active >= 0, "more lines left the scheduling pool than entered it"
