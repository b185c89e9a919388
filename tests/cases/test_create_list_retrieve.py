"""Cases that users of batch servers reported: create, list, retrieve."""

from __future__ import annotations

import json
import sys
from typing import Any, get_args

import pytest
from openai.types import Batch

from tests.cases.register import Elsewhere, missing, untested
from tests.handlers.world import Open, World, line

pytestmark = pytest.mark.anyio

WAITS = line(text="!wait for ever")

ELSEWHERE: Elsewhere = {
    "C40": (
        "tests/handlers/test_azure.py::test_the_whole_life_of_a_batch",
        "tests/handlers/test_access.py::test_every_route_has_a_row",
    ),
    "C42": (
        "tests/handlers/test_files.py::test_unknown_files",
        "tests/handlers/test_batches.py::test_unknown_batches",
        "tests/handlers/test_batches.py::test_unknown_input_files",
        "tests/handlers/test_wire.py::test_hostile_urls",
    ),
}


def test_every_case_of_this_section_is_tested() -> None:
    """Here or elsewhere, by a test that is there."""
    cases = (28, 29, 35, 37, 39, 40, 42, 44, 45, 97, 98, 101)
    assert untested(sys.modules[__name__], cases, ELSEWHERE) == set()
    assert missing(ELSEWHERE) == []


async def ask(world: World, **fields: Any) -> tuple[int, dict[str, Any]]:
    """Create a batch of a new file."""
    file = await world.upload()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", **fields}
    answer = await world.client.post("/v1/batches", json=asked)
    return answer.status_code, answer.json()


async def walk(world: World, path: str, limit: int, **params: Any) -> list[list[str]]:
    """The ids of all pages, as the SDKs walk them: by the last id while ``has_more``."""
    pages: list[list[str]] = []
    after: dict[str, str] = {}
    while True:
        answer = await world.client.get(path, params={"limit": limit, **params, **after})
        page = answer.json()
        pages.append([item["id"] for item in page["data"]])
        assert page["data"] or not page["has_more"], "an empty page that promises more"
        if not page["has_more"]:
            return pages
        after = {"after": pages[-1][-1]}


async def test_c28_json_is_the_only_body(world: World) -> None:
    """A form is no JSON, and a field of a wrong type is named."""
    form = await world.client.post("/v1/batches", data={"endpoint": "/v1/chat/completions"})
    assert (form.status_code, form.json()["error"]["code"]) == (400, "invalid_json")
    for name in ("input_file_id", "endpoint", "completion_window", "metadata", "temperature"):
        for value in (True, ["x"]):
            status, body = await ask(world, **{name: value})
            assert (status, body["error"]["param"]) == (400, name)
            assert body["error"]["code"] == "invalid_type"


async def test_c29_metadata(world: World) -> None:
    """Null and none are fine; what is no small table of texts is refused by name."""
    for fine in ({}, {"metadata": None}, {"metadata": {"k" * 64: "é" * 512}}):
        status, batch = await ask(world, **fine)
        assert (status, batch["metadata"]) == (200, fine.get("metadata"))
    for wrong, param in (
        ("text", "metadata"),
        ({str(n): "v" for n in range(17)}, "metadata"),
        ({"k" * 65: "v"}, "metadata"),
        ({"k": "v" * 513}, "metadata.k"),
        ({"k": 5}, "metadata.k"),
    ):
        status, body = await ask(world, metadata=wrong)
        assert (status, body["error"]["param"]) == (400, param)


async def test_c35_every_field_is_there(world: World) -> None:
    """All that the SDK's type names, null where unset; and no other status than its eight."""
    statuses = set(get_args(Batch.model_fields["status"].annotation))
    assert len(statuses) == 8
    _, new = await ask(world)
    ended = await world.finished(new["id"])
    waiting = await world.create(WAITS)
    cancelled = (await world.client.post(f"/v1/batches/{waiting['id']}/cancel")).json()
    listed = (await world.client.get("/v1/batches")).json()["data"]
    for batch in (new, ended, cancelled, *listed):
        assert set(Batch.model_fields) <= set(batch)
        assert batch["status"] in statuses
        assert "" not in batch.values()
        Batch.model_validate(batch, strict=True)


async def test_c37_a_row_has_exactly_its_fields(world: World) -> None:
    """Of an answer, of a refusal, and of a line that never ran; a body is an object."""
    data = line("ok") + line("refused", "!status 418") + line("long", "w " * 140_000)
    batch = await world.finished((await world.create(data))["id"])
    rows = {}
    for file_id in (batch["output_file_id"], batch["error_file_id"]):
        content = (await world.client.get(f"/v1/files/{file_id}/content")).content
        rows.update({(row := json.loads(text))["custom_id"]: row for text in content.splitlines()})
    assert set(rows) == {"ok", "refused", "long"}
    for row in rows.values():
        assert set(row) == {"id", "custom_id", "response", "error"}
    for name in ("ok", "refused"):
        assert set(rows[name]["response"]) == {"status_code", "request_id", "body"}
        assert isinstance(rows[name]["response"]["body"], dict)
    assert set(rows["long"]["error"]) == {"code", "message"}


async def test_c39_an_unknown_model(world: World) -> None:
    """Before anything runs: the model, the line and its custom_id are named."""
    answer = await world.client.post(
        "/v1/files",
        data={"purpose": "batch"},
        files={"file": ("in.jsonl", line("a") + line("mine", model="gpt-9"))},
    )
    assert answer.status_code == 400
    [problem] = answer.json()["error"]["errors"]["data"]
    assert (problem["code"], problem["line"]) == ("model_not_found", 2)
    assert "gpt-9" in problem["message"]
    assert "mine" in problem["message"]


async def _pool(world: World) -> dict[str, int]:
    status: dict[str, int] = (await world.client.get("/v1/pool/status")).json()
    return {name: status[name] for name in ("intake_pool_size", "active_batches")}


@pytest.mark.parametrize("headers", [{"x-stainless-retry-count": "1"}, {"Idempotency-Key": "once"}])
async def test_c44_a_create_whose_answer_was_lost(
    open_world: Open, headers: dict[str, str]
) -> None:
    """One batch, also when it has completed before the SDK sends its create again; and what was
    held for the second one is let go of. While the batch is active: see test_a_repeated_create."""
    async with open_world(max_intake_capacity=1) as world:
        file = await world.upload()
        fields = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions"}
        first = await world.client.post(
            "/v1/batches", json=fields, headers={"Idempotency-Key": "once"}
        )
        await world.finished(first.json()["id"])
        before = await _pool(world)
        for _ in range(2):
            again = await world.client.post("/v1/batches", json=fields, headers=headers)
            assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
        assert len((await world.client.get("/v1/batches")).json()["data"]) == 1
        assert await _pool(world) == before
        another = await world.create()
        assert (await world.finished(another["id"]))["status"] == "completed"


@pytest.mark.parametrize("headers", [{"x-stainless-retry-count": "1"}, {"Idempotency-Key": "once"}])
async def test_c44_a_repeated_create_needs_no_room(
    open_world: Open, headers: dict[str, str]
) -> None:
    """The pool is full of the very batch that is asked for again."""
    async with open_world(max_intake_capacity=2, batch_local_concurrency=1) as world:
        file = await world.upload(WAITS + line("b", "!wait for ever"))
        fields = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions"}
        first = await world.client.post(
            "/v1/batches", json=fields, headers={"Idempotency-Key": "once"}
        )
        again = await world.client.post("/v1/batches", json=fields, headers=headers)
        assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])


async def test_c44_a_key_that_was_used_for_another_create(world: World) -> None:
    """It would be the wrong batch's results, and this input would never run."""
    headers = {"Idempotency-Key": "mine"}
    answers = []
    for _ in range(2):
        file = await world.upload()
        fields = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions"}
        answers.append(await world.client.post("/v1/batches", json=fields, headers=headers))
    first, second = answers
    assert (first.status_code, second.status_code) == (200, 400)
    error = second.json()["error"]
    assert (error["code"], error["param"]) == ("idempotency_key_reused", "Idempotency-Key")
    assert first.json()["id"] in error["message"]


async def test_c45_a_batch_that_is_doomed(open_world: Open) -> None:
    """One that waiting would not help is not left to wait: it has failed, and says why."""
    async with open_world(max_intake_capacity=2) as world:
        batch = await world.create(line("a") + line("b") + line("c"))
        failed = await world.finished(batch["id"])
        assert (failed["status"], failed["output_file_id"]) == ("failed", None)
        [problem] = failed["errors"]["data"]
        assert set(problem) == {"code", "message", "line", "param"}
        assert problem["code"] == "capacity_exceeded"
        assert "3" in problem["message"]


async def test_c97_pages_while_batches_arrive(world: World) -> None:
    """99 batches in pages of 10: each once, newest first, whatever is created meanwhile."""
    made = [(await world.create())["id"] for _ in range(99)]
    seen: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = (await world.client.get("/v1/batches", params={"limit": 10, **after})).json()
        seen += [batch["id"] for batch in page["data"]]
        if not page["has_more"]:
            break
        await world.create()
        after = {"after": page["data"][-1]["id"]}
    assert seen == made[::-1]


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 7])
async def test_c98_a_page_that_promises_more_is_followed_by_some(world: World, limit: int) -> None:
    """Also where the last page is full; and files that are deleted on the way cost no page."""
    for _ in range(6):
        await world.upload()
    ids = [id for page in await walk(world, "/v1/files", limit) for id in page]
    assert (len(ids), len(set(ids))) == (6, 6)
    assert [id for page in await walk(world, "/v1/files", limit, order="asc") for id in page] == (
        ids[::-1]
    )
    page = (await world.client.get("/v1/files", params={"limit": limit})).json()
    gone = 0
    while True:
        for file in page["data"]:
            await world.client.delete(f"/v1/files/{file['id']}")
            gone += 1
        if not page["has_more"]:
            break
        after = page["data"][-1]["id"]
        page = (await world.client.get("/v1/files", params={"limit": limit, "after": after})).json()
    assert gone == 6


async def test_c101_no_parameters(world: World) -> None:
    """The 20 newest and a cursor to the rest."""
    made = [(await world.create())["id"] for _ in range(21)][::-1]
    page = (await world.client.get("/v1/batches")).json()
    assert [batch["id"] for batch in page["data"]] == made[:20]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (made[0], made[19], True)
    rest = (await world.client.get("/v1/batches", params={"after": page["last_id"]})).json()
    assert ([batch["id"] for batch in rest["data"]], rest["has_more"]) == (made[20:], False)
