"""The loop over a small deterministic engine that checks every promise the loop makes to it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.arithmetic import (
    Arithmetic,
    by_itself,
    drive,
    finish,
    got,
    left_over,
    ticket,
)
from tidemill import native
from tidemill.errors import EngineLost
from tidemill.native import model
from tidemill.scheduler import slots
from tidemill.scheduler.loop import Fate, Gauges, Loop
from tidemill.scheduler.plan import Limits
from tidemill.types import Lane


@contextmanager
def running(engine: Arithmetic) -> Iterator[Loop[str]]:
    """A loop on a thread of its own, as in the engine process."""
    loop = Loop(engine)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield loop
    finally:
        loop.close()
        thread.join(timeout=60)
        assert not thread.is_alive()


tickets = st.lists(
    st.tuples(
        st.lists(st.integers(1, 50), min_size=1, max_size=40),
        st.sampled_from(Lane),
        st.integers(1, 12),
    ),
    min_size=1,
    max_size=20,
)


@settings(deadline=None)
@given(
    tickets,
    st.integers(1, 5),
    st.integers(1, 16),
    st.integers(0, 2),
    st.booleans(),
    st.lists(st.sampled_from(["done", "no_room", "aborted"]), max_size=12),
)
def test_any_schedule_gives_each_its_own_answer(
    asked: list[tuple[list[int], Lane, int]],
    width: int,
    prefill: int,
    headroom: int,
    parks: bool,
    fates: list[Fate],
) -> None:
    """Chunking, parking, recomputing, full memory and aborted steps never change what the model
    says, and at the end nothing is left in the engine."""
    engine = Arithmetic(
        Limits(slots=width, rows=width + prefill, prefill=prefill, prefill_shared=2,
               headroom=headroom),
        parks=parks,
    )  # fmt: skip
    engine.fates = list(fates)
    asked_for = [
        ticket(i, prompt, lane=lane, limit=limit) for i, (prompt, lane, limit) in enumerate(asked)
    ]
    loop = Loop(engine)
    drive(loop, asked_for)
    for t in asked_for:
        tokens, reason = by_itself(t)
        answer = got(t)
        if answer.reason == "length" and len(answer.tokens) < t.limit:
            # The memory was full and it was alone: it ends with what it has.
            assert "no_room" in fates
            assert answer.tokens == tokens[: len(answer.tokens)]
        else:
            assert (answer.tokens, answer.reason) == (tokens, reason)
    assert engine.memory == {}
    assert left_over(loop) == 0


def test_more_completions_than_slots_all_finish_and_share_steps() -> None:
    """Sixteen completions on four slots: never more than four at once, and steps are shared."""
    engine = Arithmetic(Limits(slots=4, rows=516))
    many = [ticket(i, [i + 1, 2, 3], limit=6) for i in range(16)]
    drive(Loop(engine), many)
    assert max(len(step) for step in engine.steps) == 4
    assert len(engine.steps) < sum(len(got(t).tokens) + 1 for t in many)


def test_interactive_goes_before_batch_and_displaces_it() -> None:
    """On one slot an interactive completion ends before the line that was there first, which then
    goes on where it stopped, without computing anything twice."""
    engine = Arithmetic(Limits(slots=1, rows=513))
    loop = Loop(engine)
    line = ticket(1, [4, 5, 6], limit=8)
    chat = ticket(2, [7, 8], lane=Lane.INTERACTIVE, limit=3)
    loop.submit(line)
    for _ in range(3):
        loop._collect()
        loop.turn()
    before = len(got(line).tokens)
    assert before > 0
    drive(loop, [chat])
    assert len(got(line).tokens) == before
    assert loop.gauges() == msgspec.structs.replace(loop.gauges(), active=0, waiting=0, parked=1)
    drive(loop, [ticket(3, [1], limit=1)])
    assert (got(line).tokens, got(line).reason) == by_itself(line)
    computed = [t for step in engine.steps for c in step if c.key == 1 for t in c.tokens]
    assert computed == [*line.prompt, *got(line).tokens][: len(computed)]


@pytest.mark.parametrize("headroom", [1, 0])
def test_somebody_who_arrives_at_a_full_engine_has_a_slot_at_once(headroom: int) -> None:
    """Lines took what they may have. With headroom the slot that they left is used, and all of them
    go on; without it the youngest is parked, and nobody else."""
    engine = Arithmetic(Limits(slots=4, rows=516, headroom=headroom))
    loop = Loop(engine)
    lines = [ticket(key, [key, 2, 3], limit=12) for key in range(1, 6)]
    chat = ticket(9, [7, 8], lane=Lane.INTERACTIVE, limit=3)
    for t in lines:
        loop.submit(t)
    loop._collect()
    loop.turn()
    before = [c.key for c in engine.steps[-1]]
    assert before == [1, 2, 3, 4][: 4 - headroom]
    loop.submit(chat)
    loop._collect()
    loop.turn()
    assert [c.key for c in engine.steps[-1]] == [9], "a prompt has its steps to itself"
    assert (loop.gauges().active, loop.gauges().parked) == (4, 0 if headroom else 1)
    loop.turn()
    assert {c.key for c in engine.steps[-1]} == {1, 2, 3, 9}
    finish(loop, [*lines, chat])
    for t in [*lines, chat]:
        assert (got(t).tokens, got(t).reason) == by_itself(t)


def test_a_line_that_cannot_be_parked_is_computed_again() -> None:
    """Without room to park, the displaced line starts over with its tokens and says the same."""
    engine = Arithmetic(Limits(slots=1, rows=513), parks=False)
    loop = Loop(engine)
    line = ticket(1, [4, 5, 6], limit=8)
    loop.submit(line)
    for _ in range(3):
        loop._collect()
        loop.turn()
    drive(loop, [ticket(2, [7], lane=Lane.INTERACTIVE, limit=2)])
    drive(loop, [ticket(3, [1], limit=1)])
    assert (got(line).tokens, got(line).reason) == by_itself(line)


def test_a_full_memory_parks_the_youngest_line_and_fails_nobody() -> None:
    """With memory for two and a half sequences, four of them still finish with their own words."""
    engine = Arithmetic(Limits(slots=4, rows=516), room=50)
    many = [ticket(i, [i + 1] * 15, limit=5) for i in range(4)]
    drive(Loop(engine), many)
    for t in many:
        assert (got(t).tokens, got(t).reason) == by_itself(t)


def test_a_sequence_that_fills_the_memory_alone_ends_by_length() -> None:
    """Nobody can make room for it: it ends with what it has."""
    engine = Arithmetic(Limits(slots=2, rows=514), room=6)
    t = ticket(1, [3, 3, 3], limit=50)
    drive(Loop(engine), [t])
    assert got(t).reason in ("length", "stop")
    assert got(t).tokens == by_itself(t)[0][: len(got(t).tokens)]
    assert len(got(t).tokens) <= 4


def test_a_lost_step_fails_those_in_it_and_spares_those_who_wait() -> None:
    """A fatal engine error costs the live sequences; whoever waited is computed afterwards."""
    engine = Arithmetic(Limits(slots=1, rows=513))
    engine.fates = ["lost"]
    first, second = ticket(1, [1, 2]), ticket(2, [3, 4])
    drive(Loop(engine), [first, second])
    assert isinstance(got(first).error, EngineLost)
    assert (got(second).tokens, got(second).reason) == by_itself(second)


def test_a_stop_from_the_answer_ends_the_completion() -> None:
    """The answer decides when its text is complete."""
    t = ticket(1, [1, 2], limit=50, stop_after=1)
    drive(Loop(Arithmetic(Limits(slots=1, rows=513))), [t])
    assert (len(got(t).tokens), got(t).reason) == (1, "stop")


def test_a_cancel_frees_the_slot_at_the_next_step() -> None:
    """A cancelled completion is closed without a reason, and its id goes to who waits."""
    engine = Arithmetic(Limits(slots=1, rows=513))
    loop = Loop(engine)
    endless, next_one = ticket(1, [1], limit=10**6), ticket(2, [5, 6])
    loop.submit(endless)
    loop.submit(next_one)
    loop._collect()
    loop.turn()
    loop.cancel(1)
    loop.cancel(999)
    loop._collect()
    assert got(endless).closed
    assert got(endless).reason is None
    assert engine.memory == {}
    loop.turn()
    assert [c.key for c in engine.steps[-1]] == [2]


def test_a_parked_line_can_be_cancelled() -> None:
    """Its parked memory goes with it."""
    engine = Arithmetic(Limits(slots=1, rows=513))
    loop = Loop(engine)
    line = ticket(1, [4, 5], limit=10**6)
    chat = ticket(2, [7], lane=Lane.INTERACTIVE, limit=10**6)
    for t in (line, chat):
        loop.submit(t)
        loop._collect()
        loop.turn()
    assert (loop.gauges().active, loop.gauges().parked) == (1, 1)
    assert loop.gauges().arena.blocks == 1
    loop.cancel(1)
    loop._collect()
    assert loop.gauges().arena.used == 0
    assert got(line).closed


@pytest.mark.parametrize("pool", [native.SlotPool, model.SlotPool], ids=["chosen", "model"])
def test_every_ticket_has_a_slot_that_says_where_it_stands(
    monkeypatch: pytest.MonkeyPatch, pool: type[native.SlotPool]
) -> None:
    """Staged while it waits, prefill until its first token, active, parked when it made way, and
    free at the end; the gauges are counted from these, with the pool in C++ where it was built and
    with the one in Python."""
    monkeypatch.setattr(slots, "SlotPool", pool)
    engine = Arithmetic(Limits(slots=1, rows=513, prefill=3))
    loop = Loop(engine)

    def states() -> dict[str, int]:
        return {name: n for name, n in loop._slots.stats["states"].items() if n and name != "FREE"}

    line = ticket(1, [4, 5, 6, 7], limit=10**6)
    seen = []
    loop.submit(line)
    loop.submit(ticket(2, [9], limit=10**6))
    for _ in range(2):
        loop._collect()
        loop.turn()
        seen.append(states())
    chat = ticket(3, [7, 8], lane=Lane.INTERACTIVE, limit=10**6)
    loop.submit(chat)
    loop._collect()
    loop.turn()
    seen.append(states())
    assert seen == [
        {"STAGED": 1, "PREFILL": 1},
        {"STAGED": 1, "ACTIVE": 1},
        {"STAGED": 1, "ACTIVE": 1, "PARKED": 1},
    ]
    gauges = loop.gauges()
    assert (gauges.active, gauges.waiting, gauges.parked) == (1, 1, 1)
    assert (gauges.parks, gauges.resumes, gauges.requeues) == (1, 0, 0)
    loop.cancel(3)
    loop._collect()
    loop.turn()
    assert loop.gauges().resumes == 1
    assert got(line).tokens == by_itself(ticket(9, line.prompt, limit=len(got(line).tokens)))[0]
    for key in (1, 2):
        loop.cancel(key)
    loop._collect()
    assert left_over(loop) == 0


def test_more_tickets_than_slots_wait_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come in when somebody ends, can be cancelled, and are told when the engine stops; a
    person finds a slot meanwhile."""
    monkeypatch.setattr(slots, "SLOTS", 4)
    monkeypatch.setattr(slots, "INTERACTIVE_ONLY", 1)
    engine = Arithmetic(Limits(slots=2, rows=514))
    loop = Loop(engine)
    lines = [ticket(i, [i + 1, 2], limit=3) for i in range(9)]
    for line in lines:
        loop.submit(line)
    loop.cancel(8)
    loop._collect()
    assert loop.gauges().waiting == 8
    assert got(lines[8]).closed
    assert got(lines[8]).reason is None
    chat = ticket(10, [7], lane=Lane.INTERACTIVE, limit=1)
    drive(loop, [chat])
    assert sum(got(line).closed for line in lines) <= 2
    finish(loop, lines)
    assert all((got(t).tokens, got(t).reason) == by_itself(t) for t in lines[:8])
    late = [ticket(20 + i, [1], limit=10**6) for i in range(6)]
    for line in late:
        loop.submit(line)
    loop.close()
    loop.run()
    assert all(isinstance(got(t).error, EngineLost) and got(t).closed for t in late)


def test_closing_fails_what_is_unfinished() -> None:
    """Whoever waits when the loop ends is told that the engine is gone."""
    engine = Arithmetic(Limits(slots=1, rows=513))
    loop = Loop(engine)
    live, waiting = ticket(1, [1], limit=10**6), ticket(2, [1], limit=10**6)
    loop.submit(live)
    loop.submit(waiting)
    loop._collect()
    loop.turn()
    loop.close()
    loop.run()
    for t in (live, waiting):
        assert isinstance(got(t).error, EngineLost)
        assert got(t).closed
    assert engine.memory == {}
    assert engine.closed


def test_the_thread_sleeps_until_there_is_work_and_ends_on_close() -> None:
    """Submissions from other threads wake it, one after another."""
    engine = Arithmetic(Limits(slots=2, rows=514))
    with running(engine) as loop:
        quick = ticket(1, [1, 2, 3])
        loop.submit(quick)
        assert got(quick).ended.wait(60)
        again = ticket(2, [1, 1], limit=1)
        loop.submit(again)
        assert got(again).ended.wait(60)
    assert engine.closed


def test_errands_run_between_steps() -> None:
    """Other work of the engine's thread is done one piece at a time while sequences decode, in
    smaller pieces while somebody interactive would feel it."""

    class Two:
        def __init__(self) -> None:
            self.left = 2
            self.budgets: list[int] = []

        def pending(self) -> bool:
            return self.left > 0

        def run_one(self, rows: int) -> None:
            self.left -= 1
            self.budgets.append(rows)

    errands = Two()
    engine = Arithmetic(Limits(slots=1, rows=513))
    loop = Loop(engine, errands=errands)
    t = ticket(1, [1, 2], limit=3)
    drive(loop, [t])
    assert errands.left == 0
    assert errands.budgets == [512, 512]
    errands.left = 1
    drive(loop, [ticket(2, [1, 2], lane=Lane.INTERACTIVE, limit=3)])
    assert errands.budgets[-1] == 128
    assert got(t).reason is not None


def test_gauges_count_every_token_once() -> None:
    """Generated and prefilled tokens add up, and every turn flushes."""
    flushed: list[Gauges] = []
    engine = Arithmetic(Limits(slots=2, rows=514, prefill=2))
    loop = Loop(engine, flush=flushed.append)
    many = [ticket(i, [i + 1] * 5, limit=4) for i in range(3)]
    drive(loop, many)
    last = loop.gauges()
    assert last.tokens_prefilled == 15
    assert last.tokens_generated == sum(len(got(t).tokens) for t in many)
    assert (last.active, last.waiting, last.parked, last.held) == (0, 0, 0, 0)
    assert flushed[-1] == last
