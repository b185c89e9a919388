"""Cases that users of batch servers reported: results."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tests.cases.register import Elsewhere, missing, untested
from tests.handlers.world import Open, World, line
from tidemill import clock
from tidemill.types import Generation, Piece

pytestmark = pytest.mark.anyio

PROVIDERS = "tests/backends/providers"
ELSEWHERE: Elsewhere = {
    # What a provider gives is normalised where it is read.
    "C49": (f"{PROVIDERS}/test_forwarded_batches.py::test_what_providers_leave_out_is_normalised",),
    "C50": (f"{PROVIDERS}/test_forwarded_batches.py::test_what_providers_leave_out_is_normalised",),
    "C55": (
        f"{PROVIDERS}/test_provider_failures.py"
        "::test_a_batch_that_the_provider_forgot_ends_with_the_reason",
        f"{PROVIDERS}/test_provider_failures.py"
        "::test_results_that_are_gone_end_in_rows_that_say_so",
    ),
}


def test_every_case_of_this_section_is_tested() -> None:
    """Here or elsewhere, by a test that is there."""
    cases = (48, 49, 50, 51, 52, 53, 54, 55, 56, 58, 60, 61)
    assert untested(sys.modules[__name__], cases, ELSEWHERE) == set()
    assert missing(ELSEWHERE) == []


async def rows(world: World, batch: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    """The rows of one result file by custom id; none where there is no file."""
    file_id = batch[f"{kind}_file_id"]
    if file_id is None:
        return {}
    content = (await world.client.get(f"/v1/files/{file_id}/content")).content
    found = [json.loads(text) for text in content.split(b"\n")[:-1]]
    by_id = {row["custom_id"]: row for row in found}
    assert len(by_id) == len(found)
    return by_id


async def ended(world: World, data: bytes, **fields: Any) -> dict[str, Any]:
    """A batch of this file in a terminal state."""
    return await until_ended(world, await world.create(data, **fields))


async def until_ended(world: World, batch: dict[str, Any]) -> dict[str, Any]:
    """The batch in a terminal state, an expired one too."""
    while batch["status"] not in ("completed", "failed", "cancelled", "expired"):
        await world.client.get(f"/v1/batches/{batch['id']}/results?wait=1&after={2**40}")
        batch = (await world.client.get(f"/v1/batches/{batch['id']}")).json()
    return batch


async def past_its_window(world: World, batch: dict[str, Any]) -> None:
    """Let the runner's clock stand at the batch's end until the runner has seen it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "now_f", lambda: float(batch["expires_at"]))
        other = await world.create(line("wakes the runner"))
        await world.client.post(f"/v1/batches/{other['id']}/cancel")
        while True:
            seen = (await world.client.get(f"/v1/batches/{batch['id']}")).json()
            if seen["status"] not in ("validating", "in_progress"):
                return
            await asyncio.sleep(0)


async def reached(world: World, batch: dict[str, Any], done: int, active: int) -> None:
    """Wait until so many lines have ended, and so many are in the engine."""
    while True:
        counts = (await world.client.get(f"/v1/batches/{batch['id']}")).json()["request_counts"]
        ended = counts["completed"] + counts["failed"]
        if ended >= done and world.engine.status().active >= active:
            return
        await asyncio.sleep(0.01)


async def reconciles(world: World, batch: dict[str, Any], total: int) -> None:
    """Each line is in exactly one file, and the counts say how many are in which."""
    good, bad = [await rows(world, batch, kind) for kind in ("output", "error")]
    assert not set(good) & set(bad)
    counts = {"total": total, "completed": len(good), "failed": len(bad)}
    assert batch["request_counts"] == counts
    assert len(good) + len(bad) == total


async def test_c48_every_line_fails(world: World) -> None:
    """The batch did its work: completed, with an error file alone."""
    batch = await ended(world, line("a", "!status 400") + line("b", "!status 422"))
    assert (batch["status"], batch["output_file_id"]) == ("completed", None)
    assert set(await rows(world, batch, "error")) == {"a", "b"}
    assert batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}


async def test_c49_a_clean_batch_has_no_error_file(world: World) -> None:
    """Null, not an empty text and not an empty file. A provider's: see ELSEWHERE."""
    batch = await ended(world, line())
    assert batch["error_file_id"] is None


async def test_c51_an_id_can_be_downloaded_when_it_is_shown(world: World) -> None:
    """By the very next request, for whoever polls fastest."""

    async def poll(n: int) -> None:
        batch = await world.create(line("a", f"text {n}") + line("b", "!status 400"))
        while batch["output_file_id"] is None:
            batch = (await world.client.get(f"/v1/batches/{batch['id']}")).json()
        for kind, name in (("output", "a"), ("error", "b")):
            assert set(await rows(world, batch, kind)) == {name}

    await asyncio.gather(*(poll(n) for n in range(20)))


async def test_c52_a_body_is_a_completion(world: World) -> None:
    """Not the request again."""
    batch = await ended(world, line("a", "high water"))
    body = (await rows(world, batch, "output"))["a"]["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "high water",
        "refusal": None,
    }
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 2
    assert "messages" not in body


async def test_c53_refused_or_never_run(world: World) -> None:
    """What ran has a response and no error; what never ran has it the other way round."""
    batch = await ended(world, line("refused", "!status 418") + line("long", "w " * 140_000))
    found = await rows(world, batch, "error")
    assert found["refused"]["error"] is None
    assert found["refused"]["response"]["status_code"] == 418
    assert found["long"]["response"] is None
    assert found["long"]["error"]["code"] == "context_length_exceeded"


async def test_c54_an_expired_batch_keeps_what_was_finished(open_world: Open) -> None:
    """Settled, counted, and downloadable."""
    async with open_world(batch_local_concurrency=2) as world:
        batch = await world.create(line("a") + line("b") + line("c", "!wait c54 x"))
        await reached(world, batch, 2, 1)
        await past_its_window(world, batch)
        world.engine.gate("c54").set()
        batch = await until_ended(world, batch)
        late = await world.create(
            b"".join(line(str(n), f"!wait late {n}" if n > 1 else "x") for n in range(30))
        )
        await reached(world, late, 2, 2)
        await past_its_window(world, late)
        world.engine.gate("late").set()
        late = await until_ended(world, late)
        assert (batch["status"], late["status"]) == ("expired", "expired")
        assert set(await rows(world, batch, "output")) == {"a", "b", "c"}
        good, bad = await rows(world, late, "output"), await rows(world, late, "error")
        assert set(good) == {"0", "1", "2", "3"}
        assert {row["error"]["code"] for row in bad.values()} == {"batch_expired"}
        assert {row["response"] for row in bad.values()} == {None}
        assert late["usage"]["output_tokens"] == len(good)
        await reconciles(world, late, 30)


@pytest.mark.parametrize("status", [400, 403, 404, 422])
async def test_c56_the_status_of_a_failure_reaches_its_row(world: World, status: int) -> None:
    """With its body, which is the envelope."""
    batch = await ended(world, line("a", f"!status {status}"))
    response = (await rows(world, batch, "error"))["a"]["response"]
    assert response["status_code"] == status
    assert set(response["body"]["error"]) == {"message", "type", "param", "code"}
    assert response["body"]["error"]["code"] == f"status_{status}"


async def test_c58_what_was_written_can_be_read(world: World) -> None:
    """On the next call, retrieved, listed and downloaded, ten at once."""

    async def write(n: int) -> None:
        file = await world.upload(line(str(n)))
        assert (await world.client.get(f"/v1/files/{file['id']}")).json() == file
        content = await world.client.get(f"/v1/files/{file['id']}/content")
        assert content.content == line(str(n))
        listed = (await world.client.get("/v1/files")).json()["data"]
        assert file["id"] in {one["id"] for one in listed}
        asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions"}
        batch = (await world.client.post("/v1/batches", json=asked)).json()
        again = await world.client.get(f"/v1/batches/{batch['id']}")
        assert (again.status_code, again.json()["created_at"]) == (200, batch["created_at"])
        listed = (await world.client.get("/v1/batches")).json()["data"]
        assert batch["id"] in {one["id"] for one in listed}

    await asyncio.gather(*(write(n) for n in range(10)))


async def test_c60_counts_reconcile_in_every_end(open_world: Open) -> None:
    """Completed, cancelled, expired: nothing is lost and nothing is there twice. A batch that
    failed ran no line and counts none."""
    mixed = b"".join(line(str(n), "!status 400" if n % 3 else "x") for n in range(40))

    def slow(gate: str) -> bytes:
        return mixed + b"".join(line(f"s{n}", f"!wait {gate} {n}") for n in range(10))

    async with open_world(batch_local_concurrency=2) as world:
        completed = await ended(world, mixed)
        assert completed["status"] == "completed"
        await reconciles(world, completed, 40)
        expired = await world.create(slow("expired"))
        await reached(world, expired, 40, 2)
        await past_its_window(world, expired)
        world.engine.gate("expired").set()
        expired = await until_ended(world, expired)
        assert expired["status"] == "expired"
        await reconciles(world, expired, 50)
        batch = await world.create(slow("cancelled"))
        await reached(world, batch, 40, 2)
        await world.client.post(f"/v1/batches/{batch['id']}/cancel")
        world.engine.gate("cancelled").set()
        cancelled = await world.finished(batch["id"])
        assert cancelled["status"] == "cancelled"
        await reconciles(world, cancelled, 50)
    async with open_world(validation="batch") as world:
        failed = await ended(world, line() + b"[1]\n")
        assert failed["status"] == "failed"
        assert failed["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
        assert (failed["output_file_id"], failed["error_file_id"]) == (None, None)


async def test_c61_finalizing_and_reasoning_tokens(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the last line and the end a poll sees ``finalizing``; what each line thought is in
    its row, and the sum on the batch."""
    batches, here, go = world.services.store.batches, asyncio.Event(), asyncio.Event()
    move, generate = batches.move, world.engine.generate

    async def thinking(generation: Generation) -> AsyncIterator[Piece]:
        async for piece in generate(generation):
            usage = piece.usage
            if usage is not None:
                thought = msgspec.structs.replace(usage, output=usage.output + 5, reasoning=5)
                piece = msgspec.structs.replace(piece, usage=thought)
            yield piece

    async def held(seq: int, frm: Any, to: Any, **more: Any) -> Any:
        if to == "completed":
            here.set()
            await go.wait()
        return await move(seq, frm, to, **more)

    monkeypatch.setattr(batches, "move", held)
    monkeypatch.setattr(world.engine, "generate", thinking)
    batch = await world.create(line("a", "x") + line("b", "y z"))
    await here.wait()
    seen = (await world.client.get(f"/v1/batches/{batch['id']}")).json()
    assert (seen["status"], seen["output_file_id"]) == ("finalizing", None)
    assert seen["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    go.set()
    done = await world.finished(batch["id"])
    assert done["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 13,
        "output_tokens_details": {"reasoning_tokens": 10},
        "total_tokens": 16,
    }
    for row in (await rows(world, done, "output")).values():
        usage = row["response"]["body"]["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 5
    assert done["finalizing_at"] <= done["completed_at"]
