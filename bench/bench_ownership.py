"""Whether time tells a foreign id from one that never existed: the ratio of their 404s."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import httpx
import pytest

from tests.worlds.requests import chat, jsonl
from tests.worlds.server import Server

ASKED = 1500
OWNER, STRANGER = "a-key-of-the-owner", "a-key-of-a-stranger"


@pytest.mark.parametrize("kind", ["files", "batches"])
def bench_foreign_against_unknown(benchmark: Any, report: Any, kind: str) -> None:
    """Both in random order on one connection, so that what the machine does else hits both."""
    with (
        Server(api_keys=f"{OWNER},{STRANGER}") as server,
        httpx.Client(base_url=f"{server.base_url}/v1") as client,
    ):
        mine = {"Authorization": f"Bearer {OWNER}"}
        file = client.post(
            "/files",
            headers=mine,
            data={"purpose": "batch"},
            files={"file": ("in.jsonl", jsonl([chat("a", "x")]))},
        ).json()["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/chat/completions"}
        batch = client.post("/batches", headers=mine, json=asked).json()["id"]
        foreign = {"files": file, "batches": batch}[kind]
        unknown = foreign[:-4] + ("aaaa" if foreign[-4:] != "aaaa" else "bbbb")
        took: dict[str, list[float]] = {foreign: [], unknown: []}
        client.headers["Authorization"] = f"Bearer {STRANGER}"

        def ask() -> None:
            order = [foreign, unknown] * ASKED
            random.Random(7).shuffle(order)
            for id in order:
                began = time.perf_counter()
                status = client.get(f"/{kind}/{id}").status_code
                took[id].append(time.perf_counter() - began)
                assert status == 404

        benchmark.pedantic(ask, rounds=1, iterations=1, warmup_rounds=1)
    medians = {id: statistics.median(times) for id, times in took.items()}
    report(
        f"404 of {kind}",
        **{
            "foreign µs": medians[foreign] * 1e6,
            "unknown µs": medians[unknown] * 1e6,
            "foreign in % of unknown": 100 * medians[foreign] / medians[unknown],
        },
    )
