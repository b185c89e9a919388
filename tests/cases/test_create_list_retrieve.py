"""Cases that users of batch servers reported: create, list, retrieve."""

from __future__ import annotations

import pytest

from tests.handlers.world import Open, World, line

pytestmark = pytest.mark.anyio

WAITS = line(text="!wait for ever")


async def _pool(world: World) -> dict[str, int]:
    status: dict[str, int] = (await world.client.get("/v1/pool/status")).json()
    return {name: status[name] for name in ("intake_pool_size", "active_batches")}


@pytest.mark.parametrize("headers", [{"x-stainless-retry-count": "1"}, {"Idempotency-Key": "once"}])
async def test_c44_a_create_whose_answer_was_lost(
    open_world: Open, headers: dict[str, str]
) -> None:
    """One batch, also when it has completed before the SDK sends its create again; and what was
    held for the second one is let go of. While the batch is active: see test_a_repeated_create."""
    async with open_world(max_intake_capacity=1) as world:
        file = await world.upload()
        fields = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions"}
        first = await world.client.post(
            "/v1/batches", json=fields, headers={"Idempotency-Key": "once"}
        )
        await world.finished(first.json()["id"])
        before = await _pool(world)
        for _ in range(2):
            again = await world.client.post("/v1/batches", json=fields, headers=headers)
            assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
        assert len((await world.client.get("/v1/batches")).json()["data"]) == 1
        assert await _pool(world) == before
        another = await world.create()
        assert (await world.finished(another["id"]))["status"] == "completed"


@pytest.mark.parametrize("headers", [{"x-stainless-retry-count": "1"}, {"Idempotency-Key": "once"}])
async def test_c44_a_repeated_create_needs_no_room(
    open_world: Open, headers: dict[str, str]
) -> None:
    """The pool is full of the very batch that is asked for again."""
    async with open_world(max_intake_capacity=2, batch_local_concurrency=1) as world:
        file = await world.upload(WAITS + line("b", "!wait for ever"))
        fields = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions"}
        first = await world.client.post(
            "/v1/batches", json=fields, headers={"Idempotency-Key": "once"}
        )
        again = await world.client.post("/v1/batches", json=fields, headers=headers)
        assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])


async def test_c44_a_key_that_was_used_for_another_create(world: World) -> None:
    """It would be the wrong batch's results, and this input would never run."""
    headers = {"Idempotency-Key": "mine"}
    answers = []
    for _ in range(2):
        file = await world.upload()
        fields = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions"}
        answers.append(await world.client.post("/v1/batches", json=fields, headers=headers))
    first, second = answers
    assert (first.status_code, second.status_code) == (200, 400)
    error = second.json()["error"]
    assert (error["code"], error["param"]) == ("idempotency_key_reused", "Idempotency-Key")
    assert first.json()["id"] in error["message"]
