"""What a preflight says of a file that a provider would run, and that it only looks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from worlds.house import House, Open, line
from worlds.provider import ProviderWorld

from tidemill.prices import shown

pytestmark = pytest.mark.anyio

PRICES = """
currency = "EUR"
[models."up/big"]
input = 4
output = 8
batch = { input = 2, output = 6 }
[models."openai_compatible/gpt-4.1-mini"]
input = 3
output = 5
"""
"""Micro-units per token; the second has no batch rate."""


@pytest.fixture
def priced(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "prices.toml"
    path.write_text(PRICES, encoding="utf-8")
    return {"prices": str(path)}


async def _ask(house: House, *lines: bytes, **headers: str) -> dict[str, Any]:
    found: Any = await house.client.post(
        "/batches/preflight",
        cast_to=object,
        body={"purpose": "batch"},
        files={"file": ("in.jsonl", b"".join(lines))},
        options={
            "headers": {
                "content-type": "multipart/form-data",
                **{name.replace("_", "-"): value for name, value in headers.items()},
            }
        },
    )
    return dict(found)


async def test_a_forwarded_file_is_told_at_both_rates(
    server: Open, world: ProviderWorld, priced: dict[str, Any]
) -> None:
    """Where and why, estimates that are called so, the batch rate, and what it would cost
    without; the provider takes nothing, and nobody knows when it would be done."""
    async with server(**priced) as house:
        await house.upload(line("probe"))
        before = (len(world.state()["files"]), len(world.state()["batches"]))
        found = await _ask(house, line("a", max_tokens=10), line("b", max_tokens=10))
        assert found["ok"] is True
        assert found["placement"]["execution"] == "provider"
        assert found["placement"]["provider"] == "up"
        assert found["placement"]["reason"]
        [model] = found["models"]
        assert model["input_tokens_are"] == "estimated"
        tokens = model["input_tokens"]
        # At most one micro-unit a line for rounding.
        assert found["cost"] == {
            "currency": "EUR",
            "estimate": shown(2 * tokens + 6 * 20 + 2),
            "batch": shown(2 * tokens + 6 * 20 + 2),
            "standard": shown(4 * tokens + 8 * 20 + 2),
        }
        assert found["expected_finish_at"] is None
        assert (len(world.state()["files"]), len(world.state()["batches"])) == before
        assert len((await house.client.files.list()).data) == 1


async def test_without_a_batch_rate_both_are_the_standard_one(
    server: Open, world: ProviderWorld, priced: dict[str, Any]
) -> None:
    """Over- rather than undercharged."""
    async with server(**priced) as house:
        found = await _ask(house, line("a", model="gpt-4.1-mini", max_tokens=10))
        assert found["placement"]["provider"] == "up"
        assert found["cost"]["batch"] == found["cost"]["standard"] == found["cost"]["estimate"]
        here = await _ask(
            house,
            line("a", model="gpt-4.1-mini", max_tokens=10),
            X_Tidemill_Execution="local",
        )
        assert here["placement"]["execution"] == "local"
        assert here["cost"]["estimate"] == found["cost"]["standard"]
