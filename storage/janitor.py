"""Removes what is deleted or past its time, when there is something to remove.

Nothing is polled: the janitor sleeps until the next expiry that the store knows, or until somebody
rings because a file was deleted, a batch ended, or a file came that expires earlier.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from tidemill.ports import Clock

_log = structlog.get_logger(__name__)

RETRY_S = 60.0
"""After a sweep that failed (the disk is full), the next one comes this much later."""


class Janitor:
    """``sweep`` removes everything that is due at a time; ``next_at`` says when more will be."""

    def __init__(
        self,
        sweep: Callable[[int], Awaitable[object]],
        next_at: Callable[[], Awaitable[int | None]],
        clock: Clock,
    ) -> None:
        self._sweep = sweep
        self._next_at = next_at
        self._clock = clock
        self._rung = asyncio.Event()
        self._planned: float | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, with a first sweep."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End between two commits; harmless when it never began."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def ring(self, at: int | None = None) -> None:
        """Something is to be removed: now, or at ``at`` if that is earlier than what is planned."""
        if at is None or self._planned is None or at < self._planned:
            self._rung.set()

    async def _run(self) -> None:
        while True:
            self._rung.clear()
            try:
                await self._sweep(int(self._clock()))
                self._planned = await self._next_at()
            except Exception:  # noqa: BLE001 — whatever it was, the next sweep may work
                _log.exception("store.sweep_failed")
                self._planned = self._clock() + RETRY_S
            delay = None if self._planned is None else max(1.0, self._planned - self._clock())
            try:
                async with asyncio.timeout(delay):
                    await self._rung.wait()
            except TimeoutError:
                continue
