"""Sequence ids of several lengths: whoever outgrows its class goes on in the next one."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.scheduler.arithmetic import (
    BYTES,
    Arithmetic,
    by_itself,
    drive,
    finish,
    got,
    left_over,
    ticket,
)
from tidemill.errors import EngineLost
from tidemill.scheduler import memory
from tidemill.scheduler.loop import Fate, Loop, Ticket
from tidemill.scheduler.plan import Limits, SlotClass
from tidemill.scheduler.sequence import FIXED_CHUNK
from tidemill.types import Lane

LONGEST = 200


def limits_of(
    *sizes: tuple[int, int], headroom: int = 0, prefill: int = 512, moves: int = 0
) -> Limits:
    """Classes as (slots, context)."""
    split = tuple(SlotClass(slots=slots, context=context) for slots, context in sizes)
    total = sum(slots for slots, _ in sizes)
    return Limits(
        slots=total, split=split, rows=total + max(prefill, FIXED_CHUNK), prefill=prefill,
        headroom=headroom, moves=moves,
    )  # fmt: skip


def seqs_of(engine: Arithmetic, key: int) -> list[int]:
    """The ids that a sequence was computed on, in order, each named once in a row."""
    seqs = [c.seq for step in engine.steps for c in step if c.key == key]
    return [seq for i, seq in enumerate(seqs) if i == 0 or seq != seqs[i - 1]]


def rows_of(engine: Arithmetic, key: int) -> int:
    """Rows that were computed of a sequence."""
    return sum(len(c.tokens) for step in engine.steps for c in step if c.key == key)


def endless(key: int, prompt: list[int], limit: int, lane: Lane = Lane.BATCH) -> Ticket[str]:
    """A ticket whose model, alone, says at least ``limit`` tokens."""
    for salt in range(1, 1000):
        t = ticket(key, [*prompt, salt], limit=limit, lane=lane)
        if len(by_itself(t)[0]) == limit:
            return t
    raise AssertionError("no such prompt")


asks = st.lists(
    st.tuples(
        st.lists(st.integers(1, 4), min_size=1, max_size=30),
        st.sampled_from(Lane),
        st.integers(1, 40),
        st.integers(0, 20),
        st.sampled_from([False, False, False, True]),
    ),
    min_size=1,
    max_size=16,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asks,
    st.lists(st.tuples(st.integers(1, 3), st.integers(4, 30)), max_size=2),
    st.integers(1, 2),
    st.integers(1, 16),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
    st.lists(st.sampled_from(["done", "no_room", "interrupted", "aborted"]), max_size=12),
)
def test_any_classes_give_each_its_own_answer(
    monkeypatch: pytest.MonkeyPatch,
    asked: list[tuple[list[int], Lane, int, int, bool]],
    shorter: list[tuple[int, int]],
    longest: int,
    prefill: int,
    headroom: int,
    parks: bool,
    reuses: bool,
    fates: list[Fate],
) -> None:
    """Wherever a sequence begins, moves, waits or is computed again, no id holds more than it has
    room for, and the answer is the model's."""
    monkeypatch.setattr(memory, "LEAST", 2)
    sizes = sorted(shorter, key=lambda size: size[1])
    engine = Arithmetic(
        limits_of(*sizes, (longest, LONGEST), headroom=headroom, prefill=prefill, moves=2 * reuses),
        parks=parks,
        reuses=reuses,
    )
    engine.fates = list(fates)
    loop = Loop(engine)
    tickets = [
        ticket(i, prompt, lane=lane, limit=limit, expected=expected, alone=alone)
        for i, (prompt, lane, limit, expected, alone) in enumerate(asked)
    ]
    drive(loop, tickets)
    for t in tickets:
        answer = got(t)
        tokens, reason = by_itself(t)
        if answer.reason == "length" and len(answer.tokens) < t.limit:
            assert "no_room" in fates
            assert answer.tokens == tokens[: len(answer.tokens)]
        else:
            assert (answer.tokens, answer.reason) == (tokens, reason)
    loop._memory.close()
    assert not any(engine.memory.values())
    assert left_over(loop) == 0


def test_a_sequence_begins_in_the_shortest_class_that_has_room() -> None:
    """For its prompt and what is expected of its answer; one that is computed alone in the longest,
    whatever it needs."""
    engine = Arithmetic(limits_of((4, 10), (2, 20), (2, 40)))
    asked = [
        ticket(1, [5] * 4, expected=6, limit=1),
        ticket(2, [5] * 4, expected=7, limit=1),
        ticket(3, [5] * 21, limit=1),
        ticket(4, [5] * 4, limit=1, alone=True),
    ]
    drive(Loop(engine), asked)
    assert [seqs_of(engine, key) for key in (1, 2, 3, 4)] == [[0], [4], [6], [7]]


def test_an_answer_that_outgrows_its_class_goes_on_in_the_next() -> None:
    """At the exact token, with its state, and nothing is computed twice."""
    engine = Arithmetic(limits_of((2, 8), (1, 40)))
    loop = Loop(engine)
    t = endless(1, [3, 3, 3], limit=12)
    drive(loop, [t])
    assert (got(t).tokens, got(t).reason) == by_itself(t)
    assert seqs_of(engine, 1) == [0, 2]
    assert next(c.start for step in engine.steps for c in step if c.seq == 2) == 8
    assert rows_of(engine, 1) == 4 + 12 - 1
    assert (loop.gauges().parks, loop.gauges().resumes, loop.gauges().requeues) == (1, 1, 0)


def test_without_parking_it_is_computed_again_in_the_next_class() -> None:
    """Where states cannot be saved, or the arena is full."""
    t = endless(1, [3, 3, 3], limit=12)
    for engine, parking in (
        (Arithmetic(limits_of((2, 8), (1, 40)), parks=False), 1 << 20),
        (Arithmetic(limits_of((2, 8), (1, 40))), 8 * BYTES - 1),
    ):
        again = ticket(1, t.prompt, limit=12)
        drive(Loop(engine, parking=parking), [again])
        assert (got(again).tokens, got(again).reason) == by_itself(t)
        assert seqs_of(engine, 1) == [0, 2]
        assert rows_of(engine, 1) == 4 + 12 - 1 + 8


def test_it_waits_parked_while_the_next_class_is_full() -> None:
    """And its id is used meanwhile."""
    engine = Arithmetic(limits_of((1, 8), (1, 60)))
    loop = Loop(engine)
    long = endless(1, [2] * 9, limit=40)
    grows = endless(2, [3, 3, 3], limit=12)
    other = ticket(3, [1, 1], limit=2)
    for t in (long, grows):
        loop.submit(t)
    for _ in range(9):
        loop._collect()
        loop.turn()
    assert (loop.gauges().active, loop.gauges().parked) == (1, 1)
    drive(loop, [other])
    assert not got(grows).closed
    finish(loop, [long, grows])
    for t in (long, grows):
        assert (got(t).tokens, got(t).reason) == by_itself(t)


def test_a_person_who_outgrows_a_class_waits_for_no_line() -> None:
    """A line makes way in the longer class."""
    engine = Arithmetic(limits_of((1, 8), (1, 60)))
    loop = Loop(engine)
    line = endless(1, [2] * 9, limit=40)
    chat = endless(2, [3, 3, 3], limit=12, lane=Lane.INTERACTIVE)
    loop.submit(line)
    drive(loop, [chat])
    assert not got(line).closed
    finish(loop, [line])
    for t in (line, chat):
        assert (got(t).tokens, got(t).reason) == by_itself(t)


def test_long_lines_are_not_starved_by_short_ones_that_grow() -> None:
    """Lines that begin short and then need the long class come all the time: a line that is long
    from the start has its turn before those that arrived an epoch after it."""
    engine = Arithmetic(limits_of((4, 8), (1, 60)))
    loop = Loop(engine)
    long = ticket(0, [2] * 20, limit=2)
    stream = [endless(i, [3, 3, i % 9 + 1], limit=12) for i in range(1, 80)]
    for t in stream[:5]:
        loop.submit(t)
    for _ in range(6):
        loop._collect()
        loop.turn()
    loop.submit(long)
    before = 0
    for t in stream[5:]:
        loop.submit(t)
        for _ in range(3):
            loop._collect()
            loop.turn()
        before = sum(got(t).closed for t in stream)
        if got(long).tokens:
            break
    assert got(long).tokens
    assert before <= 2 * 2 * 5


def test_a_lost_class_costs_nobody_in_another() -> None:
    """llama.cpp lost one context; the other one goes on."""
    engine = Arithmetic(limits_of((1, 8), (1, 60)))
    loop = Loop(engine)
    short, long = ticket(1, [1, 2], limit=3), ticket(2, [2] * 9, limit=3)
    engine.fates = ["lost"]
    drive(loop, [short, long])
    assert isinstance(got(short).error, EngineLost)
    assert (got(long).tokens, got(long).reason) == by_itself(long)


def test_a_full_class_keeps_nobody_from_another() -> None:
    """Memory that runs out in one holds only those up who need that one."""
    engine = Arithmetic(limits_of((2, 8), (2, 60)))
    loop = Loop(engine)
    long = [endless(i, [2] * 9, limit=30) for i in (1, 2, 3)]
    engine.fates = ["no_room"]
    for t in long:
        loop.submit(t)
    loop._collect()
    loop.turn()
    assert loop.gauges().active == 1
    short = ticket(9, [1, 2], limit=3)
    drive(loop, [short])
    assert (got(short).tokens, got(short).reason) == by_itself(short)
    assert loop.gauges().active == 1
    finish(loop, long)


def test_prefixes_are_shared_across_classes_where_they_fit() -> None:
    """A short beginning is copied into the long class; a memory that is longer than the room of an
    id is not, since it would be copied whole."""
    engine = Arithmetic(limits_of((1, 40), (1, 100)), reuses=True)
    loop = Loop(engine)
    stem = [7, 3] * 12
    first = ticket(1, [*stem, 1], limit=1)
    longer = ticket(2, [*stem, 2, *[5] * 40], limit=1)
    drive(loop, [first])
    drive(loop, [longer])
    assert got(longer).cached == 24
    drive(loop, [ticket(3, [9] * 30, limit=1)])
    again = ticket(4, [*stem, 2, 5, 5], limit=1)
    drive(loop, [again])
    assert got(again).cached == 0
    for t in (first, longer, again):
        assert (got(t).tokens, got(t).reason) == by_itself(t)
