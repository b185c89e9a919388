"""Wake-ups: whoever has work rings after its commit, so that nothing polls for work."""

from __future__ import annotations

import anyio


class Bell:
    """A level-triggered wake-up for one event loop: rings are not counted, and none is lost."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def ring(self) -> None:
        """Wake whoever waits, or whoever waits next."""
        self._event.set()

    async def wait(self) -> None:
        """Return at once when it rang since the last return, else when it rings."""
        await self._event.wait()
        self._event = anyio.Event()


class Signals:
    """One-to-many wake-ups by key (a batch's ``seq``): all who wait for the key wake."""

    def __init__(self) -> None:
        self._events: dict[int, anyio.Event] = {}
        self._closed = False

    def close(self) -> None:
        """Nobody waits any more: all who do return, and whoever comes returns at once."""
        self._closed = True
        for key in list(self._events):
            self.ring(key)

    def ring(self, key: int) -> None:
        """Wake all who wait for ``key``; nobody waiting is no matter."""
        event = self._events.pop(key, None)
        if event is not None:
            event.set()

    async def wait(self, key: int, timeout_s: float) -> bool:
        """True when ``key`` rang within ``timeout_s`` seconds, and may ring again."""
        if self._closed:
            return False
        event = self._events.setdefault(key, anyio.Event())
        with anyio.move_on_after(timeout_s):
            await event.wait()
            return not self._closed
        return False
