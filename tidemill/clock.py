"""The only place that reads time."""

from __future__ import annotations

import time


def now() -> int:
    """Epoch seconds, whole."""
    return int(time.time())


def now_f() -> float:
    """Epoch seconds with fraction, for due times below a second."""
    return time.time()


def monotonic() -> float:
    """Seconds on a clock that never goes back, for durations."""
    return time.monotonic()


def computed() -> float:
    """Seconds of processor time of the calling thread: what its work takes, whoever else is at work
    on this machine."""
    return time.thread_time()
