"""The stand-in for providers is itself held to what the official SDK expects of a provider."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import pytest
from worlds.provider import API_KEY, IDENTITY_SECRET, ProviderWorld


def _line(custom_id: str, text: str = "hi", model: str = "gpt-4.1") -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line).encode() + b"\n"


def test_a_batch_lives_through_its_states(world: ProviderWorld) -> None:
    """Each retrieve takes one step; the results echo the prompts."""
    with openai.OpenAI(base_url=world.url + "/v1", api_key=API_KEY, max_retries=0) as client:
        content = _line("a") + _line("b", "!refuse")
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        seen = [batch.status]
        while batch.status != "completed":
            batch = client.batches.retrieve(batch.id)
            seen.append(batch.status)
        assert seen == ["validating", "in_progress", "finalizing", "completed"]
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        row = json.loads(client.files.content(batch.output_file_id).content)
        assert row["response"]["body"]["choices"][0]["message"]["content"] == "echo: hi"
        bad = json.loads(client.files.content(batch.error_file_id).content)
        assert bad["response"]["status_code"] == 400
    assert world.calls("batches.create") == 1


def test_azure_surfaces_take_their_own_credentials(world: ProviderWorld) -> None:
    """Dated routes need an api-version that serves batches, and an api-key or an Entra token."""
    key = {"api-key": API_KEY}
    assert httpx.get(f"{world.url}/openai/v1/batches", headers=key).status_code == 200
    dated = f"{world.url}/openai/batches?api-version="
    assert httpx.get(dated + "2024-10-21", headers=key).status_code == 200
    assert httpx.get(dated + "2024-02-01", headers=key).status_code == 404
    assert httpx.get(dated + "2024-10-21").status_code == 401
    token = httpx.get(
        f"{world.url}/msi/token?api-version=2019-08-01&resource=r",
        headers={"x-identity-header": IDENTITY_SECRET},
    ).json()["access_token"]
    bearer = {"authorization": f"Bearer {token}"}
    assert httpx.get(dated + "2024-10-21", headers=bearer).status_code == 200
    world.revoke_tokens()
    assert httpx.get(dated + "2024-10-21", headers=bearer).status_code == 401


def test_faults_happen_as_told_and_are_counted(world: ProviderWorld) -> None:
    """A status, a cut connection and a lost answer each happen as often as they were asked for."""
    headers = {"authorization": f"Bearer {API_KEY}"}
    url = f"{world.url}/v1/batches"
    world.fail("batches.list", status=429, headers={"retry-after": "7"})
    refused = httpx.get(url, headers=headers)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
    world.fail("batches.list", kind="cut", after=10)
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(url, headers=headers)
    world.fail("batches.list", kind="drop")
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(url, headers=headers)
    assert httpx.get(url, headers=headers).status_code == 200
    assert world.calls("batches.list") == 4


_PARENT = """
import signal, sys
from tests.worlds.provider import ProviderWorld
with ProviderWorld() as world:
    print(world.url.rpartition(":")[2], flush=True)
    signal.pause()
"""


def test_the_stand_in_ends_with_whoever_started_it() -> None:
    """However that ends: a run of the tests that is killed leaves no server behind."""
    root = Path(__file__).resolve().parents[3]
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, cwd=root)
    try:
        assert parent.stdout is not None
        with socket.create_connection(("127.0.0.1", int(parent.stdout.readline()))) as there:
            there.settimeout(60)
            parent.kill()
            with suppress(ConnectionResetError):  # it had not looked at the connection yet
                assert there.recv(1) == b""
        parent.stdout.close()
    finally:
        parent.kill()
        parent.wait(60)
