"""The provider path: an upload with model rewriting, and a thousand open forwarded batches."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import OpenAI

from tests.worlds.provider import API_KEY, ProviderWorld
from tests.worlds.server import Server

OPEN = 1000
INTERVAL_S = 5


@pytest.fixture
def world() -> Iterator[ProviderWorld]:
    with ProviderWorld() as world:
        yield world


def _forwarding(world: ProviderWorld, **settings: Any) -> Server:
    table = {
        "name": "up",
        "kind": "openai",
        "base_url": world.url + "/v1",
        "api_key_env": "UP_KEY",
        "models": {"echo": "gpt-4.1"},
    }
    return Server(
        env={"UP_KEY": API_KEY},
        providers=json.dumps([table]),
        max_batch_file_bytes=1 << 30,
        log_level="warning",
        **settings,
    )


def bench_forwarded_upload(
    benchmark: Any,
    world: ProviderWorld,
    input_file: Callable[[int, int], Path],
    report: Callable[..., None],
) -> None:
    """50,000 lines in, checked, kept, rewritten and sent on, with the probe already answered."""
    path = input_file(50_000, 1000)
    with _forwarding(world) as server:
        client = OpenAI(base_url=f"{server.base_url}/v1", api_key="-", timeout=600)
        small = input_file(10, 1000)
        file = client.files.create(file=small.open("rb"), purpose="batch")
        assert (file.model_extra or {})["tidemill_execution"] == "provider"
        process = psutil.Process(server.pid)
        before = process.memory_info().rss / 1e6

        def upload() -> None:
            with path.open("rb") as body:
                client.files.create(file=body, purpose="batch")

        benchmark.pedantic(upload, rounds=2, iterations=1)
        status = Path(f"/proc/{server.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        size = path.stat().st_size / 1e6
        report(
            f"forwarded upload of {size:.0f} MB",
            **{
                "MB/s": size / benchmark.stats.stats.min,
                "memory growth MB": int(line.split()[1]) / 1024 - before,
            },
        )


def bench_reconcile(benchmark: Any, world: ProviderWorld, report: Callable[..., None]) -> None:
    """How many calls keep a thousand open batches fresh, per batch and interval: about one."""
    world.set(hold="in_progress")
    with _forwarding(
        world, batch_reconcile_interval_s=INTERVAL_S, provider_refresh_s=INTERVAL_S
    ) as server:
        client = OpenAI(base_url=f"{server.base_url}/v1", api_key="-", timeout=600)
        body = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for _ in range(OPEN):
            file = client.files.create(
                file=("in.jsonl", json.dumps(line).encode()), purpose="batch"
            )
            client.batches.create(
                input_file_id=file.id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
            )

        def four_intervals() -> None:
            world.zero()
            time.sleep(4 * INTERVAL_S)

        benchmark.pedantic(four_intervals, rounds=1, iterations=1)
        calls = world.calls("batches.retrieve")
        report(
            f"{OPEN} open forwarded batches",
            **{
                "calls per batch and interval": calls / OPEN / 4,
                "most at once": float(world.state()["peak"]["batches.retrieve"]),
            },
        )
