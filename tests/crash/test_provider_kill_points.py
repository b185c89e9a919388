"""kill -9 on the way to a provider and back: no orphan runs unseen, nothing is settled twice."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
from openai import APIConnectionError, OpenAI
from openai.types import Batch

from tests.worlds.provider import API_KEY, ProviderWorld
from tests.worlds.server import Server

LINES = 900
POINTS = (
    "upstream.keep_batch.before_commit",  # our row is there, the intent is not
    "upstream.keep_batch.after_commit",  # the intent is there, the provider was not asked
    "provider.create.after_answer",  # it runs there, and we do not know its id
    "upstream.keep_batch.before_commit:2",
    "upstream.keep_batch.after_commit:2",
    "upstream.settle.before_commit:2",
    "upstream.settle.after_commit",
    "batch.end.before_commit",
    "batch.end.after_commit",
)


@pytest.fixture(scope="module")
def process() -> Iterator[ProviderWorld]:
    with ProviderWorld() as world:
        yield world


@pytest.fixture
def world(process: ProviderWorld) -> ProviderWorld:
    process.reset()
    return process


def _input(lines: int = LINES, model: str = "big") -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    requests = (
        {"custom_id": str(no), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for no in range(lines)
    )
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


def _client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.base_url}/v1", api_key="-", max_retries=0, timeout=60)


def _ended(client: OpenAI, id: str) -> Batch:
    for _ in range(5000):
        batch = client.batches.retrieve(id)
        if batch.status in ("completed", "failed", "cancelled", "expired"):
            return batch
        time.sleep(0.02)
    pytest.fail(f"stuck: {batch}")


def _killed_and_ended(server: Server, content: bytes) -> tuple[OpenAI, Batch]:
    """Run a batch until the server dies under it, start the server again, and wait for the end of
    the one batch that there is; returns a client of the new server, too."""
    with suppress(APIConnectionError, httpx.HTTPError):
        client = _client(server)
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
        )
        _ended(client, batch.id)
    for _ in range(5000):
        if server.returncode is not None:
            break
        time.sleep(0.02)
    assert server.returncode == -9

    del server.env["TIDEMILL_CRASH_AT"]
    server.restart()
    client = _client(server)
    (batch,) = client.batches.list().data
    return client, _ended(client, batch.id)


@pytest.mark.parametrize("point", POINTS)
def test_killed_here_the_batch_is_adopted(world: ProviderWorld, point: str) -> None:
    """After a restart the provider has one batch, and each line is here once."""
    table = {
        "name": "up",
        "kind": "openai",
        "base_url": world.url + "/v1",
        "api_key_env": "UP_KEY",
        "models": {"big": "gpt-4.1"},
    }
    env = {"UP_KEY": API_KEY, "TIDEMILL_CRASH_AT": point}
    settings = {"providers": json.dumps([table]), "provider_refresh_s": 0, "log_level": "warning"}
    with Server(env=env, **settings) as server:
        client, batch = _killed_and_ended(server, _input())
        assert batch.status == "completed"
        assert batch.request_counts is not None
        assert batch.request_counts.completed == batch.request_counts.total == LINES
        assert batch.output_file_id is not None
        content = client.files.content(batch.output_file_id).read()
        ids = [json.loads(row)["custom_id"] for row in content.splitlines()]
        assert sorted(ids, key=int) == [str(no) for no in range(LINES)]
    state = world.state()
    (there,) = state["batches"].values()
    assert there["metadata"]["tidemill_batch"] == batch.id


@pytest.mark.parametrize("validation", ["upload", "batch"])
@pytest.mark.parametrize(
    "point",
    [
        "upstream.keep_batch.before_commit:4",  # it runs here, its provider is not let go of
        "upstream.keep_batch.after_commit:4",  # nobody here has been told
        "upstream.settle.after_commit",  # what the provider had finished is here
    ],
)
def test_killed_on_the_way_here_the_batch_goes_on(
    world: ProviderWorld, point: str, validation: str
) -> None:
    """The provider failed it after two lines: those are kept, the others run here, once."""
    problem = {"code": "model_not_found", "message": "The model went away.", "line": None}
    world.set(outcome={"status": "failed", "finish": 2, "problems": [problem]})
    table = {
        "name": "up",
        "kind": "openai",
        "base_url": world.url + "/v1",
        "api_key_env": "UP_KEY",
        "models": {"echo": {"batch": "gpt-4.1"}},
    }
    env = {"UP_KEY": API_KEY, "TIDEMILL_CRASH_AT": point}
    settings = {"providers": json.dumps([table]), "provider_refresh_s": 0, "log_level": "warning"}
    with Server(env=env, validation=validation, **settings) as server:
        client, batch = _killed_and_ended(server, _input(6, "echo"))
        assert batch.status == "completed"
        assert (batch.model_extra or {})["tidemill_execution"] == "local"
        assert batch.output_file_id is not None
        content = client.files.content(batch.output_file_id).read()
        ids = [json.loads(row)["custom_id"] for row in content.splitlines()]
        assert sorted(ids) == [str(no) for no in range(6)]
        assert world.calls("batches.create") == 1
