"""What would become of a file, before anything is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.handlers.principals import key, seen_by
from tests.handlers.world import Open, World, line
from tidemill import clock
from tidemill.types import Limits

pytestmark = pytest.mark.anyio


async def _ask(world: World, data: bytes, **headers: str) -> dict[str, Any]:
    answer = await world.client.post(
        "/v1/batches/preflight",
        data={"purpose": "batch"},
        files={"file": ("in.jsonl", data)},
        headers=headers,
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_good_file_is_told_and_not_kept(world: World) -> None:
    """Placement, tokens by the model's own tokenizer, no cost where nothing is priced."""
    found = await _ask(world, line("a", "one two three") + line("b", "one"))
    assert found["ok"] is True
    assert found["lines"] == 2
    assert found["placement"]["execution"] == "local"
    [model] = found["models"]
    assert (model["model"], model["lines"]) == ("echo", 2)
    assert (model["input_tokens"], model["input_tokens_are"]) == (4, "tokenised")
    assert found["cost"]["estimate"] == "0.00"
    assert found["budget"]["ok"] is True
    for path in ("files", "batches", "usage"):
        assert (await world.client.get(f"/v1/{path}")).json()["data"] == []


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one two"}]}),
        ("/v1/completions", {"prompt": ["one two", "three"], "n": 2, "max_tokens": 5}),
        ("/v1/responses", {"input": "one two"}),
        ("/v1/embeddings", {"input": ["one two", "three"]}),
    ],
)
async def test_tokens_are_those_that_the_batch_reports(
    world: World, endpoint: str, body: dict[str, Any]
) -> None:
    """On every endpoint: the prompts exactly, the answers at most."""
    request = {
        "custom_id": "a",
        "method": "POST",
        "url": endpoint,
        "body": body | {"model": "echo"},
    }
    data = json.dumps(request).encode()
    [model] = (await _ask(world, data))["models"]
    ended = await world.finished((await world.create(data, endpoint=endpoint))["id"])
    assert model["input_tokens_are"] == "tokenised"
    assert model["input_tokens"] == ended["usage"]["input_tokens"]
    assert model["output_tokens_at_most"] >= ended["usage"]["output_tokens"]


async def test_many_lines_are_sampled(world: World) -> None:
    """What is counted for the first lines is scaled to all by their bytes, and said so."""
    found = await _ask(world, b"".join(line(f"c{n:03}", "one two") for n in range(100)))
    [model] = found["models"]
    assert model["input_tokens_are"] == "sampled"
    assert 200 <= model["input_tokens"] <= 210


async def test_every_field_is_in_the_reference(world: World) -> None:
    """Of a good file, and so of a bad one."""
    page = Path(__file__).parents[2] / "docs" / "reference" / "api.md"
    text = page.read_text("utf-8").partition("**Preflight**")[2].partition("**Usage**")[0]

    def names(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*map(names, value.values()))
        return set().union(*map(names, value)) if isinstance(value, list) else set()

    for name in names(await _ask(world, line())) - {"object"}:
        assert f"`{name}`" in text


async def test_all_problems_are_told_at_once(world: World) -> None:
    """As the upload would, but with 200: the question was answered."""
    found = await _ask(world, b'{"custom_id": 1}\n' + line("a", model="nobody") + line("b"))
    assert found["ok"] is False
    assert {problem["line"] for problem in found["problems"]} == {1, 2}
    assert (await _ask(world, b""))["problems"][0]["code"] == "empty_file"


async def test_a_place_that_cannot_be_had_is_a_problem(world: World) -> None:
    """A provider that is demanded where there is none."""
    found = await _ask(world, line(), **{"X-Tidemill-Execution": "provider"})
    assert found["ok"] is False
    assert found["problems"][0]["code"] == "batch_api_not_supported"


async def test_a_stored_file_is_examined_by_its_id(world: World) -> None:
    """The owner's only; nothing else is a file."""
    file = await world.upload(line("a", "one two"))
    asked = {"input_file_id": file["id"]}
    answer = await world.client.post("/v1/batches/preflight", json=asked)
    assert answer.json()["models"][0]["input_tokens"] == 2
    path = "/v1/batches/preflight"
    assert (await world.client.post(path, json=asked, headers=world.as_bob())).status_code == 404
    assert (await world.client.post(path, json={"input_file_id": "file-x"})).status_code == 404
    for body in (b"", b"[]", b'{"input_file_id": 3}', b"{broken"):
        refused = await world.client.post(path, content=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input_file_id")


async def test_cost_and_budget_are_estimated(open_world: Open, tmp_path: Path) -> None:
    """The estimate covers what the batch then costs, and a budget that is too small is said."""
    prices = tmp_path / "prices.json"
    prices.write_text('{"models": {"local/echo": {"input": 2, "output": 5}}}', encoding="utf-8")
    async with open_world(prices=str(prices)) as world:
        secret, record = await key(world, limits=Limits(monthly_budget=100))
        async with seen_by(world, secret) as mine:
            request = json.loads(line("a", "one two three"))
            request["body"]["max_tokens"] = 3
            data = json.dumps(request).encode()
            found = await _ask(mine, data)
            # 3 tokens in at 2, at most 3 out at 5, and at most one more for rounding.
            assert found["cost"]["estimate"] == "0.000022"
            assert found["ok"] is True
            batch = await mine.create(data)
            ended = await mine.finished(batch["id"])
            cost = float(ended["tidemill_cost"]["amount"])
            assert 0 < cost <= 0.000022
            await world.services.store.keys.change(record.id, limits=Limits(monthly_budget=30))
            found = await _ask(mine, data)
            assert (found["ok"], found["budget"]["code"]) == (False, "budget_exceeded")


async def test_the_verdict_is_that_of_the_upload_and_the_create(world: World) -> None:
    """A limit that would refuse either refuses here, to the byte, and one that would not does
    not."""
    data = line("a", "word " * 100)
    for limits, code in (
        (Limits(storage_bytes=len(data) - 1), "storage_quota_exceeded"),
        (Limits(storage_bytes=len(data)), None),
        (Limits(enqueued_lines=0), "line_limit_exceeded"),
        (Limits(enqueued_tokens=len(data) // 4 - 1), "token_limit_exceeded"),
        (Limits(enqueued_tokens=len(data) // 4), None),
    ):
        secret, _ = await key(world, limits=limits)
        async with seen_by(world, secret) as mine:
            told = (await _ask(mine, data))["budget"]
            assert (told["ok"], told["code"]) == (code is None, code)
            done = await mine.client.post(
                "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)}
            )
            if done.status_code == 200:
                asked = {"input_file_id": done.json()["id"], "endpoint": "/v1/chat/completions"}
                done = await mine.client.post("/v1/batches", json=asked)
            assert done.json().get("error", {}).get("code") == code


async def test_a_stored_file_is_not_stored_again(world: World) -> None:
    """What its owner keeps already needs no room in the quota."""
    secret, _ = await key(world, limits=Limits(storage_bytes=len(line())))
    async with seen_by(world, secret) as mine:
        file = await mine.upload()
        asked = {"input_file_id": file["id"]}
        answer = await mine.client.post("/v1/batches/preflight", json=asked)
        assert answer.json()["ok"] is True


async def test_the_end_is_expected_by_the_measured_pace(open_world: Open) -> None:
    """Nothing is promised before a line has run; afterwards also while nothing runs."""
    async with open_world() as world:
        assert (await _ask(world, line()))["expected_finish_at"] is None
        await world.finished((await world.create(line("a") + line("b")))["id"])
        status = (await world.client.get("/v1/pool/status")).json()
        assert status["drain_rate"] > 0
        before = clock.now()
        found = await _ask(world, b"".join(line(f"c{n}") for n in range(300)))
        begun = found["expected_finish_at"] - 300 / status["drain_rate"]
        assert before - 1 <= begun <= clock.now() + 1
