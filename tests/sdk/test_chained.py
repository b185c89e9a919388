"""Tidemill in front of Tidemill: two processes, one batch, settled in both."""

from __future__ import annotations

import json
import time

import pytest
from openai import OpenAI

from tests.worlds.server import Server


def _line(custom_id: str) -> bytes:
    body = {"model": "ours", "messages": [{"role": "user", "content": f"I am {custom_id}"}]}
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line).encode() + b"\n"


@pytest.mark.parametrize("key", ["back-key", ""])
def test_a_batch_runs_through_two_servers(key: str) -> None:
    """The front forwards, the back runs; ids and model names are each server's own. Also where the
    back asks for no key."""
    with Server(api_keys=key) as back:
        table = {
            "name": "back",
            "kind": "tidemill",
            "base_url": f"{back.base_url}/v1",
            "api_key_env": "BACK_KEY" if key else "",
            "models": {"ours": "echo"},
        }
        providers = json.dumps([table])
        with (
            Server(env={"BACK_KEY": key}, providers=providers, provider_refresh_s=0) as front,
            OpenAI(base_url=f"{front.base_url}/v1", api_key="-") as client,
            OpenAI(base_url=f"{back.base_url}/v1", api_key=key or "-") as behind,
        ):
            content = b"".join(_line(f"line-{no}") for no in range(50))
            file = client.files.create(file=("in.jsonl", content), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
                metadata={"who": "me"},
            )
            for _ in range(5000):
                batch = client.batches.retrieve(batch.id)
                if batch.status == "completed":
                    break
                time.sleep(0.02)
            assert batch.status == "completed"
            assert (batch.model_extra or {})["tidemill_execution"] == "provider"
            assert batch.output_file_id is not None
            rows = [
                json.loads(row)
                for row in client.files.content(batch.output_file_id).read().splitlines()
            ]
            assert len({row["custom_id"] for row in rows}) == 50
            assert {row["response"]["body"]["model"] for row in rows} == {"ours"}
            (there,) = behind.batches.list().data
            assert there.id != batch.id
            assert (there.model_extra or {})["tidemill_execution"] == "local"
            assert there.metadata == {"who": "me", "tidemill_batch": batch.id}
            assert there.usage is not None
            assert batch.usage is not None
            assert batch.usage.total_tokens == there.usage.total_tokens > 0
            answer = client.chat.completions.create(
                model="ours", messages=[{"role": "user", "content": "hello"}]
            )
            assert answer.model == "ours"
