"""A real server on a real model, seen by the official SDK: who has a slot, who gets it back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.sdk.test_openai_sdk import create, ended
from tests.worlds.requests import chat, jsonl, rows, said
from tests.worlds.server import Server

pytestmark = pytest.mark.llama

MODEL, SLOTS = "smollm2", 4
ENDLESS = {"0": -100, "2": -100}
"""The two tokens that would end an answer."""


@pytest.fixture(scope="module")
def live() -> Iterator[Server]:
    """Four slots of 2,048 tokens on one thread; any of them may go to lines."""
    with Server(
        "llama", slots=SLOTS, max_context_length=2_048, threads=1, interactive_headroom=0
    ) as server:
        yield server


@pytest.fixture
def client(live: Server) -> Iterator[OpenAI]:
    """The SDK, which repeats nothing by itself."""
    with OpenAI(base_url=f"{live.base_url}/v1", api_key="any", max_retries=0) as client:
        yield client


def replica(live: Server) -> dict[str, Any]:
    """The engine, as ``/v1/pool/status`` has it."""
    status = httpx.get(f"{live.base_url}/v1/pool/status").json()
    found: dict[str, Any] = status["replicas"][MODEL]
    return found


def until(live: Server, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Look until the engine is as asked."""
    deadline = time.monotonic() + 120
    while not true(now := replica(live)):
        assert time.monotonic() < deadline, now
        time.sleep(0.05)
    return now


def metric(live: Server, name: str) -> float:
    """One series of ``/metrics``."""
    text = httpx.get(f"{live.base_url}/metrics").text
    (value,) = (row.split()[-1] for row in text.splitlines() if row.rpartition(" ")[0] == name)
    return float(value)


def talk(client: OpenAI, about: str) -> Any:
    """An answer that streams as long as somebody listens; its first piece has come."""
    stream = client.completions.create(
        model=MODEL, prompt=f"A long story about {about}:", max_tokens=1_900, stream=True,
        logit_bias=ENDLESS,
    )  # fmt: skip
    next(iter(stream))
    return stream


def test_equal_lines_are_computed_once(live: Server, client: OpenAI) -> None:
    """Twelve lines that ask three things: three are computed, nine say the same and that their
    prompt was there; the batch adds it up."""
    lines = [
        chat(str(n), f"Name {n % 3 + 2} colours.", model=MODEL, max_tokens=8) for n in range(12)
    ]
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    batch = ended(client, create(client, file), within_s=120)
    assert batch.output_file_id is not None
    found = rows(client.files.content(batch.output_file_id).content)
    assert len(found) == 12
    for n in range(3):
        assert len({said(found[str(m)]) for m in range(n, 12, 3)}) == 1
    assert metric(live, "tidemill_lines_shared_total") == 9
    usages = [row["response"]["body"]["usage"] for row in found.values()]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert sum(usage["prompt_tokens"] == c for usage, c in zip(usages, cached, strict=True)) == 9
    assert batch.model_extra is not None
    assert batch.model_extra["prefill_tokens_saved"] == sum(cached)


def test_a_client_that_hangs_up_frees_its_slot(live: Server, client: OpenAI) -> None:
    """Four streams fill the engine; all are left after a piece, and the slots are free long before
    the answers would have ended."""
    before = replica(live)["tokens_generated"]
    for stream in [talk(client, f"mill {n}") for n in range(SLOTS)]:
        stream.close()
    now = until(live, lambda now: now["active"] == 0)
    assert (now["waiting"], now["parked"]) == (0, 0)
    assert now["tokens_generated"] - before < SLOTS * 1_900


def test_lines_that_made_way_are_seen_and_survive_the_engine(live: Server, client: OpenAI) -> None:
    """People take every slot of a batch: its lines are parked, which status and metrics show. Then
    the engine process aborts: the people are told, the lines are answered by the next one."""
    asked = {"model": MODEL, "max_tokens": 100, "logit_bias": ENDLESS}
    lines = [chat(str(n), f"Tell me about the number {n}.", **asked) for n in range(6)]
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    batch = create(client, file)
    until(live, lambda now: now["active"] == SLOTS)
    restarts = replica(live)["restarts"]
    with ExitStack() as open_ones:
        streams = [talk(client, f"sea {n}") for n in range(SLOTS)]
        for stream in streams:
            open_ones.callback(stream.close)
        now = until(live, lambda now: now["parked"] > 0)
        assert now["active"] == SLOTS
        assert metric(live, f'tidemill_replica_sequences{{model="{MODEL}",state="parked"}}') > 0
        assert metric(live, f'tidemill_replica_sequences{{model="{MODEL}",state="held"}}') >= 0
        for pid in children(live.pid):
            os.kill(pid, signal.SIGABRT)
        with pytest.raises(openai.APIError):
            for _ in streams[0]:
                pass
    batch = ended(client, batch, within_s=180)
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (6, 0)
    now = until(live, lambda now: now["active"] == 0)
    assert (now["healthy"], now["restarts"], now["parked"]) == (True, restarts + 1, 0)


def children(pid: int) -> list[int]:
    """Child processes of the server that run the engine."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return [c for c in found if b"llama.child" in Path(f"/proc/{c}/cmdline").read_bytes()]
