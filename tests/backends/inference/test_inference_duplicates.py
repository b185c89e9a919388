"""Lines of one batch that ask for the same, greedily, are answered once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.backends.inference.conftest import CHAT, RESPONSES, TEXT, Watched, chat, minimal
from tidemill import telemetry
from tidemill.backends.executors import LocalExecutor
from tidemill.backends.inference import LocalInference
from tidemill.backends.inference.duplicates import Duplicates, Shelf, digest, repeats
from tidemill.backends.routed import RoutedInference
from tidemill.errors import RequestRefused
from tidemill.settings import Settings
from tidemill.types import (
    Answer,
    BatchParams,
    Generation,
    Lane,
    Lease,
    Outcome,
    Refusal,
    Sampling,
)

pytestmark = pytest.mark.anyio

Run = Callable[..., Any]


def lease(no: int, body: dict[str, Any], *, batch: str = "batch_1", url: str = CHAT,
          params: BatchParams | None = None) -> Lease:  # fmt: skip
    """Line ``no`` of a batch."""
    line = {"custom_id": f"c{no}", "method": "POST", "url": url, "body": body}
    return Lease(
        batch_seq=1, batch_id=batch, owner="ann", key_id=None, no=no, token=no, attempt=1,
        custom_id=f"c{no}", line=json.dumps(line).encode(), endpoint=url, expires_at=0,
        params=params or BatchParams(),
    )  # fmt: skip


def shared() -> float:
    """Lines that the metric has counted so far."""
    value = telemetry.REGISTRY.get_sample_value("tidemill_lines_shared_total")
    assert value is not None
    return value


class Batch:
    """Runs lines as the runner does: each in a task of its own."""

    def __init__(self, inference: LocalInference) -> None:
        self._executor = LocalExecutor(RoutedInference([inference]))
        self.outcomes: dict[int, Outcome] = {}

    async def one(self, lease: Lease) -> None:
        """Run one line."""
        self.outcomes[lease.no] = await self._executor.execute(lease)

    async def run(self, *leases: Lease) -> list[Outcome]:
        """Run lines at the same time; their outcomes in order."""
        async with anyio.create_task_group() as tasks:
            for one in leases:
                tasks.start_soon(self.one, one)
        return [self.outcomes[one.no] for one in leases]

    def body(self, no: int) -> Any:
        """The answer of a line."""
        outcome = self.outcomes[no]
        assert isinstance(outcome, Answer), outcome
        return json.loads(outcome.body)


@pytest.fixture
def batch(inference: LocalInference) -> Batch:
    """Lines on the echo engine."""
    return Batch(inference)


async def test_lines_in_flight_wait_for_the_first_of_them(
    batch: Batch, echo: Watched, inference: LocalInference
) -> None:
    """Twenty equal lines at once are computed once; each has an answer of its own, and all say the
    same."""
    before = shared()
    async with anyio.create_task_group() as tasks:
        for no in range(20):
            tasks.start_soon(batch.one, lease(no, chat("!wait tide high water")))
        await echo.opened(1)
        await anyio.wait_all_tasks_blocked()
        assert inference.duplicates is not None
        assert inference.duplicates.waiting[echo] == 19
        assert inference.capacities["local/echo"] == 2 * 1_024 + 19
        echo.gate("tide").set()
    assert len(echo.asked) == 1
    assert {batch.body(no)["choices"][0]["message"]["content"] for no in range(20)} == {
        "high water"
    }
    assert len({batch.body(no)["id"] for no in range(20)}) == 20
    assert shared() - before == 19
    assert inference.capacities["local/echo"] == 2 * 1_024


async def test_what_is_finished_answers_later_lines(batch: Batch, echo: Watched) -> None:
    """Equal lines far apart are computed once as well."""
    for no in range(5):
        await batch.run(lease(no, chat("again")))
    assert len(echo.asked) == 1
    assert len({batch.body(no)["id"] for no in range(5)}) == 5


async def test_a_copy_costs_a_prompt_that_was_there(batch: Batch) -> None:
    """Each line reports the tokens of its answer; the prompt of a copy is cached, whole."""
    first, copy = await batch.run(lease(1, chat("one two three")), lease(2, chat("one two three")))
    assert isinstance(first, Answer)
    assert isinstance(copy, Answer)
    assert (first.usage.input, first.usage.cached, first.usage.output) == (3, 0, 3)
    assert (copy.usage.input, copy.usage.cached, copy.usage.output) == (3, 3, 3)
    told = batch.body(2)["usage"]
    assert told["prompt_tokens_details"] == {"cached_tokens": 3}
    assert (told["prompt_tokens"], told["total_tokens"]) == (3, 6)


@pytest.mark.parametrize("url", [CHAT, TEXT, RESPONSES])
async def test_every_generating_endpoint_shares(batch: Batch, echo: Watched, url: str) -> None:
    """Choices included: what is compared is everything that the engine is asked."""
    more = {} if url == RESPONSES else {"n": 3}
    outcomes = await batch.run(*(lease(no, minimal(url, **more), url=url) for no in range(4)))
    assert len(echo.asked) == (1 if url == RESPONSES else 3)
    usages = [outcome.usage for outcome in outcomes if isinstance(outcome, Answer)]
    assert [usage.cached for usage in usages] == [0, 4, 4, 4]
    assert {(usage.input, usage.output) for usage in usages} == {(4, 4 if url == RESPONSES else 12)}


async def test_calls_of_a_copy_have_ids_of_their_own(batch: Batch) -> None:
    """A client that answers a call names it by its id."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = chat(tools=[tool], tool_choice="required")
    await batch.run(lease(1, body), lease(2, body))
    calls = [batch.body(no)["choices"][0]["message"]["tool_calls"][0] for no in (1, 2)]
    assert calls[0].pop("id") != calls[1].pop("id")
    assert calls[0] == calls[1]


SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"temperature": 0}),
    ({}, {"seed": 4}),
    ({}, {"top_p": 0.5, "min_p": 0.1, "top_k": 3}),
    ({}, {"user": "u1", "metadata": {"a": "b"}, "store": False}),
    ({"max_tokens": 9}, {"max_completion_tokens": 9}),
    ({}, {"n": 1}),
    ({"stop": "x"}, {"stop": ["x"]}),
]
OTHER: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"max_tokens": 9}),
    ({}, {"logprobs": True}),
    ({"logprobs": True}, {"logprobs": True, "top_logprobs": 2}),
    ({}, {"n": 2}),
    ({}, {"stop": "x"}),
    ({}, {"frequency_penalty": 0.5}),
    ({}, {"repeat_penalty": 1.5}),
    ({}, {"logit_bias": {"5": 1}}),
    ({}, {"response_format": {"type": "json_object"}}),
    ({}, {"max_context_length": 50}),
    ({}, {"temperature": 0.5}),
    ({"temperature": 0.5, "seed": 1}, {"temperature": 0.5, "seed": 1}),
    ({}, {"messages": [{"role": "system", "content": "Good morning dear tide"}]}),
]


@pytest.mark.parametrize(("one", "two"), SAME)
async def test_what_changes_no_answer_parts_no_lines(
    batch: Batch, echo: Watched, one: dict[str, Any], two: dict[str, Any]
) -> None:
    """Labels, spellings, and what a greedy choice never looks at."""
    await batch.run(lease(1, chat(**one)), lease(2, chat(**two)))
    assert len(echo.asked) == 1


@pytest.mark.parametrize(("one", "two"), OTHER)
async def test_what_may_change_the_answer_parts_lines(
    batch: Batch, echo: Watched, one: dict[str, Any], two: dict[str, Any]
) -> None:
    """Every such parameter, and chance."""
    await batch.run(lease(1, {**chat(), **one}), lease(2, {**chat(), **two}))
    assert len(echo.asked) == one.get("n", 1) + two.get("n", 1)


async def test_the_batch_has_its_say_first(batch: Batch, echo: Watched) -> None:
    """Compared is what holds after line, batch and server: a batch's temperature makes chance of
    lines that say nothing, and a line that says what the batch says is equal to them."""
    warm = BatchParams(temperature=0.7)
    await batch.run(lease(1, chat(), params=warm), lease(2, chat(), params=warm))
    assert len(echo.asked) == 2
    await batch.run(lease(3, chat(temperature=0), params=warm), lease(4, chat(), params=warm))
    assert len(echo.asked) == 4
    short = BatchParams(max_decoding_length=2)
    await batch.run(
        lease(5, chat("x y z"), params=short),
        lease(6, chat("x y z", max_tokens=2), params=short),
        lease(7, chat("x y z", max_tokens=3), params=short),
    )
    assert len(echo.asked) == 6


async def test_deterministic_lines_share_at_any_temperature(batch: Batch, echo: Watched) -> None:
    """The same seed is the same text there, and another seed another."""
    fixed = BatchParams(deterministic=True)
    bodies = [chat(temperature=1), chat(temperature=1, seed=0), chat(temperature=1, seed=7)]
    await batch.run(*(lease(no, body, params=fixed) for no, body in enumerate(bodies)))
    assert len(echo.asked) == 2


async def test_batches_share_nothing_with_each_other(batch: Batch, echo: Watched) -> None:
    """A batch that is run again is computed again."""
    await batch.run(lease(1, chat()), lease(2, chat(), batch="batch_2"))
    await batch.run(lease(3, chat(), batch="batch_3"))
    assert len(echo.asked) == 3


async def test_interactive_requests_share_nothing(inference: LocalInference, echo: Watched) -> None:
    """They belong to no batch."""
    for _ in range(2):
        await inference.answer(CHAT, json.dumps(chat()).encode(), lane=Lane.INTERACTIVE, owner="a")
    assert len(echo.asked) == 2


async def test_it_can_be_switched_off(echo: Watched) -> None:
    """For those who repeat a prompt to see how much the answers differ."""
    off = LocalInference({"echo": echo}, Settings(answer_duplicates_once=False))
    batch = Batch(off)
    await batch.run(*(lease(no, chat()) for no in range(3)))
    assert len(echo.asked) == 3
    assert [outcome.usage.cached for outcome in batch.outcomes.values()] == [0, 0, 0]  # type: ignore[union-attr]


# --- when the first of them fails ---------------------------------------------------------------


async def test_a_failure_that_may_pass_is_nobody_elses(batch: Batch, echo: Watched) -> None:
    """The engine dies under the first two tries of three equal lines: two lines are told to run
    again, the third computes; the lines that run again get its answer."""
    lines = [lease(no, chat("!flaky 2")) for no in range(3)]
    outcomes = await batch.run(*lines)
    assert len(echo.asked) == 3
    failed = [no for no, outcome in enumerate(outcomes) if isinstance(outcome, Refusal)]
    assert len(failed) == 2
    assert all(outcome.retry for outcome in outcomes if isinstance(outcome, Refusal))
    again = await batch.run(*(lines[no] for no in failed))
    assert all(isinstance(outcome, Answer) for outcome in again)
    assert len(echo.asked) == 3


async def test_a_bug_meets_each_line_by_itself(batch: Batch, echo: Watched) -> None:
    """An error that nobody expects says nothing about the next try."""
    outcomes = await batch.run(*(lease(no, chat("!crash")) for no in range(3)))
    assert [outcome.code for outcome in outcomes if isinstance(outcome, Refusal)] == [
        "internal_error"
    ] * 3
    assert len(echo.asked) == 3


async def test_a_failure_for_good_is_everybodys(batch: Batch, echo: Watched) -> None:
    """A request that is refused is refused again: equal lines are told the same without a try,
    together or later."""
    outcomes = await batch.run(*(lease(no, chat("!status 422")) for no in range(3)))
    outcomes += await batch.run(lease(3, chat("!status 422")))
    assert {(o.status_code, o.code) for o in outcomes if isinstance(o, Refusal)} == {
        (422, "status_422")
    }
    assert len(outcomes) == 4
    assert len(echo.asked) == 1


async def test_a_prompt_that_is_too_long_never_ran_in_any_copy(echo: Watched) -> None:
    """The kind of a shared error stays what it is: rows without a response."""
    batch = Batch(LocalInference({"echo": echo}))
    body = chat("a b c d", max_context_length=2)
    outcomes = await batch.run(lease(1, body), lease(2, body))
    assert [(o.status_code, o.code) for o in outcomes if isinstance(o, Refusal)] == [
        (None, "context_length_exceeded")
    ] * 2


async def test_the_end_of_one_line_does_not_end_the_others(batch: Batch, echo: Watched) -> None:
    """When the line that computes is cancelled, one that waited computes; when one that waits is
    cancelled, nobody notices."""
    async with anyio.create_task_group() as tasks:
        first, waiting = anyio.CancelScope(), anyio.CancelScope()

        async def within(scope: anyio.CancelScope, no: int) -> None:
            with scope:
                await batch.one(lease(no, chat("!wait gone")))

        tasks.start_soon(within, first, 0)
        await echo.opened(1)
        tasks.start_soon(within, waiting, 1)
        for no in (2, 3):
            tasks.start_soon(batch.one, lease(no, chat("!wait gone")))
        await anyio.wait_all_tasks_blocked()
        waiting.cancel()
        await anyio.wait_all_tasks_blocked()
        assert len(echo.asked) == 1
        first.cancel()
        await anyio.wait_all_tasks_blocked()
        assert (len(echo.asked), echo.open) == (2, 1)
        echo.gate("gone").set()
    assert sorted(batch.outcomes) == [2, 3]
    assert all(isinstance(outcome, Answer) for outcome in batch.outcomes.values())


# --- what is kept -------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1_500), st.booleans()), max_size=60),
    st.integers(256, 4_096),
)
def test_a_shelf_never_holds_more_than_its_room(
    moves: list[tuple[int, int, bool]], room: int
) -> None:
    """Whatever is put there: the bytes are those of its answers, and what was used last stays."""
    shelf, held = Shelf(room), dict[bytes, int]()
    for number, size, failed in moves:
        key = bytes([number])
        if shelf.get(key) is not None:
            held[key] = held.pop(key)
            continue
        shelf.put(key, RequestRefused("x" * size) if failed else b"x" * size)
        if 256 + size <= room:
            held[key] = 256 + size
        while sum(held.values()) > room:
            held.pop(next(iter(held)))
        assert shelf.bytes == sum(held.values()) <= room
        assert len(shelf) == len(held)
    assert all(shelf.get(key) is not None for key in list(held))


async def test_old_answers_make_room_for_new_ones(echo: Watched) -> None:
    """With room for two answers a batch of three questions in turn computes each time; batches that
    were not heard of for long are forgotten."""
    duplicates = Duplicates(most_bytes=700, most_batches=2)

    async def ask(text: str, batch: str = "b") -> None:
        await duplicates.wholes(batch, echo, [Generation(model="echo", text=text)], [[]])

    for text in "abcabc":
        await ask(text)
    assert len(echo.asked) == 6
    await ask("b")
    await ask("c")
    assert len(echo.asked) == 6
    for batch in ("x", "y"):
        await ask("c", batch)
    await ask("c")
    assert len(echo.asked) == 9


def test_the_digest_tells_apart_what_an_engine_would() -> None:
    """Whoever asks, and every field of a generation; numbers of any size."""
    base = Generation(model="m", text="t", json_schema={"maximum": 10**30})
    seen = {
        digest([one])
        for one in (
            base,
            Generation(model="m", text="t", json_schema={"maximum": 10**30 + 1}),
            Generation(model="n", text="t", json_schema={"maximum": 10**30}),
            Generation(model="m", text="t"),
            Generation(model="m", text="t", echo=True),
            Generation(model="m", text="t", owner="ann"),
            Generation(model="m", tokens=(1, 2)),
            Generation(model="m", tokens=(1, 3)),
            Generation(model="m", text="t", deterministic=True),
        )
    }
    assert len(seen) == 9
    assert digest([base]) == digest(
        [Generation(model="m", text="t", json_schema={"maximum": 10**30})]
    )
    assert digest([base]) != digest([base, base])


def test_chance_is_never_shared() -> None:
    """A seed alone does not make an answer the same beside other neighbours."""
    assert repeats(Generation(model="m"))
    assert not repeats(Generation(model="m", sampling=Sampling(temperature=0.1, seed=1)))
    assert repeats(
        Generation(model="m", sampling=Sampling(temperature=0.1, seed=1), deterministic=True)
    )


async def test_an_error_is_told_to_each_line_anew(echo: Watched) -> None:
    """Each raises its own, with the fields of the first."""

    class Refusing(Watched):
        def generate(self, generation: Generation) -> Any:
            raise RequestRefused("no", param="messages", code="bad")

    duplicates, raised = Duplicates(), []
    for _ in range(2):
        with pytest.raises(RequestRefused) as caught:
            await duplicates.wholes("b", Refusing(), [Generation(model="echo", text="x")], [[]])
        raised.append(caught.value)
    assert raised[0] is not raised[1]
    assert (raised[1].param, raised[1].code, raised[1].message) == ("messages", "bad", "no")
