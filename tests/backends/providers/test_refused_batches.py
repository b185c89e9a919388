"""What a provider refuses runs here, is learned from, or is passed on."""

from __future__ import annotations

from pathlib import Path

import anyio
import openai
import pytest
from worlds.house import Open, line
from worlds.provider import ProviderWorld

from tidemill.backends.eligibility import Eligibility
from tidemill.storage import open_store

pytestmark = pytest.mark.anyio


async def test_a_model_refused_at_create_runs_here(server: Open, world: ProviderWorld) -> None:
    """Same file id, same batch, answered here; the next file does not go there any more."""
    world.set(models={"dep-41": {"batch": False}})
    async with server() as house:
        file = await house.upload(line("a", "one", model="echo"), line("b", "two", model="echo"))
        assert file.model_extra["tidemill_execution"] == "provider"
        batch = await house.create(file.id)
        assert batch.model_extra["tidemill_execution"] == "local"
        ended = await house.until(batch.id)
        assert (ended.status, ended.input_file_id) == ("completed", file.id)
        assert ended.request_counts.model_dump() == {"total": 2, "completed": 2, "failed": 0}
        assert set(await house.rows(ended.output_file_id)) == {"a", "b"}
        booked = await house.server.store.ledger.usage(None, 0, 2**40)
        assert {(row.execution, row.tier) for row in booked} == {("local", "standard")}

        again = await house.upload(line("a", model="echo"))
        placed = again.model_extra["tidemill_placement"]
        assert placed["execution"] == "local"
        assert "refused to batch 'echo'" in placed["reason"]
        assert world.calls("files.create") == 1


async def test_a_model_refused_later_runs_here_too(server: Open, world: ProviderWorld) -> None:
    """The provider accepted the batch and failed it afterwards, with a text and no useful code."""
    world.set(
        models={"dep-41": {"batch": False}},
        refuse_later=True,
        refusal_code="invalid_request",
        refusal="The deployment dep-41 is not available for batch.",
        quirks=["bare_errors"],
    )
    async with server() as house:
        batch = await house.start(line("a", "one", model="echo"))
        assert batch.model_extra["tidemill_execution"] == "provider"
        ended = await house.until(batch.id)
        assert (ended.id, ended.status) == (batch.id, "completed")
        assert ended.model_extra["tidemill_execution"] == "local"
        assert [r.model for r in await house.server.providers.eligibility.all()] == ["echo"]


async def test_finished_lines_of_a_failed_batch_are_kept(
    server: Open, world: ProviderWorld
) -> None:
    """Only the others run here; each is booked where it ran."""
    problem = {"code": "model_not_found", "message": "The model went away.", "line": None}
    world.set(outcome={"status": "failed", "finish": 2, "problems": [problem]})
    async with server() as house:
        batch = await house.start(*(line(str(n), model="echo") for n in range(5)))
        ended = await house.until(batch.id)
        assert ended.status == "completed"
        assert ended.request_counts.model_dump() == {"total": 5, "completed": 5, "failed": 0}
        booked = await house.server.store.ledger.usage(None, 0, 2**40)
        where = {row.custom_id: (row.execution, row.tier) for row in booked}
        assert where == {
            **{str(n): ("up", "batch") for n in (0, 1)},
            **{str(n): ("local", "standard") for n in (2, 3, 4)},
        }


async def test_a_file_of_several_models_that_wants_one_runs_here(
    server: Open, world: ProviderWorld
) -> None:
    """It is not run under the first model, and no model is held to be at fault."""
    world.set(quirks=["one_model"])
    async with server({"models": {"echo": {"batch": "dep-41"}, "big": "gpt-4.1"}}) as house:
        lines = (line("a", model="echo"), line("b", model="big"))
        ended = await house.until((await house.start(*lines)).id)
        assert ended.status == "completed"
        rows = await house.rows(ended.output_file_id)
        assert rows["b"]["response"]["body"]["model"] == "big"
        assert rows["b"]["response"]["body"]["choices"][0]["message"]["content"] == "echo: hi"
        again = await house.upload(*lines)
        assert "one model a file" in again.model_extra["tidemill_placement"]["reason"]
        single = await house.upload(line("a", model="echo"))
        assert single.model_extra["tidemill_execution"] == "provider"


async def test_a_refused_batch_that_must_run_there_is_passed_on(
    server: Open, world: ProviderWorld
) -> None:
    """The provider's own status, code and words, with our model's name; and nothing remains."""
    world.set(models={"gpt-4.1": {"batch": False}})
    async with server() as house:
        file = await house.upload(line("a"), X_Tidemill_Execution="provider")
        with pytest.raises(openai.BadRequestError, match="The model 'big' is not supported") as no:
            await house.create(file.id)
        assert (no.value.code, no.value.param) == ("model_not_found", "model")
        assert (await house.client.batches.list()).data == []
        await house.client.files.delete(file.id)


async def test_quota_neither_teaches_nor_runs_here(server: Open, world: ProviderWorld) -> None:
    """The error is passed through, its text names ``token_limit_exceeded`` as scripts expect."""
    world.set(token_limit=True)
    async with server() as house:
        file = await house.upload(line("a", model="echo"))
        with pytest.raises(openai.BadRequestError) as refused:
            await house.create(file.id)
        assert refused.value.code == "token_limit_exceeded"
        assert await house.server.providers.eligibility.all() == []
        world.set(token_limit=False)
        assert (await house.until((await house.create(file.id)).id)).status == "completed"


async def test_quota_may_run_here_when_the_settings_say_so(
    server: Open, world: ProviderWorld
) -> None:
    """``fallback_on_quota`` runs the batch here, and still teaches nothing."""
    world.set(token_limit=True)
    async with server(fallback_on_quota=True) as house:
        batch = await house.start(line("a", model="echo"))
        assert batch.model_extra["tidemill_execution"] == "local"
        assert (await house.until(batch.id)).status == "completed"
        assert await house.server.providers.eligibility.all() == []


@pytest.mark.parametrize(("here", "status"), [(False, "failed"), (True, "completed")])
async def test_quota_that_is_told_later(
    server: Open, world: ProviderWorld, here: bool, status: str
) -> None:
    """The same of a batch that was taken first and then failed, whatever the text says of the
    model."""
    said = "Enqueued token limit reached: the model is not available now."
    problem = {"code": "token_limit_exceeded", "message": said, "line": None}
    world.set(outcome={"status": "failed", "finish": 0, "problems": [problem]})
    async with server(fallback_on_quota=here) as house:
        ended = await house.until((await house.start(line("a", model="echo"))).id)
        assert ended.status == status
        assert (ended.errors is None) is here
        if ended.errors is not None:
            assert ended.errors.data is not None
            assert [(p.code, p.message) for p in ended.errors.data] == [(problem["code"], said)]
        assert await house.server.providers.eligibility.all() == []


async def test_an_answer_is_forgotten_when_the_model_works_again(
    server: Open, world: ProviderWorld
) -> None:
    """``forget`` sends the next file there; its success keeps nothing on record."""
    world.set(models={"dep-41": {"batch": False}})
    async with server() as house:
        await house.until((await house.start(line("a", model="echo"))).id)
        eligibility = house.server.providers.eligibility
        world.set(models={"dep-41": {"batch": True}})
        file = await house.upload(line("a", model="echo"), X_Tidemill_Execution="local")
        assert file.model_extra["tidemill_execution"] == "local"
        assert await eligibility.forget("up") == 1
        batch = await house.start(line("a", model="echo"))
        assert batch.model_extra["tidemill_execution"] == "provider"
        await eligibility.teach("up", ["echo"], "somebody else's refusal meanwhile")
        await house.until(batch.id)
        assert await eligibility.all() == []


async def test_a_refusal_is_remembered_as_long_as_the_settings_say(tmp_path: Path) -> None:
    """Then the model is sent there again, as if it had never been refused; a second refusal counts
    anew."""
    now = [1_000_000.0]
    store = open_store(tmp_path, clock=lambda: now[0])
    await store.start()
    eligibility = Eligibility(store.facts, ttl_days=90)
    await eligibility.teach("up", ["echo"], "no")
    now[0] += 89 * 86_400
    assert await eligibility.refused("up") == {"echo"}
    await eligibility.teach("up", ["echo"], "no")
    now[0] += 2 * 86_400
    assert await eligibility.refused("up") == {"echo"}
    now[0] += 89 * 86_400
    assert await eligibility.refused("up") == frozenset()
    await store.close()


async def test_a_batch_that_fails_there_for_its_own_fault_fails_here(
    server: Open, world: ProviderWorld
) -> None:
    """Its problems are shown, and it is not run here: it would fail again."""
    problem = {"code": "invalid_request", "message": "Line 1 is odd.", "line": 1, "param": "body"}
    world.set(outcome={"status": "failed", "finish": 0, "problems": [problem]})
    async with server() as house:
        ended = await house.until((await house.start(line("a", model="echo"))).id)
        assert ended.status == "failed"
        assert ended.errors is not None
        assert ended.errors.data is not None
        assert (ended.errors.data[0].code, ended.errors.data[0].line) == ("invalid_request", 1)
        assert ended.output_file_id is None


async def test_a_batch_that_does_not_fit_here_now_is_not_created(
    server: Open, world: ProviderWorld
) -> None:
    """Refused there, and no room here: 429, as for any batch; once there is room it runs."""
    world.set(models={"dep-41": {"batch": False}})
    async with server(max_intake_capacity=10) as house:
        pool = house.server.runner.intake_pool
        reserved = pool.reserve(9)
        file = await house.upload(line("a", model="echo"), line("b", model="echo"))
        with pytest.raises(openai.RateLimitError) as refused:
            await house.create(file.id)
        assert refused.value.response.headers["retry-after"] == "30"
        assert (await house.client.batches.list()).data == []
        pool.release(reserved)
        assert (await house.until((await house.create(file.id)).id)).status == "completed"
        assert pool.size == 0


async def test_a_batch_that_can_never_fit_here_stays_refused(
    server: Open, world: ProviderWorld
) -> None:
    """At create the provider's refusal is passed on; later the batch has failed with both
    reasons."""
    lines = [line(str(n), model="echo") for n in range(4)]
    world.set(models={"dep-41": {"batch": False}})
    async with server(max_intake_capacity=3) as house:
        file = await house.upload(*lines)
        with pytest.raises(openai.BadRequestError, match="'echo' is not supported"):
            await house.create(file.id)
        await house.server.providers.eligibility.forget("up")
        world.set(refuse_later=True)
        ended = await house.until((await house.create(file.id)).id)
        assert ended.status == "failed"
        assert ended.errors is not None
        assert ended.errors.data is not None
        assert [p.code for p in ended.errors.data] == ["model_not_found", "capacity_exceeded"]


async def test_a_batch_that_was_accepted_comes_back_although_it_is_full_here(
    server: Open, world: ProviderWorld
) -> None:
    """It counts, so that new batches wait for it."""
    world.set(models={"dep-41": {"batch": False}}, refuse_later=True, hold="validating")
    async with server(max_intake_capacity=4) as house:
        pool = house.server.runner.intake_pool
        batch = await house.start(*(line(str(n), model="echo") for n in range(3)))
        reserved = pool.reserve(3)
        world.set(hold=None)
        ended = await house.until(batch.id)
        assert ended.status == "completed"
        assert ended.model_extra["tidemill_execution"] == "local"
        pool.release(reserved)
        assert pool.size == 0


async def test_a_cancel_meets_a_batch_on_its_way_here(server: Open, world: ProviderWorld) -> None:
    """The provider has failed it, and nobody had looked: it is cancelled where it runs by then."""
    problem = {"code": "model_not_found", "message": "The model went away.", "line": None}
    world.set(outcome={"status": "failed", "finish": 1, "problems": [problem]})
    async with server(provider_refresh_s=60.0) as house:
        batch = await house.start(
            *(line(str(n), f"!sleep 0.2 {n}", model="echo") for n in range(30))
        )
        for _ in range(4):
            world.ask("GET", f"/v1/batches/{next(iter(world.state()['batches']))}")
        assert (await house.client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
        ended = await house.until(batch.id)
        assert ended.status == "cancelled"
        counts = ended.request_counts
        assert counts is not None
        assert counts.completed + counts.failed == counts.total == 30
        assert "0" in await house.rows(ended.output_file_id)


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_a_batch_api_that_is_gone_since_it_was_asked(
    server: Open, world: ProviderWorld, status: int
) -> None:
    """The batch runs here, the provider is asked again, and the next file does not go there; where
    a provider is demanded, the answer is the one for a provider without a Batch API."""
    async with server() as house:
        early = await house.upload(line("a", model="echo"))
        there = await house.upload(line("a", model="echo"), X_Tidemill_Execution="provider")
        for route in ("batches.create", "batches.list", "files.create"):
            world.fail(route, times=-1, status=status)
        with pytest.raises(openai.APIStatusError) as refused:
            await house.create(there.id)
        assert (refused.value.status_code, refused.value.code) == (501, "batch_api_not_supported")
        with anyio.fail_after(60):
            while True:
                if house.server.providers.capability.known()["up"].state == "no":
                    break
                await anyio.sleep(0.01)
        ended = await house.until((await house.create(early.id)).id)
        assert ended.status == "completed"
        assert ended.model_extra["tidemill_execution"] == "local"
        assert await house.server.providers.eligibility.all() == []
        later = await house.upload(line("a", model="echo"))
        assert later.model_extra["tidemill_placement"]["reason"] == "up serves no batch API"


async def test_a_batch_api_that_is_gone_at_upload(server: Open, world: ProviderWorld) -> None:
    """The file is kept where its batch may run here, and refused where it may not."""
    async with server() as house:
        await house.server.providers.capability.ask("up")
        world.fail("files.create", times=-1, status=404)
        world.fail("batches.create", times=-1, status=404)
        file = await house.upload(line("a", model="echo"))
        with pytest.raises(openai.APIStatusError) as refused:
            await house.upload(line("a", model="echo"), X_Tidemill_Execution="provider")
        assert (refused.value.status_code, refused.value.code) == (501, "batch_api_not_supported")
        assert [one.id async for one in house.client.files.list()] == [file.id]
        ended = await house.until((await house.create(file.id)).id)
        assert ended.model_extra["tidemill_execution"] == "local"


async def test_a_batch_api_that_is_gone_while_a_create_waits(
    server: Open, world: ProviderWorld
) -> None:
    """The provider could not be reached, and then has no Batch API any more: it runs here."""
    world.fail("batches.create", status=503)
    async with server() as house:
        file = await house.upload(line("a", model="echo"))
        batch = await house.create(file.id)
        assert batch.status == "validating"
        for route in ("batches.create", "batches.list"):
            world.fail(route, times=-1, status=404)
        ended = await house.until(batch.id)
        assert ended.status == "completed"
        assert ended.model_extra["tidemill_execution"] == "local"
