"""What a provider says with our credential in it is passed on without it, and so stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from worlds.house import House, Open, line
from worlds.provider import API_KEY, ProviderWorld

from tidemill.backends.events import Events

pytestmark = pytest.mark.anyio

SAID = f"Incorrect API key provided: {API_KEY}."
HEARD = "Incorrect API key provided: [credential]."
ERROR = {"message": SAID, "type": "invalid_request_error", "param": None, "code": "odd"}
REFUSED = {"status_code": 401, "request_id": "r", "body": {"error": ERROR}}


def _written(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def _nowhere(house: House, folder: Path) -> None:
    """Neither in the store, which holds what is said, nor in what a client is shown."""
    batches = [item.to_json() async for item in house.client.batches.list()]
    written = _written(folder)
    assert any(HEARD.encode() in content for content in written.values())
    for name, content in written.items():
        assert API_KEY.encode() not in content, name
    assert API_KEY not in "".join(batches)


@pytest.mark.parametrize(
    ("response", "error"), [(REFUSED, None), (None, {"code": "odd", "message": SAID})]
)
async def test_the_rows_of_a_batch(
    server: Open, world: ProviderWorld, tmp_path: Path, response: Any, error: Any
) -> None:
    """Whether the line ran there or not."""
    row = {"id": "x", "custom_id": "a", "response": response, "error": error}
    world.fail("files.content", status=200, times=-1, body=row)
    async with server() as house:
        ended = await house.until((await house.start(line("a"))).id)
        rows = await house.rows(ended.error_file_id)
        told = rows["a"]["response"]["body"]["error"] if response else rows["a"]["error"]
        assert told["message"] == HEARD
        await _nowhere(house, tmp_path)


async def test_the_answer_of_a_line_is_left_as_it_is(server: Open, world: ProviderWorld) -> None:
    """A credential may be a word, for a provider that needs none: no model's text is changed."""
    async with server() as house:
        ended = await house.until((await house.start(line("a", f"say {API_KEY}"))).id)
        [row] = (await house.rows(ended.output_file_id)).values()
        text = row["response"]["body"]["choices"][0]["message"]["content"]
        assert text == f"echo: say {API_KEY}"


async def test_the_reasons_of_a_batch_that_failed(
    server: Open, world: ProviderWorld, tmp_path: Path
) -> None:
    """Shown as the batch's errors."""
    problem = {"code": "odd", "message": SAID, "line": 1, "param": None}
    world.set(outcome={"status": "failed", "problems": [problem], "finish": 0})
    async with server() as house:
        ended = await house.until((await house.start(line("a"))).id)
        assert ended.status == "failed"
        assert ended.errors is not None
        assert ended.errors.data is not None
        assert ended.errors.data[0].message == HEARD
        await _nowhere(house, tmp_path)


async def test_a_refusal_of_any_call(server: Open, world: ProviderWorld, tmp_path: Path) -> None:
    """Of a create, and of an interactive request."""
    async with server() as house:
        file = await house.upload(line("a"))
        world.fail("batches.create", status=400, body={"error": ERROR})
        world.fail("chat.completions", status=400, body={"error": ERROR})
        for call in (
            house.create(file.id),
            house.client.chat.completions.create(
                model="gpt-4.1-mini", messages=[{"role": "user", "content": "hi"}]
            ),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await call
            assert HEARD in refused.value.message


@pytest.mark.parametrize("model", [None, "ours"])
def test_a_stream_that_goes_wrong(model: str | None) -> None:
    """The error's words are changed, and no others."""
    events = Events(model, wants_usage=True)
    events.credentials = [API_KEY]
    text = {"model": "m", "choices": [{"delta": {"content": API_KEY}}]}
    shapes = ({"error": ERROR}, {"type": "error", "message": SAID, "code": "odd"}, text)
    pieces = [f"data: {json.dumps(one)}\n\n".encode() for one in shapes]
    wrong, other, said = events.feed(b"".join(pieces))
    for event in (wrong, other):
        assert HEARD.encode() in event
        assert API_KEY.encode() not in event
    assert API_KEY.encode() in said
