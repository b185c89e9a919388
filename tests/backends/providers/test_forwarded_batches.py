"""A forwarded batch, from upload to bill, with the SDK in front and behind."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import msgspec
import openai
import pytest
from worlds.house import CHAT, House, Open, line
from worlds.provider import ProviderWorld

from tidemill.ports import Store
from tidemill.types import Account, KeyRecord, Limits

pytestmark = pytest.mark.anyio

KEY = KeyRecord(id="key_1", name="k", owner="team_1", prefix="", digest="", created_at=1)
"""Of a team of two: a mate sees what becomes of its batches."""


async def _keys(house: House) -> openai.AsyncOpenAI:
    """Let the house speak with ``KEY``; returns its mate."""
    store = house.server.store
    await store.accounts.add(Account(kind="team", id="team_1", name="t"))
    for id in ("key_1", "key_2"):
        digest = hashlib.sha256(id.encode()).hexdigest()
        await store.keys.add(
            msgspec.structs.replace(KEY, id=id, name=id, team_id="team_1", digest=digest)
        )
    mate = house.client.with_options(api_key="key_2")
    house.client = house.client.with_options(api_key="key_1")
    return mate


async def test_a_batch_goes_where_the_discount_is(server: Open, world: ProviderWorld) -> None:
    """The client's script cannot tell: same routes, our ids, our model names, our copy."""
    async with server() as house:
        content = line("a", "one") + line("b", "two") + line("c", "!refuse")
        file = await house.upload(content)
        assert file.model_extra["tidemill_execution"] == "provider"
        batch = await house.create(file.id, metadata={"mine": "yes"})
        assert batch.id.startswith("batch_")
        assert batch.model_extra["logos_execution"] == "provider"
        ended = await house.until(batch.id)
        assert ended.status == "completed"
        assert ended.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
        assert ended.metadata == {"mine": "yes"}
        good = await house.rows(ended.output_file_id)
        bad = await house.rows(ended.error_file_id)
        assert good["a"]["response"]["body"]["choices"][0]["message"]["content"] == "echo: one"
        assert good["a"]["response"]["body"]["model"] == "big"
        assert bad["c"]["response"]["status_code"] == 400
        assert bad["c"]["error"] is None
        assert "gpt-4.1" not in json.dumps(bad)
        assert set(good) | set(bad) == {"a", "b", "c"}
        assert (await house.client.files.content(file.id)).content == content
        booked = await house.server.store.ledger.usage(None, 0, 2**40)
        assert [(r.custom_id, r.execution, r.tier, r.model) for r in booked] == [
            ("b", "up", "batch", "big"),
            ("a", "up", "batch", "big"),
        ]
        assert ended.usage is not None
        assert ended.usage.input_tokens == sum(row.usage.input for row in booked) > 0
    state = world.state()
    (theirs,) = (f for f in state["files"].values() if f["purpose"] == "batch")
    assert '"model":"gpt-4.1"' in theirs["text"]
    (there,) = state["batches"].values()
    assert there["metadata"] == {"mine": "yes", "tidemill_batch": batch.id}


@pytest.mark.parametrize(
    ("url", "input_tokens"),
    [("/v1/completions", 1), ("/v1/responses", 1), ("/v1/embeddings", 1), (CHAT, 4)],
)
async def test_every_shape_of_usage_is_read(
    server: Open, world: ProviderWorld, url: str, input_tokens: int
) -> None:
    """Chat says prompt_tokens, responses say input_tokens, embeddings have no output."""
    async with server() as house:
        model = "vectors" if url.endswith("embeddings") else "big"
        batch = await house.start(line("a", "word", url=url, model=model), url=url)
        ended = await house.until(batch.id)
        assert ended.usage is not None
        assert ended.usage.input_tokens == input_tokens
        if not url.endswith("embeddings"):
            assert ended.usage.output_tokens > 0
            assert ended.usage.output_tokens_details.reasoning_tokens == 2
            assert ended.usage.input_tokens_details.cached_tokens == 1
        (row,) = (await house.rows(ended.output_file_id)).values()
        assert row["response"]["body"]["model"] == model


async def test_several_models_are_each_run_as_named(server: Open, world: ProviderWorld) -> None:
    """There by the provider's names, in the results and on the bill by ours."""
    async with server() as house:
        lines = (line("a"), line("b", model="small"), line("c"))
        ended = await house.until((await house.start(*lines)).id)
        assert ended.model_extra["tidemill_execution"] == "provider"
        models = {"a": "big", "b": "small", "c": "big"}
        rows = await house.rows(ended.output_file_id)
        assert {id: row["response"]["body"]["model"] for id, row in rows.items()} == models
        booked = await house.server.store.ledger.usage(None, 0, 2**40)
        assert {row.custom_id: row.model for row in booked} == models
    (sent,) = (f for f in world.state()["files"].values() if f["purpose"] == "batch")
    theirs = [json.loads(text)["body"]["model"] for text in sent["text"].splitlines()]
    assert theirs == ["gpt-4.1", "gpt-4.1-mini", "gpt-4.1"]


@pytest.mark.parametrize("theirs", ["big", "gpt-4.1"])
@pytest.mark.parametrize("surface", ["openai", "azure", "azure, dated"])
async def test_a_line_may_spell_its_url_as_any_surface_does(
    server: Open, world: ProviderWorld, surface: str, theirs: str
) -> None:
    """The provider gets its own spelling in every line, as its surface needs it."""
    world.set(models={"big": {"batch": True}})
    kind, _, dated = surface.partition(", ")
    table = {
        "kind": kind,
        "base_url": world.url + ("" if kind == "azure" else "/v1"),
        "api_version": "2024-10-21" if dated else "",
        "models": {"big": theirs},
    }
    async with server(table) as house:
        ours = line("a"), line("b").replace(b"/v1/chat", b"/chat")
        ended = await house.until((await house.start(*ours)).id)
        assert ended.errors is None
        assert set(await house.rows(ended.output_file_id)) == {"a", "b"}
    (sent,) = (f for f in world.state()["files"].values() if f["purpose"] == "batch")
    urls = {json.loads(text)["url"] for text in sent["text"].splitlines()}
    assert urls == {CHAT.removeprefix("/v1") if dated else CHAT}


async def test_what_providers_leave_out_is_normalised(server: Open, world: ProviderWorld) -> None:
    """Empty ids, null counts, a null endpoint and a zero-byte error file never reach a client."""
    for quirks in (["empty_ids"], ["null_counts", "null_endpoint", "zero_error_file"]):
        world.set(quirks=quirks)
        async with server() as house:
            ended = await house.until((await house.start(line("a"))).id)
            assert ended.status == "completed"
            assert ended.endpoint == CHAT
            assert ended.error_file_id is None
            assert ended.request_counts.model_dump() == {"total": 1, "completed": 1, "failed": 0}


async def test_progress_is_the_providers(server: Open, world: ProviderWorld) -> None:
    """While it runs there, counts and phase are those that the provider last said."""
    world.set(hold="finalizing")
    async with server() as house:
        batch = await house.start(*(line(str(n)) for n in range(4)))
        seen = await house.until(batch.id, "finalizing")
        assert seen.request_counts.model_dump() == {"total": 4, "completed": 2, "failed": 0}
        assert seen.output_file_id is None
        world.set(hold=None)
        ended = await house.until(batch.id)
        assert ended.request_counts.completed == 4


async def test_a_thousand_pollers_are_one_call(server: Open, world: ProviderWorld) -> None:
    """Polls are answered from the record; the provider is asked once per few seconds."""
    world.set(hold="in_progress")
    async with server(provider_refresh_s=60.0) as house:
        batch = await house.start(line("a"))
        for _ in range(3):
            async with anyio.create_task_group() as tasks:
                for _ in range(100):
                    tasks.start_soon(house.client.batches.retrieve, batch.id)
        assert world.calls("batches.retrieve") <= 1


async def test_an_expired_batch_keeps_what_was_finished(server: Open, world: ProviderWorld) -> None:
    """Finished lines are settled and downloadable, the others have a row that says why not."""
    world.set(outcome={"status": "expired", "finish": 2})
    async with server() as house:
        batch = await house.start(*(line(str(n)) for n in range(5)))
        ended = await house.until(batch.id)
        assert ended.status == "expired"
        assert ended.expired_at is not None
        assert ended.request_counts.model_dump() == {"total": 5, "completed": 2, "failed": 3}
        assert set(await house.rows(ended.output_file_id)) == {"0", "1"}
        left = await house.rows(ended.error_file_id)
        assert {row["error"]["code"] for row in left.values()} == {"batch_expired"}


async def test_a_cancelled_batch_is_cancelled_there_and_kept_here(
    server: Open, world: ProviderWorld
) -> None:
    """The provider is told; what it had finished is kept; a second cancel is harmless."""
    world.set(hold="in_progress")
    async with server() as house:
        batch = await house.start(*(line(str(n)) for n in range(4)))
        await house.until(batch.id, "in_progress")
        assert (await house.client.batches.cancel(batch.id)).status == "cancelling"
        assert (await house.client.batches.cancel(batch.id)).status == "cancelling"
        assert world.calls("batches.cancel") == 1
        ended = await house.until(batch.id)
        assert ended.status == "cancelled"
        assert ended.request_counts.model_dump() == {"total": 4, "completed": 2, "failed": 2}
        with pytest.raises(openai.ConflictError):
            await house.client.batches.cancel(batch.id)


async def test_a_cancel_that_comes_too_late_is_refused(server: Open, world: ProviderWorld) -> None:
    """What has ended at the provider cannot be cancelled, although we had not heard of it."""
    async with server(provider_refresh_s=60.0) as house:
        batch = await house.start(line("a"))
        for _ in range(4):
            world.ask("GET", f"/v1/batches/{next(iter(world.state()['batches']))}")
        with pytest.raises(openai.ConflictError, match="completed"):
            await house.client.batches.cancel(batch.id)
        assert (await house.until(batch.id)).status == "completed"


async def test_a_batch_cancelled_at_the_provider_is_cancelled_here(
    server: Open, world: ProviderWorld
) -> None:
    """Somebody cancelled it in the provider's own console."""
    world.set(hold="in_progress")
    async with server() as house:
        batch = await house.start(*(line(str(n)) for n in range(2)))
        await house.until(batch.id, "in_progress")
        world.ask("POST", f"/v1/batches/{next(iter(world.state()['batches']))}/cancel")
        ended = await house.until(batch.id)
        assert (ended.status, ended.request_counts.completed) == ("cancelled", 1)


async def test_results_are_ours_once_they_are_settled(server: Open, world: ProviderWorld) -> None:
    """The provider may forget its files; ours are served with Range, and are booked once."""
    async with server() as house:
        batch = await house.start(line("a"), line("b"))
        ended = await house.until(batch.id)
        assert ended.output_file_id is not None
        world.set(forget=list(world.state()["files"]))
        whole = (await house.client.files.content(ended.output_file_id)).content
        part = await house.client.files.content(
            ended.output_file_id, extra_headers={"Range": "bytes=5-9"}
        )
        assert part.content == whole[5:10]
        for _ in range(10):
            await house.client.batches.retrieve(batch.id)
        assert len(await house.server.store.ledger.usage(None, 0, 2**40)) == 2


async def test_a_batchs_own_parameters_reach_the_provider(
    server: Open, world: ProviderWorld
) -> None:
    """They are written into lines that do not set them; what no provider knows is refused."""
    async with server({"kind": "openai"}) as house:
        file = await house.upload(line("a"), line("b", temperature=0.1, max_tokens=3))
        extra = {"temperature": 0.9, "max_decoding_length": 7}
        await house.create(file.id, extra_body=extra)
        newest = list(world.state()["files"].values())[-1]
        first, second = (json.loads(text)["body"] for text in newest["text"].splitlines())
        assert (first["temperature"], first["max_completion_tokens"]) == (0.9, 7)
        assert (second["temperature"], second["max_tokens"]) == (0.1, 3)
        assert "max_completion_tokens" not in second

        other = await house.upload(line("a"))
        with pytest.raises(openai.BadRequestError) as refused:
            await house.create(other.id, extra_body={"top_k": 5})
        assert refused.value.param == "top_k"


async def test_work_is_dated_by_when_it_was_done(server: Open, world: ProviderWorld) -> None:
    """Embeddings say no time, so that of the batch's end at the provider counts, not of reading."""
    world.set(outcome={"status": "completed", "ago": 120})
    async with server() as house:
        url = "/v1/embeddings"
        batch = await house.start(line("a", url=url, model="vectors"), url=url)
        await house.until(batch.id)
        (row,) = await house.server.store.ledger.usage(None, 0, 2**40)
        assert row.at < batch.created_at - 60


async def test_an_input_stays_while_its_batch_runs_elsewhere(
    server: Open, world: ProviderWorld
) -> None:
    """409 until it is settled: our copy is what a refused batch would run from."""
    world.set(hold="in_progress")
    async with server() as house:
        batch = await house.start(line("a"))
        with pytest.raises(openai.ConflictError):
            await house.client.files.delete(batch.input_file_id)
        assert (await house.client.batches.retrieve(batch.id)).output_file_id is None
        world.set(hold=None)
        ended = await house.until(batch.id)
        assert (await house.client.files.delete(batch.input_file_id)).deleted
        assert set(await house.rows(ended.output_file_id)) == {"a"}


async def test_results_are_read_within_the_providers_concurrency(
    server: Open, world: ProviderWorld
) -> None:
    """Twenty batches end at once; no more than two calls of any kind run there together."""
    async with server({"concurrency": 2}, batch_reconcile_interval_s=0.05) as house:
        world.fail("files.content", times=-1, kind="slow", seconds=0.05)
        batches = [await house.start(line(str(n))) for n in range(20)]
        async with anyio.create_task_group() as tasks:
            for batch in batches:
                tasks.start_soon(house.until, batch.id)
    assert world.state()["peak"]["files.content"] == 2


@pytest.mark.parametrize(
    ("narrow", "code"),
    [
        (lambda store: store.keys.revoke("key_1"), "key_revoked"),
        (lambda store: store.keys.change("key_1", expires_at=5), "key_expired"),
        (
            lambda store: store.keys.change(
                "key_1", limits=Limits(providers={"up": ("small",), "local": ("*",)})
            ),
            "model_not_permitted",
        ),
        (
            lambda store: store.accounts.change("team_1", limits=Limits(models=("small",))),
            "model_not_permitted",
        ),
    ],
)
async def test_a_key_that_may_no_longer_stops_its_batch_there(
    server: Open, world: ProviderWorld, narrow: Callable[[Store], Awaitable[Any]], code: str
) -> None:
    """The provider is told to stop; what it had finished is kept and billed, every other line says
    why it did not run, and the batch completes, as one whose lines are stopped here does."""
    world.set(hold="in_progress")
    async with server(api_keys="x") as house:
        mate = await _keys(house)
        batch = await house.start(*(line(str(n)) for n in range(4)), line("e", model="small"))
        await house.until(batch.id, "in_progress")
        await narrow(house.server.store)
        house.client = mate
        ended = await house.until(batch.id)
        assert world.calls("batches.cancel") == 1
        assert ended.status == "completed"
        assert ended.request_counts.model_dump() == {"total": 5, "completed": 2, "failed": 3}
        rows = (await house.rows(ended.error_file_id)).values()
        assert [(row["response"], row["error"]["code"]) for row in rows] == [(None, code)] * 3
        booked = await house.server.store.ledger.usage(None, 0, 2**40)
        assert [(row.key_id, row.tier) for row in booked] == [("key_1", "batch")] * 2


async def test_a_key_that_is_gone_before_the_provider_took_the_batch(
    server: Open, world: ProviderWorld
) -> None:
    """The provider never gets it."""
    world.fail("batches.create", status=503, times=-1)
    async with server(api_keys="x") as house:
        mate = await _keys(house)
        file = await house.upload(line("a"), X_Tidemill_Execution="provider")
        batch = await house.create(file.id)
        assert batch.status == "validating"
        await house.server.store.keys.revoke("key_1")
        house.client = mate
        ended = await house.until(batch.id)
        assert ended.status == "completed"
        [row] = (await house.rows(ended.error_file_id)).values()
        assert row["error"]["code"] == "key_revoked"
        assert world.state()["batches"] == {}


async def test_a_client_that_cancels_what_its_key_may_not_run(
    server: Open, world: ProviderWorld
) -> None:
    """The client's word comes first: the batch is cancelled."""
    world.set(hold="in_progress")
    async with server(api_keys="x") as house:
        mate = await _keys(house)
        batch = await house.start(line("a"), line("b"))
        await house.until(batch.id, "in_progress")
        world.fail("batches.cancel", status=503, times=1)
        assert (await mate.batches.cancel(batch.id)).status == "cancelling"
        await house.server.store.keys.revoke("key_1")
        house.client = mate
        ended = await house.until(batch.id)
        assert ended.status == "cancelled"
        assert (await house.rows(ended.error_file_id))["b"]["error"]["code"] == "batch_cancelled"
