"""Azure: both spellings of its routes, both kinds of credential, deployments under our names."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from worlds.entra import TENANT, Entra
from worlds.house import CHAT, Open, line
from worlds.provider import IDENTITY_SECRET, ProviderWorld

from tidemill.backends.dialects import dialect_of
from tidemill.errors import SettingsError
from tidemill.providers import parse

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


@pytest.fixture
def entra(world: ProviderWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Entra]:
    """Entra's token service, and an environment that names its tenant and nothing else."""
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_TENANT_ID", TENANT)
    service = Entra(world.url, tmp_path, monkeypatch)
    yield service
    service.close()


async def test_a_client_secret_opens_it(
    server: Open, world: ProviderWorld, entra: Entra, monkeypatch: pytest.MonkeyPatch
) -> None:
    """azure-identity takes it from the environment to Entra, once, for the provider's scope."""
    monkeypatch.setenv("AZURE_CLIENT_ID", "our-application")
    monkeypatch.setenv("AZURE_CLIENT_SECRET", "our-secret")
    async with server(_azure(world, credential="client_secret", api_key_env="")) as house:
        ended = await house.until((await house.start(line("a", model="gpt-4.1"))).id)
        assert ended.status == "completed"
    [asked] = entra.asked
    assert asked["path"] == f"/{TENANT}/oauth2/v2.0/token"
    assert asked["grant_type"] == "client_credentials"
    assert (asked["client_id"], asked["client_secret"]) == ("our-application", "our-secret")
    assert asked["scope"] == "https://cognitiveservices.azure.com/.default"


@pytest.mark.parametrize("client_id", ["", "another-application"])
async def test_a_workload_identity_opens_it(
    server: Open,
    world: ProviderWorld,
    entra: Entra,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    client_id: str,
) -> None:
    """The cluster's signed token goes to Entra; the settings may name another application."""
    (tmp_path / "signed").write_text("the-clusters-word", encoding="utf-8")
    monkeypatch.setenv("AZURE_CLIENT_ID", "our-application")
    monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", str(tmp_path / "signed"))
    table = _azure(world, credential="workload_identity", client_id=client_id, api_key_env="")
    async with server(table) as house:
        ended = await house.until((await house.start(line("a", model="gpt-4.1"))).id)
        assert ended.status == "completed"
    [asked] = entra.asked
    assert asked["client_id"] == (client_id or "our-application")
    assert asked["client_assertion"] == "the-clusters-word"
    assert asked["scope"] == "https://cognitiveservices.azure.com/.default"


async def test_what_entra_refuses_is_the_verdict_without_the_secret(
    server: Open, world: ProviderWorld, entra: Entra, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own words are passed on."""
    entra.refuse = True
    monkeypatch.setenv("AZURE_CLIENT_ID", "our-application")
    monkeypatch.setenv("AZURE_CLIENT_SECRET", "our-secret")
    async with server(_azure(world, credential="client_secret", api_key_env="")) as house:
        verdict = await house.server.providers.capability.ask("up")
        assert verdict.state == "unknown"
        assert "AADSTS7000215" in verdict.reason
        assert "our-secret" not in verdict.reason


async def test_an_environment_without_the_identity_is_said(
    server: Open, world: ProviderWorld, entra: Entra
) -> None:
    """At the start where that can be seen, else as the verdict; nobody is asked."""
    [provider] = parse([_azure(world, name="up", credential="workload_identity")])
    with pytest.raises(SettingsError, match=r"'up': .*'client_id', 'token_file_path'"):
        dialect_of(provider)
    async with server(_azure(world, credential="client_secret", api_key_env="")) as house:
        verdict = await house.server.providers.capability.ask("up")
        assert verdict.state == "unknown"
        assert "'up': no Entra token (EnvironmentCredential" in verdict.reason
    assert entra.asked == []


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


@pytest.mark.parametrize("version", ["", "2024-10-21"])
async def test_interactive_requests_go_to_the_standard_deployment(
    server: Open, world: ProviderWorld, version: str
) -> None:
    """Routed by model, on every route, streamed or not, under either spelling."""
    async with server(_azure(world, api_version=version)) as house:
        client, model = house.client, "gpt-4.1"
        hello: Any = [{"role": "user", "content": "hello"}]
        plain: list[Any] = [
            await client.chat.completions.create(model=model, messages=hello),
            await client.completions.create(model=model, prompt="hello"),
            await client.embeddings.create(model=model, input="hello"),
            await client.responses.create(model=model, input="hello"),
        ]
        assert [answer.model for answer in plain] == [model] * 4
        assert plain[0].choices[0].message.content == plain[3].output_text == "echo: hello"
        streams: list[Any] = [
            await client.chat.completions.create(model=model, messages=hello, stream=True),
            await client.completions.create(model=model, prompt="hello", stream=True),
        ]
        for stream in streams:
            assert {chunk.model async for chunk in stream} == {model}
        async with client.responses.stream(model=model, input="hello") as events:
            response = await events.get_final_response()
        assert (response.model, response.output_text) == (model, "echo: hello")
    paths = [e["path"] for e in world.state()["log"] if not e["route"].startswith("batches")]
    routes = ["chat/completions", "completions", "embeddings", "responses"]
    routes += ["chat/completions", "completions", "responses"]
    if version:
        scoped = [r if r == "responses" else f"deployments/dep-41/{r}" for r in routes]
        assert paths == [f"/openai/{route}" for route in scoped]
    else:
        assert paths == [f"/openai/v1/{route}" for route in routes]
