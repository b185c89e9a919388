"""Our own client against the real server: one-liner, step by step, while it runs, asyncio."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sdk.conftest import KEY
from tests.worlds.requests import chat, jsonl, rows, said
from tests.worlds.server import Server
from tidemill.client import ApiError, AsyncTidemillClient, TidemillClient, WaitTimeout

pytestmark = pytest.mark.anyio


@pytest.fixture
def client(live: Server) -> Iterator[TidemillClient]:
    """With the base URL as the OpenAI SDK has it."""
    with TidemillClient(f"{live.base_url}/v1", KEY) as client:
        yield client


def test_one_call_from_file_to_file(client: TidemillClient, tmp_path: Path) -> None:
    """``submit_batch`` as BatchGen's scripts use it: parameters of the batch apply to its lines."""
    path = tmp_path / "input.jsonl"
    path.write_bytes(jsonl([chat("a", "one two three"), chat("b", "four five", max_tokens=1)]))
    batch = client.submit_batch(
        input_file_path=str(path),
        output_file_path=str(tmp_path / "output.jsonl"),
        max_decoding_length=2,
        poll_interval=0.05,
    )
    assert batch["status"] == "completed"
    answers = rows((tmp_path / "output.jsonl").read_bytes())
    assert {id: said(row) for id, row in answers.items()} == {"a": "one two", "b": "four"}


def test_failures_go_to_a_file_of_their_own(client: TidemillClient, tmp_path: Path) -> None:
    """Where one is named; without any success the output file is there and empty."""
    path = tmp_path / "input.jsonl"
    path.write_bytes(jsonl([chat("a", "!status 418")]))
    batch = client.submit_batch(
        path,
        tmp_path / "output.jsonl",
        error_file_path=tmp_path / "errors.jsonl",
        poll_interval=0.05,
    )
    assert batch["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
    assert (tmp_path / "output.jsonl").read_bytes() == b""
    assert set(rows((tmp_path / "errors.jsonl").read_bytes())) == {"a"}


def test_step_by_step(client: TidemillClient) -> None:
    """Upload, create, wait, download, list, delete: dictionaries as the API has them."""
    file = client.upload_file(jsonl([chat("a", "tide")]), purpose="batch", filename="a.jsonl")
    assert client.get_file(file["id"]) == file
    batch = client.create_batch(
        input_file_id=file["id"], endpoint="/v1/chat/completions", metadata={"k": "v"}
    )
    batch = client.wait_for_batch(batch["id"], poll_interval=0.05, timeout=120)
    assert client.get_batch(batch["id"]) == batch
    assert said(rows(client.download_file_content(batch["output_file_id"]))["a"]) == "tide"
    assert client.list_batches(limit=1)["data"][0]["id"] == batch["id"]
    assert client.list_files(purpose="batch", limit=1)["data"][0]["id"] == file["id"]
    with pytest.raises(ApiError) as caught:
        client.cancel_batch(batch["id"])
    assert (caught.value.status, caught.value.code) == (409, "batch_not_cancellable")
    assert client.delete_file(file["id"])["deleted"] is True
    with pytest.raises(ApiError) as caught:
        client.get_file(file["id"])
    assert caught.value.status == 404


def test_rows_come_while_the_batch_runs(client: TidemillClient) -> None:
    """The first is here before the last is finished; in the end each is here once."""
    lines = [chat("quick", "now"), chat("bad", "!status 418"), chat("slow", "!sleep 4 later")]
    batch = client.create_batch(client.upload_file(jsonl(lines))["id"])
    found = []
    for row in client.results(batch["id"]):
        if not found:
            assert client.get_batch(batch["id"])["status"] in ("validating", "in_progress")
        found.append(json.loads(row)["custom_id"])
    assert sorted(found) == ["bad", "quick", "slow"]
    assert found[-1] == "slow"
    again = [json.loads(row)["custom_id"] for row in client.results(batch["id"], follow=False)]
    assert again == found


def test_a_wait_that_is_too_short_leaves_the_batch_alone(client: TidemillClient) -> None:
    """It can be cancelled, or waited for again."""
    batch = client.create_batch(client.upload_file(jsonl([chat("a", "!sleep 3 x")]))["id"])
    with pytest.raises(WaitTimeout):
        client.wait_for_batch(batch["id"], poll_interval=0.05, timeout=0.1)
    assert client.wait_for_batch(batch["id"], poll_interval=0.05)["status"] == "completed"


def test_a_refused_file_names_every_problem(client: TidemillClient) -> None:
    """On the exception, with lines."""
    with pytest.raises(ApiError, match="Line 1") as caught:
        client.upload_file(b"[1]\n" + jsonl([chat("b", "x", stream=True)]))
    assert {problem["line"] for problem in caught.value.problems} == {1, 2}


def test_the_server_about_itself(client: TidemillClient) -> None:
    """Models, health, and the pools under BatchGen's names."""
    assert [model["id"] for model in client.list_models()] == ["echo"]
    assert client.health_check() == {"status": "healthy"}
    assert set(client.pool_status()) >= {
        "intake_pool_size",
        "intake_pool_capacity",
        "scheduling_pool_active",
        "scheduling_pool_free",
        "scheduling_pool_capacity",
        "active_batches",
        "pool_mode",
    }


async def test_the_same_awaited(live: Server, tmp_path: Path) -> None:
    """Every method of the blocking client is there, and works on the same server."""
    public = {name for name in vars(TidemillClient) if not name.startswith("_")}
    assert public == {name for name in vars(AsyncTidemillClient) if not name.startswith("_")}
    path = tmp_path / "input.jsonl"
    path.write_bytes(jsonl([chat("a", "tide"), chat("b", "!status 418")]))
    async with AsyncTidemillClient(live.base_url, KEY) as client:
        batch = await client.submit_batch(path, tmp_path / "output.jsonl", poll_interval=0.05)
        assert said(rows((tmp_path / "output.jsonl").read_bytes())["a"]) == "tide"
        found = [json.loads(row)["custom_id"] async for row in client.results(batch["id"])]
        assert sorted(found) == ["a", "b"]
        assert (await client.health_check())["status"] == "healthy"
        saved = await client.save_results(batch, tmp_path / "o.jsonl", tmp_path / "e.jsonl")
        assert saved == [tmp_path / "o.jsonl", tmp_path / "e.jsonl"]
