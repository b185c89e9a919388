"""A provider's ordinary routes: interactive requests, and lines of batches that run from here."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import anyio
import msgspec
import openai
import pytest
from worlds.house import Open, line
from worlds.provider import ProviderWorld

from tidemill.backends.ordinary import OrdinaryRoutes
from tidemill.budgets import BYTES_PER_TOKEN
from tidemill.types import KeyRecord, Lane, Limits, Usage

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "hello there"}]
STANDARD = {"models": {"big": {"standard": "gpt-4.1"}, "vectors": {"standard": "embed"}}}
MODELS = ("big", "echo")


async def test_one_base_url_serves_everything(server: Open, world: ProviderWorld) -> None:
    """Local and providers' models are listed and answered; what nobody serves is 404."""
    async with server(STANDARD) as house:
        names = {model.id async for model in house.client.models.list()}
        assert {"echo", "big", "vectors"} <= names
        answer = await house.client.chat.completions.create(model="big", messages=HELLO)  # type: ignore[arg-type]
        assert (answer.model, answer.choices[0].message.content) == ("big", "echo: hello there")
        vectors = await house.client.embeddings.create(model="vectors", input=["a", "b"])
        assert [item.embedding for item in vectors.data] == [[0.5, 0.0], [0.5, 1.0]]
        response = await house.client.responses.create(model="big", input="hi")
        assert (response.model, response.output_text) == ("big", "echo: hi")
        with pytest.raises(openai.NotFoundError):
            await house.client.chat.completions.create(model="nobody", messages=HELLO)  # type: ignore[arg-type]
        booked = await house.server.store.ledger.usage(None, 0, 2**40)
        assert {row.model for row in booked} == {"big", "vectors"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("header", ["X-Tidemill-Provider", "X-Logos-Provider"])
async def test_a_request_may_name_its_provider(
    server: Open, world: ProviderWorld, header: str, stream: bool
) -> None:
    """Where several serve its model, and where this server does; it is booked there."""
    first = {"name": "first", "models": {"big": {"standard": "gpt-4.1"}}}
    second = {"name": "second", "models": {"big": {"standard": "dep-41"}, "echo": "dep-41"}}
    async with server(first, second) as house:
        for model in MODELS:
            headers = {header: "second"}
            answer: Any = await house.client.chat.completions.create(
                model=model,
                messages=HELLO,  # type: ignore[arg-type]
                stream=stream,
                extra_headers=headers,
            )
            if stream:
                assert {chunk.model async for chunk in answer} == {model}
            else:
                assert answer.model == model
        booked = await house.server.store.ledger.usage(None, 0, 2**40)
        assert [(row.model, row.execution) for row in booked] == [
            ("big", "second"),
            ("echo", "second"),
        ]
        with pytest.raises(openai.NotFoundError):
            await house.client.chat.completions.create(
                model="echo",
                messages=HELLO,  # type: ignore[arg-type]
                extra_headers={header: "first"},
            )
    asked = [e["path"] for e in world.state()["log"] if e["route"] == "chat.completions"]
    assert len(asked) == 2


async def test_a_request_that_names_a_wrong_provider_is_refused(
    server: Open, world: ProviderWorld
) -> None:
    """One that is unknown, or that the key may not use, as for a batch; no name is ignored."""
    limits = Limits(providers={"up": ("big",), "local": ("*",)})
    key = KeyRecord(id="k", name="k", owner="o", prefix="", digest="", created_at=1, limits=limits)
    tables = (STANDARD, STANDARD | {"name": "other"})
    async with server(*tables, api_keys="x") as house:
        digest = hashlib.sha256(b"secret").hexdigest()
        await house.server.store.keys.add(msgspec.structs.replace(key, digest=digest))
        client = house.client.with_options(api_key="secret")
        no = "403 provider_not_permitted"
        cases = {"up": "200", "other": no, "nobody": no, "local": no}
        for name, expected in cases.items():
            try:
                await client.chat.completions.create(
                    model="big",
                    messages=HELLO,  # type: ignore[arg-type]
                    extra_headers={"X-Tidemill-Provider": name},
                )
                found = "200"
            except openai.APIStatusError as refused:
                found = f"{refused.status_code} {refused.code}"
            assert found == expected
    assert world.calls("chat.completions") == 1


async def test_a_stream_passes_through_and_is_booked(server: Open, world: ProviderWorld) -> None:
    """The chunks carry our model's name; usage is shown only to who asked for it."""
    async with server(STANDARD) as house:
        for wanted in (False, True):
            more = {"stream_options": {"include_usage": True}} if wanted else {}
            stream = await house.client.chat.completions.create(
                model="big",
                messages=HELLO,
                stream=True,
                **more,  # type: ignore[call-overload]
            )
            chunks = [chunk async for chunk in stream]
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert text == "echo: hello there"
            assert {chunk.model for chunk in chunks} == {"big"}
            assert any(chunk.usage for chunk in chunks) is wanted
        first, second = await house.server.store.ledger.usage(None, 0, 2**40)
        assert first.usage == second.usage
        assert first.usage.output > 0


async def test_a_stream_of_completions_passes_through(server: Open, world: ProviderWorld) -> None:
    """As one of chat does."""
    async with server(STANDARD) as house:
        stream = await house.client.completions.create(model="big", prompt="hello", stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "echo: hello"
        assert {chunk.model for chunk in chunks} == {"big"}
        [booked] = await house.server.store.ledger.usage(None, 0, 2**40)
        assert booked.usage.output > 0


async def test_a_stream_of_a_response_passes_through(server: Open, world: ProviderWorld) -> None:
    """Its events as they came, the response in them with our model's name."""
    async with server(STANDARD) as house:
        stream = await house.client.responses.create(model="big", input="hello", stream=True)
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
        assert "".join(deltas) == "echo: hello"
        created, completed = events[0], events[-1]
        assert created.type == "response.created"
        assert completed.type == "response.completed"
        assert created.response.model == completed.response.model == "big"
        assert completed.response.output_text == "echo: hello"
        [booked] = await house.server.store.ledger.usage(None, 0, 2**40)
        assert completed.response.usage is not None
        assert booked.usage.output == completed.response.usage.output_tokens > 0


@pytest.mark.parametrize(
    ("endpoint", "asked"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "hello there"}),
        ("/v1/responses", {"input": "hello there"}),
    ],
)
async def test_a_streams_usage_is_told_before_its_end(
    server: Open, world: ProviderWorld, endpoint: str, asked: dict[str, object]
) -> None:
    """So that it can be booked before anybody has read all of it; once."""
    told: list[Usage] = []
    async with server(STANDARD) as house:
        body = json.dumps({"model": "big", "stream": True, **asked}).encode()
        stream = house.server.services.inference.stream(
            endpoint, body, owner="o", booked=lambda model, usage: told.append(usage)
        )
        seen = [(event, len(told)) async for event in stream]
    assert seen[-1][1] == 1
    assert seen[0][1] == 0
    assert len(told) == 1
    assert told[0].output > 0


@pytest.mark.parametrize("to_book", [True, False])
async def test_a_call_whose_asker_left_is_booked(
    server: Open, world: ProviderWorld, monkeypatch: pytest.MonkeyPatch, to_book: bool
) -> None:
    """The provider bills what it computes: the call goes on to its end, unless nothing is booked by
    who asked, as for a line that is given back."""
    called, ended = anyio.Event(), []
    call = OrdinaryRoutes._call

    async def watched(*args: Any) -> Any:
        called.set()
        answer = await call(*args)
        ended.append(answer)
        return answer

    monkeypatch.setattr(OrdinaryRoutes, "_call", watched)
    told: list[tuple[str, Usage]] = []
    async with server(STANDARD) as house:
        plain = await house.client.chat.completions.create(model="big", messages=HELLO)  # type: ignore[arg-type]
        ended.clear()
        called = anyio.Event()
        asking = asyncio.ensure_future(
            house.server.services.inference.answer(
                "/v1/chat/completions",
                json.dumps({"model": "big", "messages": HELLO}).encode(),
                lane=Lane.INTERACTIVE,
                owner="o",
                booked=(lambda model, usage: told.append((model, usage))) if to_book else None,
            )
        )
        await called.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert len(ended) == to_book
    assert plain.usage is not None
    used = [(usage.input, usage.output) for _, usage in told]
    assert used == [(plain.usage.prompt_tokens, plain.usage.completion_tokens)] * to_book


async def test_a_stream_that_is_left_is_booked_by_an_estimate(
    server: Open, world: ProviderWorld
) -> None:
    """Its prompt's bytes and the pieces that came, once: leaving before the usage is no way not to
    pay."""
    told: list[Usage] = []
    async with server(STANDARD) as house:
        body = json.dumps({"model": "big", "stream": True, "messages": HELLO}).encode()
        stream = house.server.services.inference.stream(
            "/v1/chat/completions", body, owner="o", booked=lambda _, usage: told.append(usage)
        )
        assert b"echo" in await anext(stream)
        assert b"hello" in await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
    assert len(told) == 1
    assert told[0].input == -(-len(body) // BYTES_PER_TOKEN)
    assert told[0].output >= 2


async def test_a_stream_that_is_nois_an_error(server: Open, world: ProviderWorld) -> None:
    """The provider's own refusal, before any event."""
    error = {"message": "Too fast.", "type": "requests", "code": "rate_limit_exceeded"}
    world.fail("chat.completions", status=429, body={"error": error}, headers={"retry-after": "2"})
    async with server(STANDARD) as house:
        with pytest.raises(openai.RateLimitError, match="Too fast") as refused:
            await house.client.chat.completions.create(model="big", messages=HELLO, stream=True)  # type: ignore[call-overload]
        assert refused.value.code == "rate_limit_exceeded"


async def test_lines_of_a_model_that_cannot_be_batched_run_from_here(
    server: Open, world: ProviderWorld
) -> None:
    """One by one at the ordinary route, within the provider's concurrency, at the standard
    price."""
    async with server(STANDARD | {"concurrency": 3}) as house:
        lines = [line(str(n), f"text {n}", model="big") for n in range(20)]
        batch = await house.start(*lines, line("bad", "!refuse", model="big"))
        assert batch.model_extra["tidemill_execution"] == "local"
        ended = await house.until(batch.id)
        assert ended.request_counts.model_dump() == {"total": 21, "completed": 20, "failed": 1}
        good, bad = await house.rows(ended.output_file_id), await house.rows(ended.error_file_id)
        assert good["7"]["response"]["body"]["choices"][0]["message"]["content"] == "echo: text 7"
        assert bad["bad"]["response"]["status_code"] == 400
        assert "gpt-4.1" not in json.dumps([good, bad])
        booked = await house.server.store.ledger.usage(None, 0, 2**40)
        assert {(row.model, row.tier) for row in booked} == {("big", "standard")}
    state = world.state()
    assert state["calls"].get("batches.create", 0) == 0
    assert state["peak"]["chat.completions"] <= 3


async def test_too_fast_is_slowed_down_and_costs_no_attempt(
    server: Open, world: ProviderWorld
) -> None:
    """More 429s than a line has attempts: every line is answered in the end."""
    world.fail("chat.completions", times=12, status=429, headers={"retry-after": "0.05"})
    async with server(STANDARD | {"concurrency": 4}) as house:
        batch = await house.start(*(line(str(n), model="big") for n in range(6)))
        ended = await house.until(batch.id)
        assert ended.request_counts.model_dump() == {"total": 6, "completed": 6, "failed": 0}


@pytest.mark.parametrize("stream", [False, True])
async def test_nobody_is_kept_waiting_for_a_long_rest(
    server: Open, world: ProviderWorld, stream: bool
) -> None:
    """After a 429 that asks for an hour the next request is told so at once, and the provider is
    not asked; so is one that waited for its turn already."""
    world.fail("chat.completions", status=429, times=-1, headers={"retry-after": "3600"})
    async with server(STANDARD | {"concurrency": 1}) as house:
        told = []

        async def ask() -> None:
            with pytest.raises(openai.RateLimitError) as refused:
                await house.client.chat.completions.create(
                    model="big",
                    messages=HELLO,  # type: ignore[arg-type]
                    stream=stream,
                )
            told.append(refused.value.response.headers["retry-after"])

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(ask)
            await ask()
        assert told == ["60"] * 4
    assert world.calls("chat.completions") == 1


async def test_a_broken_provider_spends_a_lines_attempts(
    server: Open, world: ProviderWorld
) -> None:
    """After the last one the line has failed, with the provider's failure in its row."""
    world.fail("chat.completions", times=-1, status=503)
    async with server(STANDARD, max_line_attempts=2) as house:
        ended = await house.until((await house.start(line("a", model="big"))).id)
        (row,) = (await house.rows(ended.error_file_id)).values()
        assert row["response"]["status_code"] == 503
        assert row["response"]["body"]["error"]["message"] == "told to answer 503"
    assert world.calls("chat.completions") == 2


async def test_a_slow_provider_does_not_stand_in_the_way_of_what_runs_here(
    server: Open, world: ProviderWorld
) -> None:
    """Lines here run while all of the provider's places are taken; also within one file."""
    world.fail("chat.completions", times=4, kind="hang")
    async with server(STANDARD | {"concurrency": 4}, max_pool_size=8) as house:
        slow = await house.start(*(line(str(n), model="big") for n in range(40)))
        quick = await house.start(*(line(str(n), model="echo") for n in range(40)))
        assert (await house.until(quick.id)).status == "completed"
        mixed = [line(f"big{n}", model="big") for n in range(40)]
        both = await house.start(*mixed, *(line(str(n), model="echo") for n in range(40)))
        seen = await house.until(both.id, "in_progress")
        with anyio.fail_after(60):
            while seen.request_counts is None or seen.request_counts.completed < 40:
                seen = await house.client.batches.retrieve(both.id)
        for batch in (slow, both):
            await house.client.batches.cancel(batch.id)
    assert world.calls("chat.completions") == 4


async def test_a_stream_that_breaks_off_says_so(server: Open, world: ProviderWorld) -> None:
    """Events that came are passed on; then an error, no quiet end; and the next request works."""
    world.fail("chat.completions", kind="cut", after=700)
    async with server(STANDARD) as house:
        seen = []

        async def read() -> None:
            stream = await house.client.chat.completions.create(
                model="big",
                messages=[{"role": "user", "content": "one two three four five six"}],
                stream=True,
            )
            async for chunk in stream:
                seen.append(chunk)

        with pytest.raises(openai.APIError, match="connection failed"):
            await read()
        assert len(seen) > 1
        answer = await house.client.chat.completions.create(model="big", messages=HELLO)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == "echo: hello there"


async def test_equal_lines_are_each_asked_of_a_provider(server: Open, world: ProviderWorld) -> None:
    """What a provider computes it bills, and what it answers is its own affair: nothing is answered
    from here, while equal lines of the model that runs here are."""
    async with server(STANDARD) as house:
        lines = [line(f"{model}{n}", "same", model=model) for n in range(6) for model in MODELS]
        ended = await house.until((await house.start(*lines)).id)
        rows = await house.rows(ended.output_file_id)
        assert len(rows) == 12
        booked = await house.server.store.ledger.usage(None, 0, 2**40)
        assert len({(row.usage, row.cost) for row in booked if row.model == "big"}) == 1
        assert sorted(row.usage.cached for row in booked if row.model == "echo") == [0] + [1] * 5
    assert world.calls("chat.completions") == 6
