"""A line that kills the engine, in a batch of others: from the file to the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.backends.llama.poisoned import DEADLY
from tidemill.app import running
from tidemill.backends.llama import supervisor
from tidemill.handlers import create_app
from tidemill.settings import Settings

pytestmark = [pytest.mark.llama, pytest.mark.anyio]

LINES = 8
DEADLY_LINE = 3


def line(no: int) -> bytes:
    """A completion of some tokens."""
    prompt = [5, DEADLY] if no == DEADLY_LINE else [1_000 + no, 1_001]
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 6}
    asked = {"custom_id": f"c{no}", "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(asked).encode() + b"\n"


async def test_it_fails_by_name_and_the_rest_of_its_batch_is_answered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Three engines die of it; then it is a row of the error file, and the batch is complete."""
    monkeypatch.setattr(supervisor, "CHILD", (str(Path(__file__).with_name("poisoned.py")),))
    settings = Settings(
        storage_path=str(tmp_path), model_name="smollm2", slots=4, max_context_length=256,
        threads=1, weights="as-is", max_line_attempts=1,
    )  # fmt: skip
    async with running(settings) as server:
        transport = httpx.ASGITransport(create_app(server.services))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            batch = await _finished(client, b"".join(map(line, range(LINES))))
            counts = batch["request_counts"]
            assert (counts["completed"], counts["failed"]) == (LINES - 1, 1)
            answered = await _rows(client, batch["output_file_id"])
            failed = await _rows(client, batch["error_file_id"])
    assert {row["custom_id"] for row in answered} == {
        f"c{no}" for no in range(LINES) if no != DEADLY_LINE
    }
    assert all(row["response"]["body"]["choices"][0]["text"] for row in answered)
    (row,) = failed
    assert row["custom_id"] == f"c{DEADLY_LINE}"
    assert row["response"]["status_code"] == 500
    assert row["response"]["body"]["error"]["code"] == "engine_crash"


async def _finished(client: httpx.AsyncClient, data: bytes) -> dict[str, Any]:
    """Upload, create, and wait at the bell of the rows."""
    file = await client.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)}
    )
    created = await client.post(
        "/v1/batches",
        json={
            "input_file_id": file.json()["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        },
    )
    url, after = f"/v1/batches/{created.json()['id']}", 0
    while True:
        seen = await client.get(f"{url}/results", params={"after": after, "wait": 20})
        after = int(seen.headers["x-tidemill-next"])
        if seen.headers["x-tidemill-status"] == "completed":
            batch: dict[str, Any] = (await client.get(url)).json()
            return batch


async def _rows(client: httpx.AsyncClient, file_id: str) -> list[dict[str, Any]]:
    content = await client.get(f"/v1/files/{file_id}/content")
    return [json.loads(row) for row in content.text.splitlines()]
