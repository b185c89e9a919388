"""``/batches/{id}/results``: rows while the batch runs."""

from __future__ import annotations

import json

import anyio
import pytest

from tests.handlers.world import World, line

pytestmark = pytest.mark.anyio


async def test_rows_of_a_finished_batch(world: World) -> None:
    """D7: both kinds, each row once, in pages by cursor; then an empty page at the end."""
    data = line("a") + line("b", "!status 400") + line("c")
    batch = await world.finished((await world.create(data))["id"])
    path = f"/v1/batches/{batch['id']}/results"
    rows, after = [], "0"
    while True:
        answer = await world.client.get(path, params={"after": after, "limit": 2})
        assert answer.headers["content-type"] == "application/x-ndjson"
        assert answer.headers["x-tidemill-status"] == "completed"
        if not answer.content:
            break
        assert answer.content.endswith(b"\n")
        rows += [json.loads(row) for row in answer.content.splitlines()]
        after = answer.headers["x-tidemill-next"]
    assert sorted(row["custom_id"] for row in rows) == ["a", "b", "c"]
    failed = {row["custom_id"]: row["response"]["status_code"] for row in rows}
    assert failed == {"a": 200, "b": 400, "c": 200}
    assert answer.headers["x-tidemill-next"] == after


async def test_waiting_ends_with_the_next_row(world: World) -> None:
    """With ``wait`` the answer comes when there is something to say, not after the time."""
    data = line("slow", "!wait results-slow done") + line("fast")
    batch = await world.create(data)
    path = f"/v1/batches/{batch['id']}/results"
    first = await world.client.get(path, params={"wait": 30})
    assert json.loads(first.content)["custom_id"] == "fast"
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:

            async def rest() -> None:
                after = first.headers["x-tidemill-next"]
                answer = await world.client.get(path, params={"after": after, "wait": 30})
                assert json.loads(answer.content)["custom_id"] == "slow"

            tasks.start_soon(rest)
            await anyio.sleep(0.05)  # most likely it waits by then; where not, it is no different
            world.engine.gate("results-slow").set()


async def test_waiting_ends_with_the_batch(world: World) -> None:
    """Who waits for a row that never comes is told that the batch ended."""
    batch = await world.finished((await world.create())["id"])
    path = f"/v1/batches/{batch['id']}/results"
    with anyio.fail_after(60):
        answer = await world.client.get(path, params={"after": 10**9, "wait": 60})
    assert (answer.content, answer.headers["x-tidemill-status"]) == (b"", "completed")


async def test_waiting_has_an_end(world: World) -> None:
    """After the time asked for, an empty answer keeps the cursor."""
    batch = await world.create(line(text="!wait never"))
    answer = await world.client.get(
        f"/v1/batches/{batch['id']}/results", params={"wait": 1, "after": 0}
    )
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["x-tidemill-next"] == "0"


@pytest.mark.parametrize(
    "query", ["after=x", "after=-1", "limit=0", "limit=1001", "wait=-1", "wait=61", "wait=x"]
)
async def test_bad_queries(world: World, query: str) -> None:
    """400 that names the parameter."""
    batch = await world.create()
    answer = await world.client.get(f"/v1/batches/{batch['id']}/results?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.split("=")[0]
