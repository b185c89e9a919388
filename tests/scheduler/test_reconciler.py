"""Everything is looked at in its time, and no place starves another."""

from __future__ import annotations

from collections import Counter

import anyio
import pytest

from tidemill.scheduler.reconciler import Reconciler

pytestmark = pytest.mark.anyio


async def test_each_is_looked_at_until_it_says_that_it_ended() -> None:
    """In order of their due times, as often as each look asked for."""
    looks: list[int] = []
    all_looked = anyio.Event()

    async def look(key: int, place: str) -> float | None:
        looks.append(key)
        if len(looks) == 6:
            all_looked.set()
        return 0.01 if looks.count(key) < 3 else None

    reconciler = Reconciler(look, {"up": 4})
    async with anyio.create_task_group() as tasks:
        await tasks.start(reconciler.run)
        reconciler.watch(2, "up", 0.2)
        reconciler.watch(1, "up")
        with anyio.fail_after(60):
            await all_looked.wait()
        tasks.cancel_scope.cancel()
    assert looks[0] == 1
    assert Counter(looks) == {1: 3, 2: 3}


async def test_the_earlier_of_two_due_times_counts() -> None:
    """Watching again never postpones."""
    looked = anyio.Event()

    async def look(key: int, place: str) -> float | None:
        looked.set()
        return None

    reconciler = Reconciler(look, {"up": 1})
    async with anyio.create_task_group() as tasks:
        await tasks.start(reconciler.run)
        reconciler.watch(1, "up", 60)
        reconciler.watch(1, "up", 0.01)
        reconciler.watch(1, "up", 30)
        with anyio.fail_after(60):
            await looked.wait()
        tasks.cancel_scope.cancel()


async def test_a_slow_place_holds_up_nobody_else() -> None:
    """Within a place no more looks at once than its limit."""
    active: Counter[str] = Counter()
    peak: Counter[str] = Counter()
    done: Counter[str] = Counter()
    all_done = anyio.Event()

    async def look(key: int, place: str) -> float | None:
        active[place] += 1
        peak[place] = max(peak[place], active[place])
        await anyio.sleep(60 if place == "slow" else 0.001)
        active[place] -= 1
        done[place] += 1
        if done["fast"] == 20:
            all_done.set()
        return None

    reconciler = Reconciler(look, {"slow": 2, "fast": 3})
    async with anyio.create_task_group() as tasks:
        await tasks.start(reconciler.run)
        for key in range(20):
            reconciler.watch(key, "slow")
            reconciler.watch(key, "fast")
        with anyio.fail_after(60):
            await all_done.wait()
        tasks.cancel_scope.cancel()
    assert (peak["slow"], peak["fast"]) == (2, 3)


async def test_those_who_ask_at_once_share_a_look() -> None:
    """And a look that fails unexpectedly is tried again."""
    looks = 0

    async def look(key: int, place: str) -> float | None:
        nonlocal looks
        looks += 1
        await anyio.sleep(0.01)
        if looks == 1:
            raise ValueError("a bug")
        return None

    reconciler = Reconciler(look, {"up": 1})
    async with anyio.create_task_group() as tasks:
        await tasks.start(reconciler.run)
        async with anyio.create_task_group() as askers:
            for _ in range(50):
                askers.start_soon(reconciler.look_now, 7, "up")
        assert looks == 1
        assert reconciler.watched == 1
        await reconciler.look_now(7, "up")
        assert (looks, reconciler.watched) == (2, 0)
        tasks.cancel_scope.cancel()
