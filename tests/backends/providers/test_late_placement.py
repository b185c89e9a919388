"""A file that is checked by its batch is placed then: its models are not known before."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from worlds.house import Open, line
from worlds.provider import ProviderWorld

pytestmark = pytest.mark.anyio

LATE = {"X_Tidemill_Validation": "batch"}


async def test_it_goes_where_the_discount_is(server: Open, world: ProviderWorld) -> None:
    """The same create, the same names; the file says from then on where it belongs."""
    async with server() as house:
        file = await house.upload(line("a"), line("b", model="small"), **LATE)
        assert file.model_extra["tidemill_execution"] == "local"
        assert world.calls("files.create") == 0
        ended = await house.until((await house.create(file.id)).id)
        assert (ended.status, ended.model_extra["tidemill_execution"]) == ("completed", "provider")
        assert ended.request_counts is not None
        assert ended.request_counts.completed == 2
        rows = await house.rows(ended.output_file_id)
        assert {row["response"]["body"]["model"] for row in rows.values()} == {"big", "small"}
        again = await house.client.files.retrieve(file.id)
        assert (again.model_extra or {})["tidemill_execution"] == "provider"
        assert house.server.runner.intake_pool.size == 0
        assert house.server.runner.active_batches == 0


async def test_what_runs_here_runs_here(server: Open, world: ProviderWorld) -> None:
    """Asked for, or because no provider batches the model."""
    async with server({"models": {"big": {"batch": "gpt-4.1"}, "echo": "dep-41"}}) as house:
        file = await house.upload(line("a", model="echo"), X_Tidemill_Execution="local", **LATE)
        ended = await house.until((await house.create(file.id)).id)
        assert (ended.status, ended.model_extra["tidemill_execution"]) == ("completed", "local")
    assert world.calls("batches.create") == 0


@pytest.mark.parametrize(
    ("lines", "headers", "code"),
    [
        ([line("a"), b"not json\n"], {}, "invalid_json_line"),
        ([line("a", model="nobody")], {}, "model_not_found"),
        ([line("a"), line("b", model="echo")], {}, "model_not_found"),
        (
            [line("a", model="echo")],
            {"X_Tidemill_Execution": "provider"},
            "model_not_available_for_batch",
        ),
    ],
)
async def test_a_file_that_can_run_nowhere_fails_its_batch(
    server: Open, world: ProviderWorld, lines: list[bytes], headers: dict[str, Any], code: str
) -> None:
    """With what an upload would have been refused for; nothing reaches a provider."""
    async with server({"models": {"big": {"batch": "gpt-4.1"}}}) as house:
        file = await house.upload(*lines, **headers, **LATE)
        ended = await house.until((await house.create(file.id)).id)
        assert ended.status == "failed"
        assert ended.errors is not None
        assert ended.errors.data is not None
        assert ended.errors.data[0].code == code
    assert world.calls("files.create") == 0


async def test_a_provider_that_is_none_is_refused_at_once(
    server: Open, world: ProviderWorld
) -> None:
    """403 at upload, whenever the check is."""
    async with server() as house:
        with pytest.raises(openai.PermissionDeniedError):
            await house.upload(line("a"), X_Tidemill_Provider="nobody", **LATE)
        file = await house.upload(line("a", model="echo"), X_Tidemill_Provider="up", **LATE)
        assert (await house.until((await house.create(file.id)).id)).status == "completed"


async def test_one_that_its_provider_refuses_comes_back(server: Open, world: ProviderWorld) -> None:
    """As any other."""
    world.set(models={"dep-41": {"batch": False}})
    async with server() as house:
        file = await house.upload(line("a", model="echo"), **LATE)
        ended = await house.until((await house.create(file.id)).id)
        assert (ended.status, ended.model_extra["tidemill_execution"]) == ("completed", "local")
    assert world.calls("batches.create") == 1


async def test_a_cap_keeps_it_here(server: Open, world: ProviderWorld) -> None:
    """Nothing could be estimated at create, and a provider stops at no cap."""
    async with server() as house:
        for model, status in (("echo", "completed"), ("small", "failed")):
            file = await house.upload(line("a", model=model), **LATE)
            batch = await house.create(file.id, extra_body={"max_cost": "5"})
            assert (await house.until(batch.id)).status == status
    assert world.calls("files.create") == 0
