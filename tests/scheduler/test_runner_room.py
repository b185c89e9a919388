"""The executor may find room while lines run: the runner is told, and leases more."""

from __future__ import annotations

import anyio
import pytest

from tests.scheduler.conftest import World, line

pytestmark = pytest.mark.anyio


async def test_more_lines_are_leased_when_there_is_more_room(world: World) -> None:
    """Before any line in flight has ended."""
    world.script.capacity = 2
    world.script.gate = anyio.Event()
    async with world.up():
        batch = await world.open([line(f"l{i}") for i in range(10)])
        await world.script.reached(2)
        world.script.capacity = 6
        world.runner.look_again()
        await world.script.reached(6)
        world.script.gate.set()
        done = await world.until(batch)
    assert (done.completed, world.script.most) == (10, 6)
