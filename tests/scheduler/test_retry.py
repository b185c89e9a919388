"""Backoff, jitter, and the gate in front of a busy place."""

from __future__ import annotations

import anyio
import pytest
from anyio.lowlevel import checkpoint

from tidemill.scheduler.retry import Gate, Resting, Rests, backoff_s, jittered
from tidemill.types import Lane

pytestmark = pytest.mark.anyio


def test_backoff_doubles_up_to_its_longest() -> None:
    """Also after very many failures."""
    assert [backoff_s(n, longest_s=10) for n in (0, 1, 2, 3, 4, 5, 5000)] == [
        1,
        1,
        2,
        4,
        8,
        10,
        10,
    ]


def test_a_place_rests_longer_each_time_until_something_ran_there() -> None:
    """Lines that were under way together make one rest; other places are not held up."""
    rests, wants = Rests(), {"a": 4, "b": 2}
    assert [rests.add("a", now) for now in (100, 100.5, 101, 103)] == [101, 101, 103, 107]
    assert rests.awake(wants, 106.9) == {"a": 0, "b": 2}
    assert rests.awake(wants, 107) == wants
    rests.end("a")
    assert rests.add("a", 200) == 201
    for now in range(1000, 9000, 1000):
        longest = rests.add("a", now) - now
    assert longest == 60


def test_jitter_only_shortens() -> None:
    """An interval is a promise."""
    assert jittered(100, draw=0.0) == 100
    assert jittered(100, draw=0.999) > 80
    assert all(80 <= jittered(100) <= 100 for _ in range(100))


async def test_no_more_than_the_ceiling_at_once_and_the_lower_lane_first() -> None:
    """Whoever came later on a better lane goes before those who wait."""
    gate, order, peak, all_wait = Gate(2), [], 0, anyio.Event()

    async def call(name: str, lane: Lane) -> None:
        nonlocal peak
        async with gate.enter(lane):
            peak = max(peak, gate.active)
            order.append(name)
            await all_wait.wait()

    async with anyio.create_task_group() as tasks:
        for n in range(4):
            tasks.start_soon(call, f"batch-{n}", Lane.BATCH)
        await checkpoint()
        tasks.start_soon(call, "interactive", Lane.INTERACTIVE)
        while gate.waiting < 3:
            await checkpoint()
        all_wait.set()
    assert peak == 2
    assert order == ["batch-0", "batch-1", "interactive", "batch-2", "batch-3"]
    assert (gate.active, gate.waiting) == (0, 0)


async def test_people_who_ask_do_not_put_off_a_look_for_ever() -> None:
    """It goes before those that came more than ten seconds after it; a line goes last."""
    now, order = [1000.0], []
    gate = Gate(1, now=lambda: now[0])

    async def call(name: str, lane: Lane) -> None:
        async with gate.enter(lane):
            order.append(name)

    arrivals = [
        ("line", Lane.BATCH, 0),
        ("look", Lane.JOB, 0),
        ("soon", Lane.INTERACTIVE, 9),
        ("late", Lane.INTERACTIVE, 11),
    ]
    async with anyio.create_task_group() as tasks, gate.enter():
        for waiting, (name, lane, at) in enumerate(arrivals, 1):
            now[0] = 1000.0 + at
            tasks.start_soon(call, name, lane)
            while gate.waiting < waiting:
                await checkpoint()
    assert order == ["soon", "look", "late", "line"]


async def test_too_fast_halves_once_and_rests() -> None:
    """All 429s of one moment count once; nothing starts before the rest is over; it grows back."""
    now = [1000.0]
    gate = Gate(8, now=lambda: now[0])
    for _ in range(5):
        gate.throttled(60)
    assert gate.limit == 4
    with anyio.move_on_after(0.02) as early:
        async with gate.enter(Lane.JOB):
            pass
    assert early.cancelled_caught
    with pytest.raises(Resting) as resting:  # nobody is kept waiting for a minute
        await gate.enter(Lane.INTERACTIVE).__aenter__()
    assert (resting.value.rest_s, gate.active, gate.waiting) == (60, 0, 0)
    now[0] += 60
    with anyio.fail_after(60):
        async with gate.enter():
            pass
    for _ in range(200):
        gate.succeeded()
    assert gate.limit == 8


async def test_who_waits_out_a_rest_is_woken() -> None:
    """By nothing but the time."""
    gate = Gate(1)
    gate.throttled(0.01)
    with anyio.fail_after(60):
        async with gate.enter():
            pass


async def test_a_rest_that_begins_meanwhile_is_waited_out_too() -> None:
    """By those who waited already, although nobody comes by after it."""
    gate = Gate(1)

    async def call() -> None:
        async with gate.enter():
            pass

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks, gate.enter():
            for waiting in (1, 2):
                tasks.start_soon(call)
                while gate.waiting < waiting:
                    await checkpoint()
            for _ in range(10):  # until they sleep
                await checkpoint()
            gate.throttled(0.01)
    assert (gate.active, gate.waiting) == (0, 0)


async def test_who_gives_up_waiting_takes_no_place() -> None:
    """A cancelled waiter, before or after its turn came, leaves the gate whole."""
    gate = Gate(1)
    async with gate.enter():
        with anyio.move_on_after(0.01):
            async with gate.enter():
                pytest.fail("there was no place")
        async with anyio.create_task_group() as tasks:
            scope = anyio.CancelScope()

            async def give_up() -> None:
                with scope:
                    async with gate.enter():
                        await anyio.sleep_forever()

            tasks.start_soon(give_up)
            await checkpoint()
            scope.cancel()
    assert (gate.active, gate.waiting) == (0, 0)
    with anyio.fail_after(60):
        async with gate.enter():
            assert gate.active == 1
