"""What a provider's work costs: at its batch rate where it batched, at its standard rate line by
line, and each token once."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import openai
import pytest
from worlds.house import CHAT, Open, line
from worlds.provider import ProviderWorld

from tidemill.types import KeyRecord, Limits

pytestmark = pytest.mark.anyio

PRICES = """
[models."up/big"]
input = 4
output = 8
batch = { input = 2, output = 6 }
[models."openai_compatible/gpt-4.1-mini"]
input = 3
output = 5
"""
"""Micro-units per token."""


@pytest.fixture
def priced(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "prices.toml"
    path.write_text(PRICES, encoding="utf-8")
    return {"prices": str(path)}


async def test_a_forwarded_batch_costs_its_batch_rate_once(
    server: Open, world: ProviderWorld, priced: dict[str, Any]
) -> None:
    """Ten polls of the finished batch add nothing; the estimate was enough and is free again."""
    async with server(**priced) as house:
        file = await house.upload(line("a", "one", max_tokens=9), line("b", "two", max_tokens=9))
        batch = await house.create(file.id, extra_body={"hold": "estimate"})
        held = float(batch.model_extra["tidemill_cost"]["held"])
        ended = await house.until(batch.id)
        for _ in range(10):
            await house.client.batches.retrieve(batch.id)
        assert ended.usage is not None
        rows = await house.server.store.ledger.usage(None, 0, 2**40)
        assert [(row.execution, row.tier) for row in rows] == [("up", "batch")] * 2
        cost = sum(row.cost for row in rows)
        assert cost == 2 * ended.usage.input_tokens + 6 * ended.usage.output_tokens > 0
        money = ended.model_extra["tidemill_cost"]
        assert round(float(money["amount"]) * 10**6) == cost <= round(held * 10**6)
        assert money["held"] == "0.00"


async def test_an_ordinary_route_costs_the_standard_rate(
    server: Open, world: ProviderWorld, priced: dict[str, Any]
) -> None:
    """Interactive, and for lines that the provider does not batch."""
    models = {"gpt-4.1-mini": {"standard": "gpt-4.1-mini"}}
    async with server({"models": models}, **priced) as house:
        answer = await house.client.chat.completions.create(
            model="gpt-4.1-mini", messages=[{"role": "user", "content": "hi"}]
        )
        ended = await house.until((await house.start(line("a", model="gpt-4.1-mini"))).id)
        assert ended.model_extra["tidemill_execution"] == "local"
        rows = await house.server.store.ledger.usage(None, 0, 2**40)
        assert answer.usage is not None
        assert [(row.execution, row.tier) for row in rows] == [("up", "standard")] * 2
        for row in rows:
            assert row.cost == 3 * row.usage.input + 5 * row.usage.output > 0


async def test_a_cap_that_a_provider_would_cross_is_said_at_create(
    server: Open, world: ProviderWorld, priced: dict[str, Any]
) -> None:
    """A provider runs a batch as a whole: nothing can stop it in between, so it is not sent."""
    async with server(**priced) as house:
        file = await house.upload(line("a", "one", max_tokens=100))
        with pytest.raises(openai.APIStatusError, match="cannot stop a batch in between") as caught:
            await house.create(file.id, extra_body={"max_cost": "0.0001"})
        assert caught.value.status_code == 402
        assert world.state()["batches"] == {}
        assert (await house.client.batches.list()).data == []


async def test_who_is_over_budget_is_forwarded_nothing(
    server: Open, world: ProviderWorld, priced: dict[str, Any]
) -> None:
    """402 at create, and the provider is not asked."""
    async with server(**priced) as house:
        await house.server.store.keys.add(
            KeyRecord(
                id="key_1",
                name="k",
                owner="key_1",
                prefix="",
                digest=hashlib.sha256(b"a-poor-key").hexdigest(),
                created_at=1,
                limits=Limits(monthly_budget=1),
            )
        )
        house.client = house.client.with_options(api_key="a-poor-key")
        file = await house.upload(line("a"))
        await house.until((await house.create(file.id)).id)
        again = await house.upload(line("b"))
        before = len(world.state()["batches"])
        with pytest.raises(openai.APIStatusError, match="monthly budget") as caught:
            await house.create(again.id, url=CHAT)
        assert caught.value.status_code == 402
        assert len(world.state()["batches"]) == before == 1
