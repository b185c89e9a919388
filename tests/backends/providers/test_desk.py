"""What is known of providers can be seen and forgotten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
from click.testing import CliRunner
from worlds.house import Open, line
from worlds.provider import ProviderWorld

from tidemill.cli import cli

pytestmark = pytest.mark.anyio


async def test_verdict_age_and_refusals_are_shown(server: Open, world: ProviderWorld) -> None:
    """To whoever has a key; the base URL and credentials are not part of it."""
    world.set(models={"dep-41": {"batch": False}})
    async with server() as house:
        await house.until((await house.start(line("a", model="echo"))).id)
        answer: Any = await house.client.get("/providers", cast_to=object)
        (shown,) = answer["data"]
        assert (shown["id"], shown["kind"], shown["batch_api"]) == (
            "up",
            "openai_compatible",
            "yes",
        )
        assert shown["reason"] == "GET batches answered with a list"
        assert 0 <= shown["age_s"] < 60
        (refused,) = shown["not_batched"]
        assert refused["model"] == "echo"
        assert "127.0.0.1" not in json.dumps(shown)
        assert "sk-up" not in json.dumps(shown)


async def test_a_list_shows_what_the_provider_last_said(server: Open, world: ProviderWorld) -> None:
    """A page of batches has their progress, and asks no provider for it."""
    world.set(hold="finalizing")
    async with server(provider_refresh_s=60.0, batch_reconcile_interval_s=0.01) as house:
        batch = await house.start(*(line(str(n)) for n in range(4)))
        with anyio.fail_after(60):
            while True:
                (listed,) = (await house.client.batches.list()).data
                if listed.status == "finalizing":
                    break
                await anyio.sleep(0.02)
        assert listed.id == batch.id
        assert listed.request_counts is not None
        assert listed.request_counts.completed == 2


async def test_forgetting_works_beside_a_running_server(
    server: Open, world: ProviderWorld, tmp_path: Path
) -> None:
    """The command changes the store; the next upload goes there again."""
    world.set(models={"dep-41": {"batch": False}})
    async with server() as house:
        await house.until((await house.start(line("a", model="echo"))).id)
        arguments = ["providers", "forget", "up", "--storage-path", str(tmp_path / "store")]
        result = await anyio.to_thread.run_sync(
            lambda: CliRunner().invoke(cli, arguments, catch_exceptions=False)
        )
        assert result.exit_code == 0
        assert "Forgot 1 refusal of up." in result.stderr
        file = await house.upload(line("a", model="echo"))
        assert file.model_extra["tidemill_execution"] == "provider"
        [entry] = [e for e in await house.server.store.audit.page() if "forgotten" in e.action]
        assert (entry.actor, entry.object) == ("cli", "up/echo")


async def test_an_administrator_forgets_over_http(server: Open, world: ProviderWorld) -> None:
    """One model or all; what was forgotten is in the trail, once, and nothing else is."""
    world.set(models={"dep-41": {"batch": False}})
    async with server(api_keys="a-key", admin_key="the-admin") as house:
        house.client = house.client.with_options(api_key="a-key")
        await house.until((await house.start(line("a", model="echo"))).id)
        admin = house.client.with_options(api_key="the-admin")

        async def forget(provider: str, **query: str) -> Any:
            path = f"/providers/{provider}/refusals"
            answer: Any = await admin.delete(path, cast_to=object, options={"params": query})
            return answer["forgotten"]

        with pytest.raises(openai.NotFoundError):
            await forget("nobody")
        assert [await forget("up", model=m) for m in ("other", "echo", "echo")] == [0, 1, 0]
        file = await house.upload(line("a", model="echo"))
        assert file.model_extra["tidemill_execution"] == "provider"
        assert await forget("up") == 0
        told = [e for e in await house.server.store.audit.page() if "forgotten" in e.action]
        assert [(e.actor, e.action, e.object) for e in told] == [
            ("env-admin", "eligibility.forgotten", "up/echo")
        ]
        assert told[0].request_id
