"""What an engine process is doing, readable after it died.

A page shared by the server and its engine process. Whoever it names when the process has died was
at work when that happened; everybody else is innocent. It also holds the clock against a step that
never ends: an alarm that kills the process, since nothing in it can be relied upon by then.
"""

from __future__ import annotations

import mmap
import signal
import struct
import tempfile
from collections.abc import Sequence
from typing import IO

_READING = struct.Struct("<q")
_COMPUTING = 8
_MOST = 256
SIZE = _COMPUTING + 8 * (1 + _MOST)


class Blackbox:
    """Written by the engine process, read by the server."""

    def __init__(self, fd: int, *, timeout_s: float = 0.0) -> None:
        """``fd`` is a file of ``SIZE`` bytes. ``timeout_s``: how long one step may take; 0: for
        ever."""
        self._page = mmap.mmap(fd, SIZE)
        self._timeout_s = timeout_s

    def computing(self, keys: Sequence[int]) -> None:
        """These are computed from now on; none: nothing is."""
        keys = keys[:_MOST]
        struct.pack_into(f"<{1 + len(keys)}q", self._page, _COMPUTING, len(keys), *keys)
        if self._timeout_s:
            signal.setitimer(signal.ITIMER_REAL, self._timeout_s if keys else 0.0)

    def reading(self, key: int) -> None:
        """This is prepared from now on; 0: nothing is."""
        _READING.pack_into(self._page, 0, key)

    def suspects(self) -> frozenset[int]:
        """Who was at work. Preparing takes a moment and computing nearly all the time: if both were
        going on, it was not a coincidence."""
        (key,) = _READING.unpack_from(self._page, 0)
        if key:
            return frozenset({key})
        (n,) = struct.unpack_from("<q", self._page, _COMPUTING)
        return frozenset(struct.unpack_from(f"<{n}q", self._page, _COMPUTING + 8))

    def clear(self) -> None:
        """Nobody is at work."""
        self._page[:] = bytes(SIZE)

    def close(self) -> None:
        """Give the page back."""
        self._page.close()


def shared_file() -> IO[bytes]:
    """An empty file of a blackbox's size, without a name."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as its supervisor
    file.truncate(SIZE)
    return file
