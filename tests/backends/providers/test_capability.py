"""Whether a provider serves a Batch API is asked at the real route and believed for a while."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import openai
import pytest
from worlds.house import Open, line
from worlds.provider import API_KEY, ProviderWorld

from tidemill.backends.capability import Capability
from tidemill.backends.dialects import dialect_of
from tidemill.providers import parse
from tidemill.storage import open_store

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("fault", "state"),
    [
        ({}, "yes"),
        ({"status": 404}, "no"),
        ({"status": 405}, "no"),
        ({"status": 501}, "no"),
        ({"status": 200, "body": {"hello": "world"}}, "no"),
        ({"status": 401}, "unknown"),
        ({"status": 403}, "unknown"),
        ({"status": 429}, "unknown"),
        ({"status": 500}, "unknown"),
        ({"kind": "drop"}, "unknown"),
        ({"kind": "hang"}, "unknown"),
        ({"kind": "cut", "after": 3}, "unknown"),
    ],
)
async def test_answers_and_what_is_no_answer(
    server: Open, world: ProviderWorld, fault: dict[str, Any], state: str
) -> None:
    """Only 2xx with a list is yes, only "there is no such route" is no."""
    if fault:
        world.fail("batches.list", times=-1, **fault)
    patience = {"timeout_s": 0.4} if fault.get("kind") == "hang" else {}
    async with server(patience) as house:
        verdict = await house.server.providers.capability.ask("up")
        assert verdict.state == state
        assert verdict.reason
        assert (verdict.until_at - verdict.checked_at > 3600) is (state != "unknown")


async def test_a_provider_without_a_batch_api_is_passed_over(
    server: Open, world: ProviderWorld
) -> None:
    """In auto the batch runs here, and says why; demanded, it is 501."""
    world.set(batch_api=False)
    async with server() as house:
        file = await house.upload(line("a", model="echo"))
        placed = file.model_extra["tidemill_placement"]
        assert (placed["execution"], placed["reason"]) == ("local", "up serves no batch API")
        with pytest.raises(openai.APIStatusError) as refused:
            await house.upload(line("a", model="echo"), X_Logos_Batch_Execution="provider")
        assert (refused.value.status_code, refused.value.code) == (501, "batch_api_not_supported")
        with pytest.raises(openai.APIStatusError) as refused:
            await house.upload(line("a", model="nobody"))
        assert refused.value.status_code == 400


async def test_one_probe_for_all_and_none_later(server: Open, world: ProviderWorld) -> None:
    """Twenty uploads on a cold server share one probe; a restart asks nobody again."""
    async with server() as house:
        async with anyio.create_task_group() as tasks:
            for n in range(20):
                tasks.start_soon(house.upload, line(str(n)))
        assert world.calls("batches.list") == 1
    async with server() as house:
        await house.upload(line("a"))
        assert world.calls("batches.list") == 1


class _Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


async def test_doubt_grows_and_the_last_yes_is_kept(world: ProviderWorld, tmp_path: Any) -> None:
    """A minute, then two, up to an hour; meanwhile batches still go there."""
    table = {
        "name": "up",
        "kind": "openai",
        "base_url": world.url + "/v1",
        "api_key_env": "K",
        "models": ["gpt-4.1"],
    }
    dialect = dialect_of(parse([table])[0], {"K": API_KEY})
    store, clock = open_store(tmp_path), _Clock()
    await store.start()
    capability = Capability([dialect], store.facts, ttl_hours=24, now=clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(capability.run)
        first = await capability.ask("up")
        assert (first.state, first.until_at - first.checked_at) == ("yes", 86_400)
        world.fail("batches.list", times=-1, status=503)
        lives = []
        for _ in range(8):
            verdict = await capability.ask("up")
            assert verdict.state == "yes"
            assert "503" in verdict.reason
            lives.append(verdict.until_at - verdict.checked_at)
        assert lives == [60, 120, 240, 480, 960, 1920, 3600, 3600]
        world.mend()
        clock.now += 3600
        verdict = await capability.verdict("up")
        assert verdict.failures == 0
        tasks.cancel_scope.cancel()
    await dialect.close()
    await store.close()


async def test_no_upload_waits_for_a_slow_probe(world: ProviderWorld, tmp_path: Any) -> None:
    """After a few seconds the answer is "not known yet"."""
    world.fail("batches.list", times=-1, kind="hang")
    table = {"name": "up", "kind": "tidemill", "base_url": world.url + "/v1"}
    dialect, store = dialect_of(parse([table])[0], {}), open_store(tmp_path)
    await store.start()
    capability = Capability([dialect], store.facts, ttl_hours=24, patience_s=0.2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(capability.run)
        verdict = await capability.verdict("up")
        assert (verdict.state, verdict.reason) == (
            "unknown",
            "the provider has not answered its probe yet",
        )
        tasks.cancel_scope.cancel()
    await dialect.close()
    await store.close()


async def test_providers_are_asked_side_by_side(server: Open, world: ProviderWorld) -> None:
    """One that hangs keeps nobody from hearing the other; an upload waits five seconds for all of
    them, and goes to the one that answered."""
    world.fail("batches.list", kind="hang")
    async with server({"name": "one"}, {"name": "two"}) as house:
        capability = house.server.providers.capability
        assert capability.patience_s == 5.0
        with anyio.fail_after(30):
            while True:
                if known := capability.known():
                    break
                await anyio.sleep(0.01)
        [(name, verdict)] = known.items()
        assert verdict.state == "yes"
        capability.patience_s = 0.1
        file = await house.upload(line("a"))
        assert file.model_extra["tidemill_placement"]["provider"] == name
    assert world.calls("batches.list") == 2


async def test_a_verdict_is_renewed_before_it_runs_out(server: Open, world: ProviderWorld) -> None:
    """In the background: an upload never meets an old one."""
    async with server(batch_capability_ttl_hours=2 / 3600) as house:
        await house.upload(line("a"))
        with anyio.fail_after(60):
            while True:
                if world.calls("batches.list") >= 3:
                    break
                await anyio.sleep(0.05)
        known = house.server.providers.capability.known()["up"]
        assert known.until_at > known.checked_at


async def test_a_host_that_now_points_to_a_metadata_service_is_not_called(
    server: Open, world: ProviderWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name was harmless when the settings were read; no credential goes where it leads."""

    async def lead_astray(*_: Any, **__: Any) -> list[Any]:
        return [(2, 1, 6, "", ("169.254.169.254", 443))]

    async with server() as house:
        world.zero()
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lead_astray)
        verdict = await house.server.providers.capability.ask("up")
        assert "link-local" in verdict.reason
        with pytest.raises(openai.InternalServerError, match="link-local"):
            await house.client.chat.completions.create(
                model="big", messages=[{"role": "user", "content": "hi"}]
            )
    assert world.calls() == 0
