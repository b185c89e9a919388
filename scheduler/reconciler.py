"""Looks at what runs elsewhere, each thing in its time, no place starving another.

Knows keys and places only; what looking means is the caller's. Per place there is a heap of due
times and a number of looks at once::

    watch(key, place, in_s) ──► [due, key] … ──► look(key, place) ──► seconds to the next, or None

Nothing polls: each place sleeps until its earliest due time or until somebody watches something
earlier.
"""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable, Mapping

import anyio
import structlog
from anyio.abc import TaskGroup, TaskStatus

from tidemill import clock
from tidemill.ports import Clock
from tidemill.scheduler.bell import Bell
from tidemill.scheduler.retry import backoff_s

log = structlog.get_logger()

Look = Callable[[int, str], Awaitable[float | None]]
"""Called with key and place; returns seconds until the next look, None when there is none."""


class _Place:
    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.bell = Bell()
        self.heap: list[tuple[float, int]] = []
        self.due: dict[int, float] = {}
        self.looking: dict[int, anyio.Event] = {}
        self.failures: dict[int, int] = {}
        self.slots = anyio.Semaphore(limit)


class Reconciler:
    """One loop per place, at most ``limits[place]`` looks at once there."""

    def __init__(
        self, look: Look, limits: Mapping[str, int], *, now: Clock = clock.monotonic
    ) -> None:
        self._look = look
        self._now = now
        self._places = {name: _Place(name, limit) for name, limit in limits.items()}
        self._tasks: TaskGroup | None = None

    def watch(self, key: int, place: str, in_s: float = 0.0) -> None:
        """Look at ``key`` in ``in_s`` seconds at the latest, and from then on as ``look`` says."""
        self._schedule(self._places[place], key, self._now() + max(0.0, in_s))

    async def look_now(self, key: int, place: str) -> None:
        """Look at once and wait for the end; joins a look that is under way."""
        at = self._places[place]
        event = at.looking.get(key)
        if event is None:
            assert self._tasks is not None, "the reconciler runs before anything is looked at"
            event = at.looking[key] = anyio.Event()
            at.due.pop(key, None)
            self._tasks.start_soon(self._look_at, at, key, False)
        await event.wait()

    @property
    def watched(self) -> int:
        """Keys that have a next look."""
        return sum(len(at.due) + len(at.looking) for at in self._places.values())

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            for at in self._places.values():
                tasks.start_soon(self._loop, at)
            task_status.started()
            await anyio.sleep_forever()

    def _schedule(self, at: _Place, key: int, due: float) -> None:
        known = at.due.get(key)
        if known is not None and known <= due:
            return
        at.due[key] = due
        heapq.heappush(at.heap, (due, key))
        at.bell.ring()

    async def _loop(self, at: _Place) -> None:
        assert self._tasks is not None
        while True:
            while at.heap and at.due.get(at.heap[0][1]) != at.heap[0][0]:
                heapq.heappop(at.heap)  # it was looked at or moved earlier meanwhile
            if not at.heap:
                await at.bell.wait()
                continue
            due, key = at.heap[0]
            if (wait_s := due - self._now()) > 0:
                with anyio.move_on_after(wait_s):
                    await at.bell.wait()
                continue
            heapq.heappop(at.heap)
            del at.due[key]
            if key in at.looking:
                continue
            at.looking[key] = anyio.Event()
            await at.slots.acquire()
            self._tasks.start_soon(self._look_at, at, key, True)

    async def _look_at(self, at: _Place, key: int, holds_slot: bool) -> None:
        try:
            next_s = await self._look(key, at.name)
            at.failures.pop(key, None)
        except Exception:
            failures = at.failures[key] = at.failures.get(key, 0) + 1
            next_s = backoff_s(failures)
            log.exception("look failed unexpectedly", key=key, again_in_s=next_s)
        finally:
            if holds_slot:
                at.slots.release()
            at.looking.pop(key).set()
        if next_s is not None:
            self._schedule(at, key, self._now() + next_s)
