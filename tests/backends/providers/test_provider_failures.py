"""Providers that time out, break off, forget and lie: nothing is lost, nothing is run twice."""

from __future__ import annotations

from typing import Any

import anyio
import openai
import pytest
from structlog.testing import capture_logs
from worlds.house import Open, line
from worlds.provider import ProviderWorld

from tidemill import clock
from tidemill.errors import StoreUnavailable

pytestmark = pytest.mark.anyio


async def test_a_create_whose_answer_was_lost_is_adopted(
    server: Open, world: ProviderWorld
) -> None:
    """The batch was made although no answer came: it is found by our id in its metadata."""
    world.fail("batches.create", kind="lose")
    async with server() as house:
        ended = await house.until((await house.start(line("a"))).id)
        assert ended.status == "completed"
    state = world.state()
    assert state["calls"]["batches.create"] == len(state["batches"]) == 1


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 503},
        {"status": 500, "times": 3},
        {"status": 429, "headers": {"retry-after": "0.05"}},
        {"kind": "drop"},
        {"kind": "hang"},
        {"kind": "cut", "after": 5},
        {"status": 200, "body": {"object": "batch"}},
        {"status": 200, "body": "<html>hello</html>"},
    ],
    ids=lambda fault: str(fault.get("kind") or fault["status"]),
)
async def test_a_create_that_fails_is_tried_again(
    server: Open, world: ProviderWorld, fault: dict[str, Any]
) -> None:
    """The client has its batch, ``validating``; it reaches the provider once that answers."""
    patience = {"timeout_s": 0.5} if fault.get("kind") == "hang" else {}
    async with server(patience) as house:
        file = await house.upload(line("a"))
        world.fail("batches.create", **fault)
        batch = await house.create(file.id)
        assert batch.model_extra["tidemill_execution"] == "provider"
        ended = await house.until(batch.id)
        assert ended.status == "completed"
    assert len(world.state()["batches"]) == 1


@pytest.mark.parametrize("route", ["batches.retrieve", "files.content"])
@pytest.mark.parametrize(
    "fault",
    [
        {"status": 500},
        {"status": 429},
        {"status": 401},
        {"status": 200, "body": "<html>hello</html>"},
        {"kind": "drop"},
        {"kind": "cut"},
        {"kind": "hang"},
    ],
    ids=lambda fault: str(fault.get("kind") or fault["status"]),
)
async def test_a_look_or_a_settlement_that_breaks_off_is_begun_again(
    server: Open, world: ProviderWorld, route: str, fault: dict[str, Any]
) -> None:
    """Every line has one row and one booking, however often its results were read."""
    patience = {"timeout_s": 0.5} if fault.get("kind") == "hang" else {}
    world.fail(route, **{"times": 3, "after": 150} | fault)
    async with server(patience) as house:
        batch = await house.start(*(line(str(n)) for n in range(6)))
        ended = await house.until(batch.id)
        assert ended.request_counts.model_dump() == {"total": 6, "completed": 6, "failed": 0}
        assert len(await house.rows(ended.output_file_id)) == 6
        assert len(await house.server.store.ledger.usage(None, 0, 2**40)) == 6
    assert world.calls(route) > 3


@pytest.mark.parametrize(
    "odd",
    [
        {"id": "batch_of_another", "status": "in_progress"},
        {"status": "in_progress", "request_counts": "many", "errors": "none", "output_file_id": 7},
        {"status": 5},
        {"status": "on its way"},
    ],
)
async def test_an_odd_answer_to_a_look_changes_nothing(
    server: Open, world: ProviderWorld, odd: dict[str, Any]
) -> None:
    """Not the id on record above all: the next look asks for the same batch."""
    world.fail("batches.retrieve", times=2, status=200, body=odd)
    async with server() as house:
        ended = await house.until((await house.start(line("a"))).id)
        assert ended.status == "completed"
        assert ended.request_counts.model_dump() == {"total": 1, "completed": 1, "failed": 0}
    (theirs,) = world.state()["batches"]
    asked = [e["path"] for e in world.state()["log"] if e["route"] == "batches.retrieve"]
    assert set(asked) == {f"/v1/batches/{theirs}"}


async def test_a_client_may_use_all_of_its_metadata(server: Open, world: ProviderWorld) -> None:
    """One of sixteen pairs makes room for our id there; the client sees its own sixteen."""
    async with server() as house:
        mine = {f"key{n}": "x" for n in range(16)}
        batch = await house.create((await house.upload(line("a"))).id, metadata=mine)
        assert batch.metadata == mine
        assert (await house.until(batch.id)).metadata == mine
    (there,) = world.state()["batches"].values()
    assert len(there["metadata"]) == 16
    assert there["metadata"]["tidemill_batch"] == batch.id


async def test_a_batch_that_the_provider_forgot_ends_with_the_reason(
    server: Open, world: ProviderWorld
) -> None:
    """A 404 is asked for again a few times; then the batch has failed, and is not polled for
    ever."""
    world.set(hold="in_progress")
    async with server() as house:
        batch = await house.start(line("a", model="echo"))
        await house.until(batch.id, "in_progress")
        world.set(forget=list(world.state()["batches"]))
        ended = await house.until(batch.id)
        assert ended.status == "failed"
        assert ended.errors is not None
        assert ended.errors.data is not None
        assert ended.errors.data[0].code == "batch_not_found"
        world.zero()
        await house.client.batches.retrieve(batch.id)
        assert world.calls() == 0


async def test_results_that_are_gone_end_in_rows_that_say_so(
    server: Open, world: ProviderWorld
) -> None:
    """Each line is in one of the two files, although the provider kept nothing."""
    world.fail("files.content", times=-1, status=404)
    async with server() as house:
        ended = await house.until((await house.start(line("a"), line("b"))).id)
        assert ended.status == "completed"
        rows = await house.rows(ended.error_file_id)
        assert {row["error"]["code"] for row in rows.values()} == {"result_missing"}
        assert ended.request_counts.model_dump() == {"total": 2, "completed": 0, "failed": 2}


async def test_a_copy_that_the_provider_lost_is_uploaded_again(
    server: Open, world: ProviderWorld
) -> None:
    """Our own copy is still there."""
    async with server() as house:
        file = await house.upload(line("a"))
        world.set(forget=list(world.state()["files"]))
        ended = await house.until((await house.create(file.id)).id)
        assert ended.status == "completed"
    assert world.calls("files.create") == 2


async def test_an_upload_that_fails_is_made_up_for_at_create(
    server: Open, world: ProviderWorld
) -> None:
    """The file is accepted; the provider gets it with the batch."""
    world.fail("files.create", status=503)
    async with server() as house:
        file = await house.upload(line("a"))
        assert file.model_extra["tidemill_execution"] == "provider"
        assert (await house.until((await house.create(file.id)).id)).status == "completed"


async def test_an_upload_that_the_provider_refuses_leaves_nothing(
    server: Open, world: ProviderWorld
) -> None:
    """Its own status and words, and no half object here."""
    error = {"message": "File is too odd.", "type": "invalid_request_error", "code": "odd"}
    world.fail("files.create", status=422, body={"error": error})
    async with server() as house:
        with pytest.raises(openai.UnprocessableEntityError, match="File is too odd"):
            await house.upload(line("a"))
        assert [file async for file in house.client.files.list()] == []


async def test_our_credential_is_our_problem(server: Open, world: ProviderWorld) -> None:
    """A 401 from the provider is no 401 to the client, whose own key is right."""
    async with server() as house:
        file = await house.upload(line("a"))
        world.fail("batches.create", status=401)
        with pytest.raises(openai.InternalServerError) as refused:
            await house.create(file.id)
        assert (refused.value.status_code, refused.value.code) == (502, "provider_credential")
        assert (await house.client.batches.list()).data == []


async def test_what_cannot_be_recorded_is_undone(
    server: Open, world: ProviderWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No provider runs a batch, or keeps a file, that we could not say whose it is."""
    async with server() as house:
        upstream = house.server.store.upstream

        async def full(*_: Any) -> None:
            raise StoreUnavailable("The disk is full.")

        with monkeypatch.context() as patched:
            patched.setattr(upstream, "keep_file", full)
            with pytest.raises(openai.InternalServerError) as refused:
                await house.upload(line("a"))
            assert refused.value.code == "batch_ownership_unrecorded"
        assert world.state()["files"] == {}

        file = await house.upload(line("a"))
        keep = upstream.keep_batch

        async def full_once_there(up: Any) -> None:
            if up.id is not None:
                raise StoreUnavailable("The disk is full.")
            await keep(up)

        with monkeypatch.context() as patched:
            patched.setattr(upstream, "keep_batch", full_once_there)
            with pytest.raises(openai.InternalServerError) as refused:
                await house.create(file.id)
            assert (refused.value.status_code, refused.value.code) == (
                502,
                "batch_ownership_unrecorded",
            )
        (orphan,) = world.state()["batches"].values()
        assert orphan["status"] == "cancelling"
        assert (await house.client.batches.list()).data == []
        assert (await house.until((await house.create(file.id)).id)).status == "completed"


async def test_a_repeated_create_waits_for_the_first(server: Open, world: ProviderWorld) -> None:
    """Three sends of one create, as an SDK makes them after a time-out, are one batch."""
    world.fail("batches.create", kind="slow", seconds=1.0)
    async with server() as house:
        file = await house.upload(line("a"))
        ids: set[str] = set()

        async def send(count: int) -> None:
            headers = {"x-stainless-retry-count": str(count)} if count else {}
            ids.add((await house.create(file.id, extra_headers=headers)).id)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, 0)
            while world.calls("batches.create") < 1:  # noqa: ASYNC110 - the provider is a process
                await anyio.sleep(0.01)
            tasks.start_soon(send, 1)
            tasks.start_soon(send, 2)
        assert len(ids) == 1
    assert len(world.state()["batches"]) == 1


async def test_a_redirect_is_not_followed(server: Open, world: ProviderWorld) -> None:
    """The credential stays with the host that the settings name."""
    elsewhere = {"location": f"{world.url}/v1/elsewhere"}
    world.fail("batches.list", times=-1, status=307, headers=elsewhere)
    async with server() as house:
        verdict = await house.server.providers.capability.ask("up")
        assert verdict.state == "unknown"
        assert "redirect" in verdict.reason
    assert world.calls("unknown") == 0


async def test_a_restart_takes_up_what_runs_elsewhere(server: Open, world: ProviderWorld) -> None:
    """A second server on the same store goes on looking, without any client asking."""
    world.set(hold="in_progress")
    async with server() as house:
        batch = await house.start(line("a"))
        await house.until(batch.id, "in_progress")
    world.set(hold=None)
    async with server(batch_reconcile_interval_s=0.05) as house:
        with anyio.fail_after(60):
            while True:
                stored = await house.server.store.batches.get(batch.id, None)
                assert stored is not None
                if stored.status == "completed":
                    break
                await anyio.sleep(0.02)


async def test_a_provider_that_left_the_settings_leaves_its_objects_readable(
    server: Open, world: ProviderWorld
) -> None:
    """Results stay; what would need the provider says so."""
    async with server() as house:
        ended = await house.until((await house.start(line("a"))).id)
        file = await house.upload(line("b"))
    async with server({"name": "other"}) as house:
        again = await house.client.batches.retrieve(ended.id)
        assert again.status == "completed"
        assert len(await house.rows(again.output_file_id)) == 1
        with pytest.raises(openai.InternalServerError, match="no longer configured"):
            await house.create(file.id)


async def test_a_batch_whose_provider_left_the_settings_says_so_and_goes_on(
    server: Open, world: ProviderWorld
) -> None:
    """On the batch, in lists and once in the log; nothing is lost when the provider returns."""
    world.set(hold="in_progress")
    async with server() as house:
        batch = await house.start(line("a"))
        await house.until(batch.id, "in_progress")
    with capture_logs() as logs:
        async with server({"name": "other"}) as house:
            shown = await house.client.batches.retrieve(batch.id)
            [listed] = (await house.client.batches.list()).data
            for one in (shown, listed):
                assert one.status == "in_progress"
                assert "'up' is no longer configured here" in one.model_extra["tidemill_waits"]
    said = [entry for entry in logs if entry["event"] == "batches wait for a provider that left"]
    assert [(entry["provider"], entry["batches"]) for entry in said] == [("up", 1)]
    world.set(hold=None)
    async with server() as house:
        ended = await house.until(batch.id)
        assert ended.status == "completed"
        assert "tidemill_waits" not in ended.model_extra


@pytest.mark.parametrize("there", ["in_progress", "cancelling", "never"])
async def test_a_batch_whose_provider_left_the_settings_can_be_cancelled(
    server: Open, world: ProviderWorld, there: str
) -> None:
    """It ends here, each line with its row and none of them run; the provider is told when it
    returns. Also where it was being cancelled already, or had never arrived."""
    world.set(hold="in_progress")
    if there == "never":
        world.fail("batches.create", times=-1, status=503)
    async with server() as house:
        batch = await house.start(line("a", model="echo"), line("b", model="echo"))
        if there != "never":
            await house.until(batch.id, "in_progress")
        if there == "cancelling":
            world.fail("batches.cancel", times=-1, status=503)
            assert (await house.client.batches.cancel(batch.id)).status == "cancelling"
    async with server({"name": "other"}) as house:
        assert (await house.client.batches.cancel(batch.id)).status == "cancelling"
        ended = await house.until(batch.id)
        assert ended.status == "cancelled"
        assert ended.request_counts.model_dump() == {"total": 2, "completed": 0, "failed": 2}
        rows = (await house.rows(ended.error_file_id)).values()
        assert [row["error"]["code"] for row in rows] == ["batch_cancelled"] * 2
        with pytest.raises(openai.ConflictError):
            await house.client.batches.cancel(batch.id)
        assert await house.server.store.ledger.usage(None, 0, 2**40) == []
        said = [(e.actor, e.action) for e in await house.server.store.audit.page(object=batch.id)]
        assert [action for _, action in said].count("batch.cancelled") == 1
    world.mend()
    async with server() as house:
        with anyio.fail_after(60):
            while True:
                if not await house.server.store.upstream.unsettled():
                    break
                await anyio.sleep(0.01)
    assert {one["status"] for one in world.state()["batches"].values()} <= {
        "cancelling",
        "cancelled",
    }


async def test_a_provider_that_stays_away_is_given_up_for_what_can_run_here(
    server: Open, world: ProviderWorld
) -> None:
    """After about half an hour of failures; here the waits are short."""
    world.fail("batches.create", times=-1, status=503)
    async with server(batch_reconcile_interval_s=0.05) as house:
        ended = await house.until((await house.start(line("a", model="echo"))).id)
        assert ended.status == "completed"
        assert ended.model_extra["tidemill_execution"] == "local"
        assert await house.server.providers.eligibility.all() == []
    assert world.calls("batches.create") > 10


async def test_what_can_run_nowhere_else_expires(server: Open, world: ProviderWorld) -> None:
    """A batch that never reached its provider ends with its window, each line with its row."""
    world.fail("batches.create", times=-1, status=503)
    async with server(batch_reconcile_interval_s=0.05, window_seconds=1) as house:
        ended = await house.until((await house.start(line("a", model="small"))).id)
        assert ended.status == "expired"
        (row,) = (await house.rows(ended.error_file_id)).values()
        assert row["error"]["code"] == "batch_expired"


async def test_a_cancel_reaches_a_batch_whose_create_was_lost(
    server: Open, world: ProviderWorld
) -> None:
    """Also when the provider could not be asked in between: the batch is found and cancelled."""
    world.set(hold="in_progress")
    async with server() as house:
        file = await house.upload(line("a"), line("b"))
        world.fail("batches.create", kind="lose")
        world.fail("batches.list", times=2, status=503)
        batch = await house.create(file.id)
        assert (await house.client.batches.cancel(batch.id)).status == "cancelling"
        ended = await house.until(batch.id)
        assert ended.status == "cancelled"
        assert ended.request_counts.failed + ended.request_counts.completed == 2
    (there,) = world.state()["batches"].values()
    assert there["status"] == "cancelled"


@pytest.mark.parametrize("kind", ["openai", "azure"])
async def test_a_provider_that_forgets_to_end_a_batch(
    server: Open, world: ProviderWorld, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Long after its window it is cancelled there and has expired here, with what was finished;
    at Azure, where the window is a goal, it runs on."""
    monkeypatch.setattr("tidemill.backends.provider._LATE_S", 0)
    world.set(hold="in_progress")
    base_url = world.url + ("" if kind == "azure" else "/v1")
    async with server({"kind": kind, "base_url": base_url}) as house:
        batch = await house.start(line("a"), line("b"))
        await house.until(batch.id, "in_progress")
        end = float(batch.expires_at or 0)
        monkeypatch.setattr(clock, "now_f", lambda: end)
        monkeypatch.setattr(clock, "now", lambda: int(end))
        if kind == "azure":
            assert (await house.client.batches.retrieve(batch.id)).status == "in_progress"
            return
        ended = await house.until(batch.id)
        assert ended.status == "expired"
        assert ended.request_counts.model_dump() == {"total": 2, "completed": 1, "failed": 1}
    (there,) = world.state()["batches"].values()
    assert there["status"] == "cancelled"
