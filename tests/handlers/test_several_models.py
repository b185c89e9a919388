"""Several models behind one server, as a client sees them: memory for one, asked for two."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from anyio.lowlevel import checkpoint

from tests.handlers.world import Open, World, line
from tidemill.app import running
from tidemill.errors import SettingsError
from tidemill.settings import Settings

pytestmark = pytest.mark.anyio

TWO = json.dumps([{"model": "x", "name": "echo"}, {"model": "y", "name": "other"}])
LOADS_OF_OTHER = 'tidemill_model_loads_total{model="other",outcome="loaded"}'
NAMES = ("echo", "other")
ONE_FITS = {"models": TWO, "memory_budget": 64}


async def states(world: World) -> dict[str, str]:
    """Of all models, as listed."""
    models = (await world.client.get("/v1/models")).json()["data"]
    return {model["id"]: model["state"] for model in models}


async def say(world: World, model: str, text: str = "hi") -> httpx.Response:
    """An interactive answer."""
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    return await world.client.post("/v1/chat/completions", json=body)


async def metric(world: World, series: str) -> float:
    """One number of ``/metrics``; 0 where the series is not there."""
    for row in (await world.client.get("/metrics")).text.splitlines():
        if row.startswith(series):
            return float(row.rpartition(" ")[2])
    return 0.0


async def until(world: World, true: Callable[[dict[str, Any]], bool]) -> None:
    """Let the server go on until its replicas are so."""
    with anyio.fail_after(20):
        while not true((await world.client.get("/v1/pool/status")).json()["replicas"]):
            await checkpoint()


async def test_a_model_is_loaded_for_whoever_asks(open_world: Open) -> None:
    """All are listed; the first is there from the start; the server is healthy throughout."""
    async with open_world(**ONE_FITS) as world:
        assert await states(world) == {"echo": "loaded", "other": "unloaded"}
        assert (await world.client.get("/health")).status_code == 200
        answer = await say(world, "other")
        assert answer.json()["choices"][0]["message"]["content"] == "hi"
        assert await states(world) == {"echo": "unloaded", "other": "loaded"}
        assert (await world.client.get("/health")).status_code == 200


async def test_lines_of_a_batch_are_grouped_by_model(open_world: Open) -> None:
    """Lines of both models in turn cost one swap, not one each; all are answered."""
    async with open_world(**ONE_FITS) as world:
        before = await metric(world, LOADS_OF_OTHER)
        lines = b"".join(line(f"{model}-{i}", model=model) for i in range(50) for model in NAMES)
        batch = await world.finished((await world.create(lines))["id"])
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 100, "completed": 100, "failed": 0}
        assert await metric(world, LOADS_OF_OTHER) == before + 1


async def test_a_preflight_loads_no_model(open_world: Open) -> None:
    """Tokens of the one in memory are counted by its tokenizer, those of the other estimated."""
    async with open_world(**ONE_FITS) as world:
        data = line("a", "one two") + line("b", "one two", model="other")
        files = {"file": ("in.jsonl", data)}
        form = {"purpose": "batch"}
        answer = await world.client.post("/v1/batches/preflight", data=form, files=files)
        told = {one["model"]: one for one in answer.json()["models"]}
        assert told["echo"]["input_tokens_are"] == "tokenised"
        assert told["echo"]["input_tokens"] == 2
        assert told["other"]["input_tokens_are"] == "estimated"
        assert told["other"]["input_tokens"] > 2
        assert await states(world) == {"echo": "loaded", "other": "unloaded"}


async def test_the_status_says_what_is_in_memory(open_world: Open) -> None:
    """For people and for Prometheus."""
    async with open_world(**ONE_FITS) as world:
        status = (await world.client.get("/v1/pool/status")).json()["replicas"]
        assert {name: one["state"] for name, one in status.items()} == await states(world)
        assert status["other"]["healthy"]
        assert status["other"]["memory_bytes"] == 64 << 20
        assert await metric(world, 'tidemill_replica_loaded{model="echo"}') == 1
        assert await metric(world, 'tidemill_replica_loaded{model="other"}') == 0


async def test_a_model_beyond_the_budget_stops_the_start(tmp_path: Path) -> None:
    """With the numbers, so that the setting can be corrected."""
    settings = Settings(engine="echo", storage_path=str(tmp_path), memory_budget=63)
    with pytest.raises(SettingsError, match=r"'echo' needs about 64 MiB, more than .* of 63 MiB"):
        async with running(settings):
            pass


async def test_a_batch_over_several_models_goes_on_after_a_restart(open_world: Open) -> None:
    """Its lines stand at the places of their models again, and each runs once."""
    async with open_world(**ONE_FITS) as world, anyio.create_task_group() as tasks:
        tasks.start_soon(say, world, "echo", "!wait gate")
        await until(world, lambda status: status["echo"]["active"] == 1)
        lines = b"".join(line(f"{model}-{i}", model=model) for i in range(20) for model in NAMES)
        batch = await world.create(lines)
        await until(world, lambda status: not status["echo"]["takes_lines"])
        tasks.cancel_scope.cancel()
    async with open_world(**ONE_FITS) as world:
        batch = await world.finished(batch["id"])
    assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}


async def test_nothing_is_loaded_for_a_batch_that_was_cancelled(open_world: Open) -> None:
    """It waited for a model that another one kept out; when there is room, nobody wants it."""
    async with open_world(**ONE_FITS) as world, anyio.create_task_group() as tasks:
        before = await metric(world, LOADS_OF_OTHER)
        tasks.start_soon(say, world, "echo", "!wait gate")
        await until(world, lambda status: status["echo"]["active"] == 1)
        batch = await world.create(line(model="other"))
        await until(world, lambda status: not status["echo"]["takes_lines"])
        await world.client.post(f"/v1/batches/{batch['id']}/cancel")
        assert (await world.finished(batch["id"]))["status"] == "cancelled"
        await until(world, lambda status: status["echo"]["takes_lines"])
        world.engine.gate("gate").set()
        assert (await say(world, "echo")).status_code == 200
        assert await metric(world, LOADS_OF_OTHER) == before
