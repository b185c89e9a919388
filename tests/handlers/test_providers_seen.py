"""Which providers a key is shown."""

from __future__ import annotations

import json

import pytest

from tests.handlers.principals import key, seen_by
from tests.handlers.world import Open
from tidemill.types import Limits

pytestmark = pytest.mark.anyio

PROVIDERS = [
    {
        "name": name,
        "kind": "openai_compatible",
        "base_url": "http://127.0.0.1:9/v1",
        "models": {"one": {"batch": "one"}, "two": {"batch": "two"}},
    }
    for name in ("here", "there")
]


async def test_a_key_sees_what_it_may_use(open_world: Open) -> None:
    """Providers and models that its limits close are not named; without limits all are."""
    async with open_world(providers=json.dumps(PROVIDERS)) as world:
        for limits, seen in (
            (Limits(), {"here": ["one", "two"], "there": ["one", "two"]}),
            (Limits(models=("one",)), {"here": ["one"], "there": ["one"]}),
            (Limits(providers={"there": ("t*",)}), {"there": ["two"]}),
            (Limits(providers={"local": ("*",)}), {}),
        ):
            secret, _ = await key(world, limits=limits)
            async with seen_by(world, secret) as mine:
                rows = (await mine.client.get("/v1/providers")).json()["data"]
                assert {row["id"]: row["models"] for row in rows} == seen
