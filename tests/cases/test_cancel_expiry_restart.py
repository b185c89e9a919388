"""Cases that users of batch servers reported: cancel, expiry, restart."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.cases.register import Elsewhere, missing, untested
from tests.cases.test_results import past_its_window, reconciles, rows, until_ended
from tests.handlers.world import Open, World, line
from tidemill.types import TERMINAL

pytestmark = pytest.mark.anyio

ELSEWHERE: Elsewhere = {
    "C65": (
        "tests/handlers/test_batches.py::test_cancel",
        "tests/handlers/test_batches.py::test_cancel_of_a_finished_batch",
    ),
    "C75": (
        "tests/crash/test_kill_points.py::test_killed_here_nothing_is_lost",
        "tests/crash/test_kill_points.py::test_every_point_of_the_local_path_is_killed",
    ),
}


def test_every_case_of_this_section_is_tested() -> None:
    """Here or elsewhere, by a test that is there."""
    cases = (64, 65, 67, 71, 73, 75, 77)
    assert untested(sys.modules[__name__], cases, ELSEWHERE) == set()
    assert missing(ELSEWHERE) == []


async def under_way(world: World, batch: dict[str, Any], n: int) -> None:
    """Wait until ``n`` lines are in the engine."""
    while world.engine.status().active < n:
        await world.client.get(f"/v1/batches/{batch['id']}/results?wait=1")


async def cancel(world: World, batch: dict[str, Any]) -> None:
    answer = await world.client.post(f"/v1/batches/{batch['id']}/cancel")
    assert (answer.status_code, answer.json()["status"]) == (200, "cancelling")


async def test_c64_cancel_in_mid_run(open_world: Open) -> None:
    """Lines in flight finish and are kept, the others say that they were cancelled."""
    async with open_world(batch_local_concurrency=3) as world:
        data = b"".join(line(str(n), f"!wait c64 {n}") for n in range(20))
        batch = await world.create(data)
        await under_way(world, batch, 3)
        await cancel(world, batch)
        world.engine.gate("c64").set()
        end = await world.finished(batch["id"])
        assert (end["status"], end["completed_at"]) == ("cancelled", None)
        assert end["cancelled_at"] >= end["cancelling_at"]
        await reconciles(world, end, 20)
        assert set(await rows(world, end, "output")) == {"0", "1", "2"}
        bad = await rows(world, end, "error")
        assert {row["error"]["code"] for row in bad.values()} == {"batch_cancelled"}


async def test_c67_results_after_a_cancel_are_kept_and_billed(open_world: Open) -> None:
    """Once: usage, ledger and rows agree."""
    async with open_world(batch_local_concurrency=2) as world:
        batch = await world.create(
            line("a", "!wait c67 one two") + line("b", "!wait c67 one") + line("c")
        )
        await under_way(world, batch, 2)
        await cancel(world, batch)
        world.engine.gate("c67").set()
        end = await world.finished(batch["id"])
        good = await rows(world, end, "output")
        assert set(good) == {"a", "b"}
        billed = sum(row["response"]["body"]["usage"]["total_tokens"] for row in good.values())
        assert end["usage"]["total_tokens"] == billed > 0
        record = await world.services.store.batches.get(batch["id"], None)
        assert record is not None
        booked = [
            row
            for row in await world.services.store.ledger.usage(record.owner, 0, 2**40)
            if row.batch_id == batch["id"]
        ]
        assert {row.custom_id for row in booked} == {"a", "b"}
        assert len(booked) == 2


async def test_c71_cancelled_and_never_polled_again(open_world: Open) -> None:
    """It ends all the same; only the store is looked at."""
    async with open_world(batch_local_concurrency=1) as world:
        batch = await world.create(line("a", "!wait c71") + line("b") + line("c"))
        await under_way(world, batch, 1)
        await cancel(world, batch)
        world.engine.gate("c71").set()
        store, wait_rows = world.services.store, world.services.wait_rows
        assert wait_rows is not None
        while True:
            record = await store.batches.get(batch["id"], None)
            assert record is not None
            if record.status in TERMINAL:
                break
            await wait_rows(record.seq, 1.0)
        assert (record.status, record.completed, record.failed) == ("cancelled", 1, 2)


async def test_c73_no_line_starts_after_the_deadline(open_world: Open) -> None:
    """The one that runs may finish; those behind it are not sent, and say so."""
    async with open_world(window_seconds=600, batch_local_concurrency=1) as world:
        batch = await world.create(
            line("runs", "!wait c73 x") + line("late", "w w w w w") + line("later")
        )
        await under_way(world, batch, 1)
        await past_its_window(world, batch)
        world.engine.gate("c73").set()
        end = await until_ended(world, batch)
        assert end["status"] == "expired"
        assert end["expires_at"] == end["created_at"] + 600
        assert set(await rows(world, end, "output")) == {"runs"}
        bad = await rows(world, end, "error")
        assert {row["custom_id"] for row in bad.values()} == {"late", "later"}
        assert {row["error"]["code"] for row in bad.values()} == {"batch_expired"}
        assert world.engine.status().tokens_prefilled == len(b"!wait c73 x".split())


async def test_c77_a_restart_runs_what_is_unanswered(open_world: Open) -> None:
    """And nothing else: answered lines are neither run nor booked again. With kill -9: see C75."""
    async with open_world(batch_local_concurrency=2) as world:
        batch = await world.create(
            b"".join(line(str(n), "one" if n < 6 else f"!wait c77 {n}") for n in range(10))
        )
        await under_way(world, batch, 2)
        while (await world.client.get(f"/v1/batches/{batch['id']}")).json()["request_counts"][
            "completed"
        ] < 6:
            await world.client.get(f"/v1/batches/{batch['id']}/results?wait=1&after={2**40}")
        before = await rows_so_far(world, batch)
    async with open_world(batch_local_concurrency=2) as world:
        world.engine.gate("c77").set()
        end = await world.finished(batch["id"])
        assert end["status"] == "completed"
        await reconciles(world, end, 10)
        after = await rows_so_far(world, batch)
        assert after[:6] == before
        # Six lines were answered before the restart; only four have been read by this engine.
        assert world.engine.status().tokens_prefilled == 4 * 3
        record = await world.services.store.batches.get(batch["id"], None)
        assert record is not None
        booked = await world.services.store.ledger.usage(record.owner, 0, 2**40)
        assert sorted(row.custom_id or "" for row in booked) == sorted(str(n) for n in range(10))


async def rows_so_far(world: World, batch: dict[str, Any]) -> list[bytes]:
    answer = await world.client.get(f"/v1/batches/{batch['id']}/results")
    return answer.content.splitlines()
