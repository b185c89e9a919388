"""Azure: both spellings of its routes, both kinds of credential, deployments under our names."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from worlds.house import CHAT, Open, line
from worlds.provider import IDENTITY_SECRET, ProviderWorld

pytestmark = pytest.mark.anyio

MODELS = {"gpt-4.1": {"batch": "dep-41-batch", "standard": "dep-41"}}


def _azure(world: ProviderWorld, **more: Any) -> dict[str, Any]:
    return {"kind": "azure", "base_url": world.url, "models": MODELS} | more


@pytest.mark.parametrize("version", ["", "2024-10-21"])
async def test_a_batch_runs_at_the_resource(
    server: Open, world: ProviderWorld, version: str
) -> None:
    """The deployment's name and the surface's url go there; only our name comes back."""
    world.set(quirks=["null_endpoint", "null_counts", "zero_error_file", "bare_errors"])
    async with server(_azure(world, api_version=version)) as house:
        lines = (line("a", model="gpt-4.1"), line("b", "!refuse", model="gpt-4.1"))
        ended = await house.until((await house.start(*lines)).id)
        assert ended.request_counts.model_dump() == {"total": 2, "completed": 1, "failed": 1}
        assert ended.endpoint == CHAT
        good, bad = await house.rows(ended.output_file_id), await house.rows(ended.error_file_id)
        assert good["a"]["response"]["body"]["model"] == "gpt-4.1"
        assert "refused by gpt-4.1." in bad["b"]["response"]["body"]["error"]["message"]
        assert "dep-41" not in json.dumps([good, bad, ended.model_dump()])
        (booked,) = await house.server.store.ledger.usage(None, 0, 2**40)
        assert booked.model == "gpt-4.1"
    state = world.state()
    (sent,) = (f for f in state["files"].values() if f["purpose"] == "batch")
    first = json.loads(sent["text"].splitlines()[0])
    assert first["body"]["model"] == "dep-41-batch"
    assert first["url"] == (CHAT.removeprefix("/v1") if version else CHAT)
    root = "/openai/" if version else "/openai/v1/"
    assert {entry["path"].startswith(root) for entry in state["log"]} == {True}
    assert not any("deployments" in entry["path"] for entry in state["log"])


async def test_azure_imposes_no_deadline_here(server: Open, world: ProviderWorld) -> None:
    """The window is a goal there: a batch that is late keeps running."""
    world.set(hold="in_progress")
    async with server(_azure(world)) as house:
        batch = await house.start(line("a", model="gpt-4.1"))
        await house.until(batch.id, "in_progress")
        stored = await house.server.store.batches.get(batch.id, None)
        assert stored is not None
        up = await house.server.store.upstream.batch(stored.seq)
        assert up is not None
        assert (await house.client.batches.retrieve(batch.id)).status == "in_progress"


@pytest.mark.parametrize("credential", ["managed_identity", "default"])
@pytest.mark.parametrize("version", ["", "2024-10-21"])
async def test_a_token_of_the_managed_identity_opens_it(
    server: Open,
    world: ProviderWorld,
    monkeypatch: pytest.MonkeyPatch,
    credential: str,
    version: str,
) -> None:
    """azure-identity itself asks the App Service endpoint; the key of the environment is not
    used."""
    monkeypatch.setenv("IDENTITY_ENDPOINT", world.url + "/msi/token")
    monkeypatch.setenv("IDENTITY_HEADER", IDENTITY_SECRET)
    table = _azure(world, credential=credential, api_version=version, api_key_env="")
    async with server(table) as house:
        ended = await house.until((await house.start(line("a", model="gpt-4.1"))).id)
        assert ended.status == "completed"
    state = world.state()
    sent = [e["headers"].get("authorization", "") for e in state["log"] if e["route"] != "msi"]
    assert all(header.startswith("Bearer entra.") for header in sent)
    assert state["calls"]["msi"] == state["tokens"] == 1


async def test_a_token_is_renewed_in_time(
    server: Open, world: ProviderWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with less than five minutes left is not used for another request."""
    monkeypatch.setenv("IDENTITY_ENDPOINT", world.url + "/msi/token")
    monkeypatch.setenv("IDENTITY_HEADER", IDENTITY_SECRET)
    world.set(token_lifetime_s=301)
    async with server(_azure(world, credential="managed_identity", api_key_env="")) as house:
        batch = await house.start(line("a", model="gpt-4.1"))
        with anyio.fail_after(60):
            while world.calls("msi") < 2:
                await anyio.sleep(0.2)
                await house.client.batches.retrieve(batch.id)
                if (await house.client.batches.retrieve(batch.id)).status == "completed":
                    batch = await house.start(line("a", model="gpt-4.1"))
        assert (await house.until(batch.id)).status == "completed"


async def test_without_an_identity_the_verdict_says_why(
    server: Open, world: ProviderWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch runs here, or is refused where it cannot."""
    monkeypatch.setenv("IDENTITY_ENDPOINT", world.url + "/msi/token")
    monkeypatch.setenv("IDENTITY_HEADER", "wrong")
    async with server(_azure(world, credential="managed_identity", api_key_env="")) as house:
        verdict = await house.server.providers.capability.ask("up")
        assert verdict.state == "unknown"
        assert "no Entra token" in verdict.reason


async def test_chat_goes_to_the_standard_deployment(server: Open, world: ProviderWorld) -> None:
    """Interactive requests are routed by model, under either spelling."""
    for version in ("", "2024-10-21"):
        async with server(_azure(world, api_version=version)) as house:
            answer = await house.client.chat.completions.create(
                model="gpt-4.1", messages=[{"role": "user", "content": "hello"}]
            )
            assert answer.model == "gpt-4.1"
            assert answer.choices[0].message.content == "echo: hello"
    paths = [e["path"] for e in world.state()["log"] if e["route"] == "chat.completions"]
    assert paths == [
        "/openai/v1/chat/completions",
        "/openai/deployments/dep-41/chat/completions",
    ]
