"""What a provider holds for us is deleted there once nobody needs it, and never before."""

from __future__ import annotations

from typing import Any

import anyio
import openai
import pytest
from worlds.house import House, Open, line
from worlds.provider import ProviderWorld

pytestmark = pytest.mark.anyio


async def _held(world: ProviderWorld, purpose: str | None = None) -> int:
    files = world.state()["files"].values()
    return sum(purpose in (None, file["purpose"]) for file in files)


async def _cleared(world: ProviderWorld, to: int = 0) -> None:
    with anyio.fail_after(60):
        while True:
            if await _held(world) <= to:
                return
            await anyio.sleep(0.02)


async def _look(house: House) -> Any:
    return await house.server.providers.backends["up"].look(0)


async def test_copies_of_a_settled_batch_are_deleted(server: Open, world: ProviderWorld) -> None:
    """Inputs and results; ours are still served, and the file can be used again."""
    async with server(batch_reconcile_interval_s=0.05) as house:
        file = await house.upload(line("a"), line("b", "!refuse"))
        ended = await house.until((await house.create(file.id)).id)
        await _cleared(world)
        assert set(await house.rows(ended.output_file_id)) == {"a"}
        assert set(await house.rows(ended.error_file_id)) == {"b"}
        again = await house.until((await house.create(file.id)).id)
        assert again.request_counts == ended.request_counts
        await _cleared(world)
    assert world.calls("files.create") == 2


async def test_a_copy_stays_while_a_batch_may_read_it(server: Open, world: ProviderWorld) -> None:
    """The file's other batch has ended, this one has not; a file that waits for its first batch is
    kept, too, until it is deleted here."""
    async with server(allow_duplicate_batches=True) as house:
        file = await house.upload(line("a"))
        await house.until((await house.create(file.id)).id)
        world.set(hold="in_progress")
        running = await house.create(file.id)
        await house.until(running.id, "in_progress")
        await _look(house)
        assert await _held(world, "batch") == 1
        world.set(hold=None)
        await house.until(running.id)
        await _look(house)
        assert await _held(world) == 0

        idle = await house.upload(line("b"))
        await _look(house)
        assert await _held(world, "batch") == 1
        await house.client.files.delete(idle.id)
        await _look(house)
        assert await _held(world) == 0


async def test_a_batchs_own_copy_is_sent_once_and_deleted(
    server: Open, world: ProviderWorld
) -> None:
    """It has the batch's parameters in its lines; a create that is repeated does not repeat it."""
    async with server() as house:
        file = await house.upload(line("a"))
        world.fail("batches.create", times=3, status=503)
        batch = await house.create(file.id, extra_body={"temperature": 0.9})
        await house.until(batch.id)
        assert world.calls("batches.create") == 4
        assert world.calls("files.create") == 2
        await _look(house)
        assert await _held(world) == 0


async def test_a_refused_batchs_own_copy_goes_with_it(server: Open, world: ProviderWorld) -> None:
    """Nothing here remembers it afterwards."""
    world.set(token_limit=True)
    async with server() as house:
        file = await house.upload(line("a"))
        with pytest.raises(openai.BadRequestError, match="token"):
            await house.create(file.id, extra_body={"temperature": 0.9})
        assert await _held(world) == 1


@pytest.mark.parametrize("status", [405, 501])
async def test_a_provider_that_deletes_nothing_is_asked_once(
    server: Open, world: ProviderWorld, status: int
) -> None:
    """What it keeps is left to its own expiry; one that fails for now is asked again."""
    async with server() as house:
        await house.until((await house.start(line("a"))).id)
        world.fail("files.delete", status=503)
        await _look(house)
        assert world.calls("files.delete") == 1
        world.fail("files.delete", times=-1, status=status)
        await _look(house)
        asked = world.calls("files.delete")
        await _look(house)
        assert world.calls("files.delete") == asked == 3
