"""The interactive routes: authenticated, bounded, booked, and let go when a client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from functools import partial
from typing import Any

import anyio.lowlevel
import httpx
import pytest
from openai.types import Model
from openai.types.chat import ChatCompletion

from tests.handlers.world import HungUp, Open, World
from tidemill.errors import StoreUnavailable
from tidemill.types import Generation, Piece, UsageRow

pytestmark = pytest.mark.anyio


@pytest.fixture
async def world(open_world: Open) -> AsyncGenerator[World]:
    """An application of the test's own: what runs and what was booked is counted."""
    async with open_world() as one:
        yield one


PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


def chat(text: str = "hi there", **more: Any) -> dict[str, Any]:
    """A chat body."""
    return {"model": "echo", "messages": [{"role": "user", "content": text}], **more}


async def booked(world: World) -> list[UsageRow]:
    """All rows of the ledger."""
    return await world.services.store.ledger.usage(None, 0, 2**40)


@pytest.mark.parametrize("path", PATHS)
async def test_every_route_needs_a_key_before_its_body(world: World, path: str) -> None:
    """Without credentials a broken body is 401, not 400."""
    answer = await world.client.post(path, content=b"{", headers={"authorization": "Basic x"})
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("prefix", ["/v1", "/openai/v1", "/openai"])
async def test_a_chat_is_answered_and_booked(world: World, prefix: str) -> None:
    """Every mirror answers; the ledger has one row with tier ``standard``."""
    answer = await world.client.post(f"{prefix}/chat/completions", json=chat())
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    completion = ChatCompletion.model_validate_json(answer.content, strict=True)
    assert completion.choices[0].message.content == "hi there"
    (row,) = await booked(world)
    assert (row.model, row.tier, row.execution, row.batch_id) == (
        "echo",
        "standard",
        "local",
        None,
    )
    assert (row.usage.input, row.usage.output) == (2, 2)


@pytest.mark.parametrize("path", PATHS)
async def test_a_refusal_is_an_envelope(world: World, path: str) -> None:
    """A bad parameter is a 400 with all four keys, and nothing is booked."""
    answer = await world.client.post(path, json={"model": "echo", "foo": 1})
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "Unrecognized request argument supplied: foo",
        "type": "invalid_request_error",
        "param": "foo",
        "code": "unknown_parameter",
    }
    assert await booked(world) == []


@pytest.mark.parametrize("stream", [False, True])
async def test_failures_have_the_same_status_streamed_or_not(world: World, stream: bool) -> None:
    """An error before the first event is an ordinary answer."""
    cases = [
        (chat() | {"model": "nope"}, 404, "model_not_found"),
        (chat("a b c", max_context_length=2), 400, "context_length_exceeded"),
        (chat("!status 429 retry-after=7"), 429, "rate_limit_exceeded"),
        (chat("!lost"), 503, "engine_restarted"),
        (chat(n=0), 400, "invalid_value"),
    ]
    for body, status, code in cases:
        answer = await world.client.post("/v1/chat/completions", json={**body, "stream": stream})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        if status == 429:
            assert answer.headers["retry-after"] == "7"
    assert await booked(world) == []


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"null", b'{"stream":true', b"[" * 100_000, b'{"stream":"yes"}', b"\xff"]
)
async def test_a_broken_body_is_a_400(world: World, raw: bytes) -> None:
    """Whatever is sent, the answer is an envelope."""
    for path in PATHS:
        answer = await world.client.post(path, content=raw)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]


async def test_a_body_over_the_limit_is_413(open_world: Open) -> None:
    """``max_body_bytes`` bounds what is held."""
    async with open_world(max_body_bytes=2048) as world:
        answer = await world.client.post("/v1/chat/completions", json=chat("x" * 3000))
        assert answer.status_code == 413
        assert answer.json()["error"]["message"]
        assert (
            await world.client.post("/v1/chat/completions", json=chat("x" * 1000))
        ).status_code == 200


async def test_a_stream_is_events_and_is_booked(world: World) -> None:
    """Content type and end are those of server-sent events; usage is booked at the end."""
    answer = await world.client.post("/v1/chat/completions", json=chat("a b c", stream=True))
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-request-id"]
    assert answer.text.endswith("data: [DONE]\n\n")
    (row,) = await booked(world)
    assert (row.usage.input, row.usage.output) == (3, 3)


class Reader(HungUp):
    """A client that looks into the ledger as each part of its answer arrives."""

    def __init__(self, world: World, body: dict[str, Any]) -> None:
        super().__init__(world, body)
        self._world = world
        self.seen: list[tuple[bytes, int]] = []

    async def send(self, message: Any) -> None:
        """Note the part with the rows that are booked by then."""
        self.seen.append((message.get("body", b""), len(await booked(self._world))))
        if message.get("more_body") is False:
            self.leave.set()


@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_is_booked_before_its_end_is_shown(world: World, n: int) -> None:
    """Whoever reads all of it finds it in the ledger, once; nothing is booked while it runs."""
    reader = Reader(world, chat("a b c", stream=True, n=n))
    await reader.run(reader.send)
    assert {rows for part, rows in reader.seen if b'"content":"' in part} == {0}
    assert [rows for part, rows in reader.seen if b"[DONE]" in part] == [1]
    (row,) = await booked(world)
    assert row.usage.output == 3 * n


async def test_embeddings_do_not_stream(world: World) -> None:
    """``stream`` on embeddings is a named 400."""
    answer = await world.client.post(
        "/v1/embeddings", json={"model": "echo", "input": "a", "stream": True}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream"


async def test_a_deployment_in_the_url_is_the_model(world: World) -> None:
    """Azure's spelling wins over the body's model, for every completing route."""
    for path in PATHS:
        route = path.removeprefix("/v1")
        body = {"/chat/completions": chat(), "/completions": {"prompt": "a"}}.get(
            route, {"input": "a"}
        )
        answer = await world.client.post(
            f"/openai/deployments/echo{route}?api-version=2024-10-21",
            json={**body, "model": "ignored"},
        )
        assert answer.status_code == 200, (path, answer.text)
        assert answer.json()["model"] == "echo"


async def active(world: World) -> int:
    """Sequences that the engine works on."""
    return (await world.services.pool_status()).replicas["echo"].active


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_the_slot(world: World, stream: bool) -> None:
    """Hanging up before the answer begins ends the generation and books nothing."""
    client = HungUp(world, chat("!wait forever", stream=stream))
    running = asyncio.ensure_future(client.run())
    while await active(world) == 0:
        # A question to the store gives way to the other request; one about models would not.
        assert (await world.client.get("/v1/batches")).status_code == 200
    client.leave.set()
    await running
    assert await active(world) == 0
    assert await booked(world) == []


@pytest.fixture
def far(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is in another process: whoever counts tokens waits for its answer."""
    count = world.engine.count

    async def asked(generation: Generation) -> int:
        await anyio.lowlevel.checkpoint()
        return await count(generation)

    monkeypatch.setattr(world.engine, "count", asked)


@pytest.mark.usefixtures("far")
async def test_a_client_that_leaves_in_mid_stream_is_billed(world: World) -> None:
    """What was streamed until then is booked, and the slot is free."""
    client = HungUp(world, chat("one two three four", stream=True))
    original = client.got.put

    async def stuck(message: Any) -> None:
        await original(message)
        if b'"one"' in message.get("body", b""):
            client.leave.set()
            await asyncio.Event().wait()

    client.got.put = stuck  # type: ignore[method-assign]
    await client.run()
    assert await active(world) == 0
    (row,) = await booked(world)
    assert (row.usage.input, row.usage.output) == (4, 1)


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_the_engine_computes_is_billed(
    world: World, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Streamed or not, what was computed until then is booked, once."""
    halted, generate = asyncio.Event(), world.engine.generate

    async def halting(asked: Generation) -> AsyncIterator[Piece]:
        async for piece in generate(asked):
            if piece.text == " three":
                halted.set()
                await asyncio.Event().wait()
            yield piece

    monkeypatch.setattr(world.engine, "generate", halting)
    client = HungUp(world, chat("one two three four", stream=stream))
    running = asyncio.ensure_future(client.run())
    await halted.wait()
    client.leave.set()
    await running
    (row,) = await booked(world)
    assert (row.usage.input, row.usage.output) == (4, 2)


class Disk:
    """Fills the store's disk in front of every booking, until ``full`` is false."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = True
        ledger = world.services.store.ledger
        book = ledger.book

        async def booking(rows: Sequence[UsageRow], *, reservation: int | None = None) -> None:
            if self.full:
                raise StoreUnavailable("The store cannot be written: full.", retry_after_s=30)
            await book(rows, reservation=reservation)

        monkeypatch.setattr(ledger, "book", booking)


async def test_a_full_disk_costs_what_was_in_flight_and_is_booked_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed answers are given; further ones are refused before they cost anything, with a time
    to come again; once there is room each is booked once, by whoever comes first."""
    disk = Disk(world, monkeypatch)
    body = chat("!wait go one two")
    answers: list[httpx.Response] = []

    async def ask(**more: Any) -> None:
        answers.append(await world.client.post("/v1/chat/completions", json={**body, **more}))

    async with anyio.create_task_group() as tasks:
        for more in ({}, {"stream": True}, {}):
            tasks.start_soon(partial(ask, **more))
        while await active(world) < 3:
            assert (await world.client.get("/v1/batches")).status_code == 200
        world.engine.gate("go").set()
    assert [answer.status_code for answer in answers] == [200] * 3
    for stream in (False, True):
        refused = await world.client.post("/v1/chat/completions", json={**body, "stream": stream})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "30")
        assert refused.json()["error"]["code"] == "store_unavailable"
    disk.full = False
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(ask)
    assert [answer.status_code for answer in answers] == [200] * 6
    assert [row.usage.output for row in await booked(world)] == [2] * 6


async def test_what_is_owed_is_booked_when_the_server_stops(
    open_world: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there is room again by then."""
    async with open_world() as world:
        disk = Disk(world, monkeypatch)
        assert (await world.client.post("/v1/chat/completions", json=chat())).status_code == 200
        disk.full = False
    async with open_world() as again:
        assert len(await booked(again)) == 1


async def test_models_are_listed_and_retrieved(world: World) -> None:
    """The list has the served model; retrieving it gives the same object."""
    listed = (await world.client.get("/v1/models")).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    Model.model_validate(model, strict=True)
    assert (model["id"], model["object"]) == ("echo", "model")
    assert (await world.client.get("/v1/models/echo")).json() == model


async def test_a_model_name_may_hold_slashes(open_world: Open) -> None:
    """``org/name`` is found as it is and as ``org%2Fname``."""
    async with open_world(model_name="org/name") as world:
        for path in ("/v1/models/org/name", "/v1/models/org%2Fname"):
            answer = await world.client.get(path)
            assert answer.status_code == 200, path
            assert answer.json()["id"] == "org/name"


@pytest.mark.parametrize("name", ["nope", "org%2Fnope", "%00", "x" * 4000, "..%2F..%2Fetc"])
async def test_an_unknown_model_is_404(world: World, name: str) -> None:
    """Whatever the name, the answer is ``model_not_found``."""
    answer = await world.client.get(httpx.URL(f"http://testserver/v1/models/{name}"))
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_models_need_a_key(world: World) -> None:
    """The list is for key holders too."""
    for path in ("/v1/models", "/v1/models/echo"):
        answer = await world.client.get(path, headers={"authorization": "Bearer wrong"})
        assert answer.status_code == 401
