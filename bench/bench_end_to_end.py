"""From create to completed over HTTP: the echo engine (our own overhead) and the demo model."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openai import OpenAI

from bench.conftest import request_line
from tests.worlds.server import Server

_ENDED = ("completed", "failed", "expired", "cancelled")


def _run(client: OpenAI, path: Path) -> Any:
    """Upload, create, poll, return the batch."""
    with path.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.status not in _ENDED:
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed"
    return batch


def bench_echo(
    benchmark: Any,
    echo_server: Server,
    input_file: Callable[[int, int], Path],
    report: Callable[..., None],
) -> None:
    """20,000 lines, upload and polling included. Aim: 5,000 lines/s on two cores."""
    path = input_file(20_000, 250)
    client = OpenAI(base_url=f"{echo_server.base_url}/v1", api_key="-", timeout=600)
    benchmark.pedantic(lambda: _run(client, path), rounds=3, iterations=1, warmup_rounds=1)
    report("echo, end to end", **{"lines/s": 20_000 / benchmark.stats.stats.min})


def bench_demo_model(benchmark: Any, report: Callable[..., None], tmp_path: Path) -> None:
    """64 short questions to the embedded model, 64 tokens each at most."""
    path = tmp_path / "in.jsonl"
    questions = [f"Write two sentences about the number {no}." for no in range(64)]
    with Server(engine="llama") as server:
        client = OpenAI(base_url=f"{server.base_url}/v1", api_key="-", timeout=600)
        model = client.models.list().data[0].id
        path.write_bytes(
            b"".join(
                request_line(no, model, text, max_tokens=64) for no, text in enumerate(questions)
            )
        )
        batches = []
        benchmark.pedantic(
            lambda: batches.append(_run(client, path)), rounds=2, iterations=1, warmup_rounds=0
        )
    tokens = batches[-1].usage.output_tokens
    report("demo model", **{"generated tokens/s": tokens / benchmark.stats.stats.min})
