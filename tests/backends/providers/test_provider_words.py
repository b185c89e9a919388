"""What a provider says is passed on as it was said, but for our names of things in it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from worlds.house import Open, line
from worlds.provider import ProviderWorld

from tidemill.backends.events import Events

pytestmark = pytest.mark.anyio

STANDARD = {"models": {"big": {"standard": "gpt-4.1"}}}
HELLO: Any = [{"role": "user", "content": "hello there"}]
FILTERED = {"hate": {"filtered": True, "severity": "high"}}


def _error(of: str, **more: Any) -> dict[str, Any]:
    """An error as Azure gives one: fields that OpenAI does not have, and no null ones."""
    return {
        "message": f"The answer of {of} was filtered.",
        "type": "odd",
        "param": "prompt",
        "code": "content_filter",
        "status": 400,
        "innererror": {"code": "ResponsibleAIPolicyViolation", "about": of, "result": FILTERED},
        **more,
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503, 529])
async def test_an_error_of_an_interactive_request(
    server: Open, world: ProviderWorld, status: int, stream: bool
) -> None:
    """Its status and its whole body; the model has our name."""
    world.fail("chat.completions", status=status, body={"error": _error("gpt-4.1")})
    async with server(STANDARD) as house:
        with pytest.raises(openai.APIStatusError) as refused:
            await house.client.chat.completions.create(model="big", messages=HELLO, stream=stream)
        assert refused.value.status_code == status
        assert refused.value.response.json() == {"error": _error("big")}


@pytest.mark.parametrize("status", [400, 500])
async def test_an_error_of_a_line(server: Open, world: ProviderWorld, status: int) -> None:
    """In its row, after the last attempt, with the provider's id of that."""
    said = {"error": _error("gpt-4.1")}
    given = {"x-request-id": "req_theirs"}
    world.fail("chat.completions", status=status, times=-1, body=said, headers=given)
    async with server(STANDARD, max_line_attempts=2) as house:
        ended = await house.until((await house.start(line("a", model="big"))).id)
        response = (await house.rows(ended.error_file_id))["a"]["response"]
        assert (response["status_code"], response["body"]) == (status, {"error": _error("big")})
        assert response["request_id"] == "req_theirs"


async def test_what_is_no_error_object_is_told_in_our_words(
    server: Open, world: ProviderWorld
) -> None:
    """As what stands in front of a provider answers; a refused credential is ours to mend."""
    async with server(STANDARD) as house:
        for status, body, code in (
            (503, "<html>down</html>", "provider_unavailable"),
            (401, {"error": _error("gpt-4.1", code=None)}, "provider_credential"),
        ):
            world.fail("chat.completions", status=status, body=body)
            with pytest.raises(openai.InternalServerError, match="Provider 'up'") as refused:
                await house.client.chat.completions.create(model="big", messages=HELLO)
            assert (refused.value.status_code, refused.value.code) == (502, code)
            assert "gpt-4.1" not in refused.value.message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", ["<html>hello</html>", "", [1, 2]])
async def test_a_success_that_is_no_answer(
    server: Open, world: ProviderWorld, body: Any, stream: bool
) -> None:
    """As a proxy in front of a provider gives one: 502, and a line tries again."""
    world.fail("chat.completions", status=200, times=2, body=body)
    async with server(STANDARD) as house:
        with pytest.raises(openai.InternalServerError, match="no answer") as refused:
            await house.client.chat.completions.create(model="big", messages=HELLO, stream=stream)
        assert (refused.value.status_code, refused.value.code) == (502, "provider_unavailable")
        ended = await house.until((await house.start(line("a", model="big"))).id)
        assert ended.request_counts.model_dump() == {"total": 1, "completed": 1, "failed": 0}
        assert world.calls("chat.completions") == 3


def test_a_stream_may_end_without_its_last_blank_line() -> None:
    """The event is whole; half of one is nothing."""
    for rest, passed in (
        (b'data: {"choices": [], "usage": {"prompt_tokens": 3}}', 1),
        (b"data: [DONE]", 1),
        (b'data: {"choi', 0),
        (b'{"error": {}}', 0),
        (b"\r\n", 0),
    ):
        events = Events(None, wants_usage=True)
        assert events.feed(rest) == []
        assert len(events.finish()) == passed
        assert events.ended is (b"DONE" in rest)
        assert events.usage.input == (3 if b"usage" in rest else 0)


def test_an_error_in_the_middle_of_a_stream() -> None:
    """The events before it are left as they are."""
    events = Events("big", wants_usage=True, names={"big": "gpt-4.1"})
    text = {"model": "gpt-4.1", "choices": [{"delta": {"content": "gpt-4.1"}}]}
    wrong = {"type": "error", "message": "No gpt-4.1.", "code": "odd"}
    pieces = [f"data: {json.dumps(one)}\n\n".encode() for one in (text, wrong)]
    said, failed = events.feed(b"".join(pieces))
    assert json.loads(said[6:]) == text | {"model": "big"}
    assert json.loads(failed[6:]) == wrong | {"message": "No big."}


async def test_a_refused_upload_and_a_refused_create(server: Open, world: ProviderWorld) -> None:
    """Whole, with our names of the model and of the file."""
    async with server() as house:
        world.fail("files.create", status=422, body={"error": _error("gpt-4.1")})
        with pytest.raises(openai.UnprocessableEntityError) as refused:
            await house.upload(line("a"))
        assert refused.value.response.json() == {"error": _error("big")}
        file = await house.upload(line("a"))
        (theirs,) = world.state()["files"]
        about = {"about": [theirs, "gpt-4.1"]}
        world.fail("batches.create", status=400, body={"error": _error("gpt-4.1", **about)})
        with pytest.raises(openai.BadRequestError) as refused:
            await house.create(file.id)
        expected = _error("big", about=[file.id, "big"])
        assert refused.value.response.json() == {"error": expected}


async def test_a_provider_that_speaks_of_its_ids(server: Open, world: ProviderWorld) -> None:
    """Ours are in their place: in a batch's errors and in its rows."""
    world.set(hold="in_progress")
    async with server() as house:
        batch = await house.start(line("a"), line("b"))
        state = world.state()
        (there,), (file,) = state["batches"], state["files"]
        said = f"Line of {file} in {there}: no gpt-4.1."
        problem = {"code": "odd", "message": said, "line": 1, "param": None}
        row = {"id": "x", "custom_id": "a", "error": None}
        row["response"] = {"status_code": 400, "body": {"error": {"message": said}}}  # type: ignore[assignment]
        world.fail("files.content", status=200, times=-1, body=row)
        world.set(hold=None, outcome={"status": "failed", "finish": 1, "problems": [problem]})
        ended = await house.until(batch.id)
        assert ended.errors is not None
        assert ended.errors.data is not None
        heard = f"Line of {batch.input_file_id} in {batch.id}: no big."
        assert [error.message for error in ended.errors.data] == [heard]
        rows = await house.rows(ended.error_file_id)
        assert rows["a"]["response"]["body"]["error"]["message"] == heard


async def test_a_provider_that_forgot_a_batch(server: Open, world: ProviderWorld) -> None:
    """It says so of its own id; the client reads of its own."""
    world.set(hold="in_progress")
    async with server() as house:
        batch = await house.start(line("a"))
        await house.until(batch.id, "in_progress")
        world.set(forget=list(world.state()["batches"]))
        ended = await house.until(batch.id)
        assert ended.errors is not None
        assert ended.errors.data is not None
        assert f"No batch found with id '{batch.id}'" in (ended.errors.data[0].message or "")


async def test_what_is_remembered_of_a_refusal(server: Open, world: ProviderWorld) -> None:
    """The reason that ``/v1/providers`` and the placement of a later file show."""
    world.set(models={"dep-41": {"batch": False}})
    async with server() as house:
        batch = await house.start(line("a", model="echo"))
        assert batch.model_extra["tidemill_execution"] == "local"
        (known,) = (await house.server.providers.report())[0]["not_batched"]
        assert known["model"] == "echo"
        assert known["reason"] == "The model 'echo' is not supported by the Batch API."
        shown = await house.client.files.retrieve(batch.input_file_id)
        assert "dep-41" not in shown.to_json() + batch.to_json()
