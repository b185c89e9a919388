"""Equal lines of a batch, seen by the official SDK: one answer, a row each, an honest bill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from openai import OpenAI

from tests.sdk.test_openai_sdk import create, ended, upload
from tests.worlds.house import line, open_house
from tests.worlds.requests import rows, said
from tests.worlds.server import Server
from tidemill.settings import Settings

PRICES = """
[models."local/echo"]
input = 4
cached_input = 1
output = 8
"""
"""Micro-units per token."""


@pytest.fixture(scope="module")
def priced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own: its counters start at nothing."""
    prices = tmp_path_factory.mktemp("prices") / "prices.toml"
    prices.write_text(PRICES, encoding="utf-8")
    with Server(prices=prices) as server:
        yield server


def counted(server: Server) -> float:
    """Lines that the server says it did not compute."""
    text = httpx.get(f"{server.base_url}/metrics").text
    (value,) = (
        row.split()[1] for row in text.splitlines() if row.startswith("tidemill_lines_shared_total")
    )
    return float(value)


def test_equal_lines_are_answered_once_and_billed_as_what_they_were(priced: Server) -> None:
    """Sixty lines that ask five things: each has its row and its ids, the prompts of 55 are cached
    in row, batch and bill, and the metric counts them."""
    asked = [f"what is {n % 5}" for n in range(60)]
    with OpenAI(base_url=f"{priced.base_url}/v1", api_key="any", max_retries=0) as client:
        batch = ended(client, create(client, upload(client, *asked)))
        assert batch.output_file_id is not None
        found = rows(client.files.content(batch.output_file_id).content)
    assert {n: said(row) for n, row in found.items()} == {str(n): a for n, a in enumerate(asked)}
    bodies = [row["response"]["body"] for row in found.values()]
    assert len({body["id"] for body in bodies}) == 60
    assert len({row["response"]["request_id"] for row in found.values()}) == 60
    usages = [body["usage"] for body in bodies]
    assert {(u["prompt_tokens"], u["completion_tokens"]) for u in usages} == {(3, 3)}
    cached = [u["prompt_tokens_details"]["cached_tokens"] for u in usages]
    assert sorted(cached) == [0] * 5 + [3] * 55
    assert batch.usage is not None
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == (180, 180)
    assert batch.usage.input_tokens_details.cached_tokens == 165
    assert batch.model_extra is not None
    assert batch.model_extra["prefill_tokens_saved"] == 165
    cost = 15 * 4 + 165 * 1 + 180 * 8
    assert batch.model_extra["tidemill_cost"]["amount"] == f"{cost / 10**6:.6f}"
    assert counted(priced) == 55


def test_whoever_wants_chance_gets_it(priced: Server) -> None:
    """With a temperature every line is computed, and nothing is cached."""
    before = counted(priced)
    lines = [line(str(n), "say", model="echo", temperature=1) for n in range(9)]
    with OpenAI(base_url=f"{priced.base_url}/v1", api_key="any", max_retries=0) as client:
        file = client.files.create(file=("in.jsonl", b"".join(lines)), purpose="batch")
        batch = ended(client, create(client, file))
    assert batch.usage is not None
    assert batch.usage.input_tokens_details.cached_tokens == 0
    assert counted(priced) == before


@pytest.mark.anyio
async def test_lines_that_wait_take_no_place_of_those_that_compute(tmp_path: Path) -> None:
    """More equal lines than the engine takes: those that wait for the first are no load, so that
    lines behind them are started before it ends."""
    settings = Settings(engine="echo", storage_path=str(tmp_path / "data"))
    async with open_house(settings) as house:
        engine: Any = house.server.replicas["echo"]
        usual = 2 * engine.status().slots
        lines = [line(str(n), "!wait tide hi", model="echo") for n in range(usual)]
        lines += [line(f"other{n}", f"!wait tide {n}", model="echo") for n in range(9)]
        batch = await house.start(*lines)
        with anyio.fail_after(60):
            while True:
                if engine.status().active == 10:
                    break
                await anyio.sleep(0.01)
        engine.engine.gate("tide").set()
        done = await house.until(batch.id, within_s=60)
        assert done.request_counts is not None
        assert done.request_counts.completed == usual + 9
