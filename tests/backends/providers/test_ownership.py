"""Who may see what, and who chooses where: the provider is asked only what is its owner's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from worlds.house import Open, line
from worlds.provider import API_KEY, IDENTITY_SECRET, ProviderWorld

from tidemill.errors import TidemillError
from tidemill.types import Limits, NewFile, Principal, Upload

pytestmark = pytest.mark.anyio


async def test_ids_of_others_and_of_providers_are_404_and_nobody_is_asked(
    server: Open, world: ProviderWorld
) -> None:
    """A raw provider id, a foreign id and an id that never was look the same on every route."""
    world.set(hold="in_progress")
    async with server(api_keys="one,two", provider_refresh_s=60.0) as house:
        mine = house.client.with_options(api_key="one")
        house.client = mine
        batch = await house.start(line("a"))
        file_id = batch.input_file_id
        theirs = world.state()
        raw_file, raw_batch = next(iter(theirs["files"])), next(iter(theirs["batches"]))
        other = mine.with_options(api_key="two")
        world.zero()
        cases = [
            (mine, raw_file, raw_batch),
            (other, file_id, batch.id),
            (mine, "file-x", "batch_x"),
        ]
        for client, file, what in cases:
            calls: list[Any] = [
                client.files.retrieve(file),
                client.files.content(file),
                client.files.delete(file),
                client.batches.retrieve(what),
                client.batches.cancel(what),
                client.get(f"/batches/{what}/results", cast_to=object),
                client.post("/batches/preflight", cast_to=object, body={"input_file_id": file}),
            ]
            for call in calls:
                with pytest.raises(openai.NotFoundError):
                    await call
            with pytest.raises(openai.BadRequestError, match="Cannot find file"):
                await client.batches.create(
                    input_file_id=file,
                    endpoint="/v1/chat/completions",
                    completion_window="24h",
                )
        assert (await other.batches.list()).data == []
        assert world.calls() == 0
        listed = (await mine.batches.list()).data
        assert [item.id for item in listed] == [batch.id]
        assert listed[0].model_extra["tidemill_execution"] == "provider"


async def test_several_capable_providers_are_ambiguous(server: Open, world: ProviderWorld) -> None:
    """The client names one in a header, by either name of it; an unknown one is refused."""
    async with server({"name": "one"}, {"name": "two"}) as house:
        with pytest.raises(openai.BadRequestError, match="one, two") as refused:
            await house.upload(line("a"))
        assert refused.value.code == "multiple_batch_providers"
        for header in ("X_Tidemill_Provider", "X_Logos_Provider"):
            file = await house.upload(line("a"), **{header: "two"})
            assert file.model_extra["tidemill_placement"]["provider"] == "two"
        with pytest.raises(openai.PermissionDeniedError):
            await house.upload(line("a"), X_Tidemill_Provider="three")
        assert [f.id async for f in house.client.files.list()] != []


async def test_the_cheapest_may_decide(server: Open, world: ProviderWorld) -> None:
    """With the setting and prices on both sides nobody needs to name one."""

    def priced(name: str, batch: float) -> dict[str, Any]:
        price = {"input": 10.0, "output": 10.0, "batch_input": batch, "batch_output": batch}
        return {"name": name, "models": {"big": {"batch": "gpt-4.1", "price": price}}}

    async with server(priced("dear", 2.0), priced("cheap", 1.0), prefer="cheapest") as house:
        file = await house.upload(line("a"))
        assert file.model_extra["tidemill_placement"]["provider"] == "cheap"


@pytest.mark.parametrize(
    ("first", "expected"), [("", "400 multiple_batch_providers"), ("one", "two"), ("two", "one")]
)
async def test_the_cheapest_by_the_price_file(
    server: Open, world: ProviderWorld, tmp_path: Path, first: str, expected: str
) -> None:
    """It says what is booked, so it decides, also against what a provider's own table says."""
    path = tmp_path / "prices.toml"
    path.write_text(
        "[models.big]\ninput = 8\noutput = 8\nbatch = { input = 4, output = 4 }\n"
        + (f'[models."{first}/big"]\ninput = 9\noutput = 9\n' if first else ""),
        encoding="utf-8",
    )
    tables = ({"name": "one"}, {"name": "two"})
    async with server(*tables, prefer="cheapest", prices=str(path)) as house:
        try:
            file = await house.upload(line("a"))
            found = file.model_extra["tidemill_placement"]["provider"]
        except openai.APIStatusError as refused:
            found = f"{refused.status_code} {refused.code}"
        assert found == expected


async def test_where_is_the_clients_choice(server: Open, world: ProviderWorld) -> None:
    """``local`` runs here although a provider could; an unknown word is refused; the answer's
    header says where and why."""
    async with server() as house:
        raw = await house.client.files.with_raw_response.create(
            file=("in.jsonl", line("a", model="echo")),
            purpose="batch",
            extra_headers={"X-Tidemill-Execution": "local"},
        )
        assert raw.headers["x-tidemill-placement"] == 'local; reason="the request asked for it"'
        raw = await house.client.files.with_raw_response.create(
            file=("in.jsonl", line("a")), purpose="batch"
        )
        assert raw.headers["x-tidemill-placement"].startswith("provider; name=up; reason=")
        with pytest.raises(openai.BadRequestError):
            await house.upload(line("a"), X_Tidemill_Execution="elsewhere")
        with pytest.raises(openai.APIStatusError) as refused:
            await house.upload(line("a", model="small"), X_Tidemill_Execution="local")
        assert refused.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (Limits(), "up"),
        (Limits(models=("echo",)), "up"),
        (Limits(providers={"up": ("echo",)}), "up"),
        (Limits(providers={"local": ("*",)}), "local"),
        (Limits(providers={"up": ("other",), "local": ("*",)}), "local"),
        (Limits(providers={"up": ("other",)}), "403 model_not_permitted"),
    ],
)
async def test_a_keys_limits_decide_with(
    server: Open, world: ProviderWorld, limits: Limits, expected: str
) -> None:
    """A provider that the key may not use for the model is no candidate."""
    async with server() as house:
        who = Principal(owner="o", name="n", limits=(limits,))
        upload = Upload(new=NewFile(owner="o", filename="in.jsonl"), body=_one(), principal=who)
        try:
            file = await house.server.services.backends.accept(upload)
            found = file.facts.placement.backend
        except TidemillError as error:
            found = f"{error.status} {error.code}"
        assert found == expected


async def _one() -> AsyncIterator[bytes]:
    yield line("a", model="echo")


@pytest.mark.parametrize(
    ("model", "header", "value", "expected"),
    [
        ("big", "X-Tidemill-Provider", "nobody", "403 provider_not_permitted"),
        ("echo", "X-Logos-Provider", "nobody", "403 provider_not_permitted"),
        ("echo", "X-Tidemill-Provider", "up", None),
        ("big", "X-Tidemill-Provider", "other", "400 placement_mismatch"),
        ("big", "X-Tidemill-Execution", "provider", None),
        ("echo", "X-Tidemill-Execution", "provider", "501 model_not_available_for_batch"),
        ("echo", "X-Logos-Batch-Execution", "logos", None),
        ("big", "X-Logos-Batch-Execution", "logos", "400 placement_mismatch"),
        ("big", "X-Tidemill-Execution", "elsewhere", "400 invalid_value"),
    ],
)
async def test_a_create_that_asks_for_another_place_is_not_ignored(
    server: Open, world: ProviderWorld, model: str, header: str, value: str, expected: str | None
) -> None:
    """The file's place was decided at upload: what agrees with it passes, the rest is refused."""
    other = {"name": "other", "models": {"else": "gpt-4.1"}}
    async with server({"models": {"big": {"batch": "gpt-4.1"}}}, other) as house:
        file = await house.upload(line("a", model=model))
        try:
            await house.create(file.id, extra_headers={header: value})
            found = None
        except openai.APIStatusError as refused:
            found = f"{refused.status_code} {refused.code}"
        assert found == expected


async def test_a_batch_is_looked_after_where_it_is(
    server: Open, world: ProviderWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks and cancels go to the provider on record, with its credential, whatever stands first in
    the settings since."""
    monkeypatch.setenv("IDENTITY_ENDPOINT", world.url + "/msi/token")
    monkeypatch.setenv("IDENTITY_HEADER", IDENTITY_SECRET)
    world.set(hold="in_progress")
    one = {"name": "one"}
    azure = {"kind": "azure", "base_url": world.url, "credential": "managed_identity"}
    two = {"name": "two", "api_key_env": "", "models": {"big": {"batch": "dep-41-batch"}}} | azure
    ways = {"one": ("/v1/", "Bearer " + API_KEY), "two": ("/openai/v1/", "Bearer entra.")}
    async with server(one, two) as house:
        batches = {
            name: await house.create((await house.upload(line("a"), X_Tidemill_Provider=name)).id)
            for name in ways
        }
    async with server(two, one) as house:
        for name, (root, credential) in ways.items():
            await house.until(batches[name].id, "in_progress")
            world.zero()
            await house.client.batches.cancel(batches[name].id)
            assert (await house.until(batches[name].id)).status == "cancelled"
            log = world.state()["log"]
            there = [entry for entry in log if entry["path"].startswith(root)]
            assert {entry["route"] for entry in there} >= {"batches.retrieve", "batches.cancel"}
            assert all(e["headers"]["authorization"].startswith(credential) for e in there)
            assert {e["path"].startswith(root) for e in log if e["route"] == "batches.cancel"} == {
                True
            }
