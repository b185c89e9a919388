"""Prompts that begin alike are computed once, and nobody's answer changes by it."""

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
from tidemill.scheduler import memory
from tidemill.scheduler.loop import Fate, Loop, Ticket
from tidemill.scheduler.plan import Limits
from tidemill.scheduler.sequence import FIXED_CHUNK
from tidemill.types import Lane

SYSTEM = [7, 3] * 50


def engine_of(
    slots: int = 4, *, headroom: int = 0, moves: int = 2, parks: bool = True
) -> Arithmetic:
    """An engine that can copy."""
    return Arithmetic(
        Limits(slots=slots, rows=slots + 512, headroom=headroom, moves=moves),
        parks=parks,
        reuses=True,
    )


def computed(engine: Arithmetic) -> int:
    """Rows that the engine computed."""
    return sum(len(c.tokens) for step in engine.steps for c in step)


def check(tickets: list[Ticket[str]]) -> None:
    """Everybody got the model's own words."""
    for t in tickets:
        assert (got(t).tokens, got(t).reason) == by_itself(t)


def tail(i: int) -> list[int]:
    """What tells one prompt from another."""
    return [20 + i, 1, 2]


stems = st.lists(st.integers(1, 3), max_size=12)
asks = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.lists(st.integers(1, 50), min_size=1, max_size=6),
        st.sampled_from(Lane),
        st.integers(1, 8),
        st.sampled_from([False, False, False, True]),
        st.sampled_from(["", "a"]),
    ),
    min_size=1,
    max_size=20,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(stems, min_size=3, max_size=3),
    asks,
    st.integers(1, 5),
    st.integers(1, 16),
    st.integers(0, 2),
    st.booleans(),
    st.lists(st.sampled_from(["done", "no_room", "interrupted", "aborted", "cancel"]), max_size=12),
)
def test_any_schedule_with_reuse_gives_each_its_own_answer(
    monkeypatch: pytest.MonkeyPatch,
    stems: list[list[int]],
    asked: list[tuple[int, list[int], Lane, int, bool, str]],
    slots: int,
    prefill: int,
    headroom: int,
    parks: bool,
    fates: list[str],
) -> None:
    """Whatever is copied, cut, kept, put aside, moved, given up or cancelled, the engine's memory
    is the sequence's own tokens, the answer is the model's, and what was cached is part of the
    prompt."""
    monkeypatch.setattr(memory, "LEAST", 2)
    monkeypatch.setattr(memory, "MOST_ASIDE", 2)
    engine = Arithmetic(
        Limits(slots=slots, rows=slots + max(prefill, FIXED_CHUNK), prefill=prefill,
               prefill_shared=2, headroom=headroom, moves=2),
        parks=parks, reuses=True,
    )  # fmt: skip
    given_fates: list[Fate] = [f for f in fates if f != "cancel"]  # type: ignore[misc]
    engine.fates = given_fates
    loop = Loop(engine)
    tickets = [
        ticket(i, stems[stem] + rest, lane=lane, limit=limit, alone=alone, scope=scope)
        for i, (stem, rest, lane, limit, alone, scope) in enumerate(asked)
    ]
    cancelled = set(range(min(len(tickets), fates.count("cancel"))))
    last = ticket(99, [1], limit=1)
    for key in cancelled:
        loop.submit(tickets[key])
    first = ticket(98, [1])
    loop.submit(first)
    loop._collect()
    loop.turn()
    for key in cancelled:
        loop.cancel(key)
    drive(loop, [*(t for t in tickets if t.key not in cancelled), last])
    finish(loop, [first])
    for t in tickets:
        answer = got(t)
        assert 0 <= answer.cached < len(t.prompt)
        tokens, reason = by_itself(t)
        if t.key in cancelled or (answer.reason == "length" and len(answer.tokens) < t.limit):
            assert answer.tokens == tokens[: len(answer.tokens)]
        else:
            assert (answer.tokens, answer.reason) == (tokens, reason)
        if t.alone:
            assert answer.cached == 0
    loop._memory.close()
    assert not any(engine.memory.values())
    assert left_over(loop) == 0
    assert len(loop._memory._tree) == 0


def test_a_shared_beginning_is_computed_once() -> None:
    """Twelve lines with one system prompt on four slots: the first computes it, the others wait for
    it and begin with it, and each says how much that was."""
    engine = engine_of()
    lines = [ticket(i, SYSTEM + tail(i), limit=4) for i in range(12)]
    loop = Loop(engine)
    drive(loop, lines)
    check(lines)
    assert sorted(got(t).cached for t in lines) == [0] + [100] * 11
    assert computed(engine) < 100 + 12 * 8
    gauges = loop.gauges()
    assert gauges.tokens_reused == 1100
    assert gauges.tokens_prefilled == 12 * 103 - 1100


def test_a_prompt_that_is_there_whole_still_computes_its_last_token() -> None:
    """The next token comes from computing the last one."""
    engine = engine_of(1)
    first, again = ticket(1, SYSTEM, limit=3), ticket(2, SYSTEM, limit=3)
    loop = Loop(engine)
    drive(loop, [first])
    drive(loop, [again])
    check([first, again])
    assert got(again).cached == len(SYSTEM) - 1


def test_short_beginnings_are_computed_again() -> None:
    """A copy would cost more than it saves."""
    lines = [ticket(i, [5] * (memory.LEAST - 1) + tail(i)) for i in range(6)]
    drive(Loop(engine_of()), lines)
    check(lines)
    assert all(got(t).cached == 0 for t in lines)


def test_an_engine_that_cannot_copy_computes_everything() -> None:
    """Some models' memory can be neither cut nor copied."""
    engine = Arithmetic(Limits(slots=2, rows=514), reuses=False)
    lines = [ticket(i, SYSTEM + tail(i)) for i in range(4)]
    drive(Loop(engine), lines)
    check(lines)
    assert all(got(t).cached == 0 for t in lines)


def test_scopes_share_nothing() -> None:
    """What one owner has asked cannot be told from what another is billed."""
    loop = Loop(engine_of())
    mine, other, again = (
        ticket(1, SYSTEM + tail(1), lane=Lane.INTERACTIVE, scope="a"),
        ticket(2, SYSTEM + tail(2), lane=Lane.INTERACTIVE, scope="b"),
        ticket(3, SYSTEM + tail(3), lane=Lane.INTERACTIVE, scope="a"),
    )
    for t in (mine, other, again):
        drive(loop, [t])
    assert [got(t).cached for t in (mine, other, again)] == [0, 0, 100]


def test_lines_that_begin_alike_run_together() -> None:
    """Lines of two templates that come in turns on two slots run template by template, so that each
    template is computed once."""
    engine = engine_of(2)
    first, second = [4, 9] * 30, [9, 4] * 30
    lines = [ticket(i, (first if i % 2 else second) + tail(i), limit=3) for i in range(4)]
    drive(Loop(engine), lines)
    check(lines)
    assert sum(got(t).cached == 60 for t in lines) == 2


def test_a_line_is_overtaken_by_few() -> None:
    """Lines that keep arriving and begin alike do not starve one that begins otherwise: it starts
    before a bounded number of them."""
    engine = engine_of(2)
    loop = Loop(engine)
    odd = ticket(0, [99] * 40, limit=2)
    stream = [ticket(i, [1] * 40 + tail(i), limit=2) for i in range(1, 40)]
    loop.submit(stream[0])
    loop.submit(odd)
    before = 0
    for t in stream[1:]:
        loop.submit(t)
        loop._collect()
        loop.turn()
        before = sum(got(t).closed for t in stream)
        if got(odd).tokens:
            break
    assert got(odd).tokens
    assert before <= 2 * 2 + 2


def test_a_conversation_goes_on_where_it_stopped() -> None:
    """The second turn of a chat computes only what is new, even after lines took its id."""
    engine = engine_of(1)
    loop = Loop(engine)
    first = ticket(1, SYSTEM + tail(1), lane=Lane.INTERACTIVE, limit=6)
    drive(loop, [first])
    drive(loop, [ticket(i, [30 + i] * 50, limit=2) for i in range(2, 5)])
    history = [*first.prompt, *got(first).tokens]
    second = ticket(9, [*history, 8, 8, 8], lane=Lane.INTERACTIVE, limit=3)
    drive(loop, [second])
    check([second])
    # The last token of an answer that is cut was chosen and never computed.
    assert got(second).cached == len(history) - (got(first).reason == "length")


def test_the_side_keeps_the_conversations_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two have room; the third pushes the oldest out."""
    monkeypatch.setattr(memory, "MOST_ASIDE", 2)
    engine = engine_of(1)
    loop = Loop(engine)
    chats = [ticket(i, [40 + i] * 50, lane=Lane.INTERACTIVE, limit=1) for i in range(4)]
    for chat in chats:
        drive(loop, [chat])
    assert loop.gauges().arena.blocks == 2
    assert loop.gauges().held == 3
    again = [ticket(10 + i, [40 + i] * 60, lane=Lane.INTERACTIVE, limit=1) for i in (0, 2)]
    for chat in again:
        drive(loop, [chat])
    assert [got(t).cached for t in again] == [0, 50]


def test_parking_a_line_goes_before_keeping_a_conversation() -> None:
    """The arena has room for one: it is the displaced line's."""
    engine = Arithmetic(Limits(slots=1, rows=513), reuses=True)
    loop = Loop(engine, parking=64 * BYTES)
    drive(loop, [ticket(1, [5] * 50, lane=Lane.INTERACTIVE, limit=1)])
    line = ticket(2, [6] * 50, limit=9)
    loop.submit(line)
    for _ in range(3):
        loop._collect()
        loop.turn()
    assert (loop.gauges().parked, loop.gauges().held) == (0, 1)
    loop.submit(ticket(3, [7] * 50, lane=Lane.INTERACTIVE, limit=9))
    loop._collect()
    loop.turn()
    assert (loop.gauges().parked, loop.gauges().held) == (1, 0)
    assert loop.gauges().refused == 1


@pytest.mark.parametrize("more", [[8, 8], [9] * 40])
def test_what_cannot_be_brought_back_is_computed(more: list[int]) -> None:
    """A conversation whose state is of no use is dropped, and its next turn computed."""

    class Forgetful(Arithmetic):
        def load(self, seq: int, state: memoryview) -> bool:
            return False

        def copy(self, source: int, to: int) -> bool:
            return False

    engine = Forgetful(Limits(slots=2, rows=514), reuses=True)
    loop = Loop(engine)
    first = ticket(1, SYSTEM, lane=Lane.INTERACTIVE, limit=1)
    drive(loop, [first])
    drive(loop, [ticket(i, [30 + i] * 50, limit=3) for i in (2, 3)])
    assert loop.gauges().arena.blocks == 1
    second = ticket(4, SYSTEM[:60] + more, lane=Lane.INTERACTIVE, limit=3)
    drive(loop, [second])
    check([second])
    assert got(second).cached == 0
    loop._memory.close()
    assert left_over(loop) == 0


def test_several_choices_compute_their_prompt_once() -> None:
    """``n`` choices arrive together, interactive too."""
    engine = engine_of()
    choices = [ticket(i, SYSTEM, lane=Lane.INTERACTIVE, limit=3) for i in range(4)]
    drive(Loop(engine), choices)
    check(choices)
    assert computed(engine) < 100 + 4 * 4


def test_a_person_does_not_wait_for_a_line_that_begins_alike() -> None:
    """They begin alike, and the person computes it all, before the line goes on."""
    engine = Arithmetic(Limits(slots=4, rows=20, prefill=16, prefill_shared=4), reuses=True)
    loop = Loop(engine)
    loop.submit(ticket(1, SYSTEM + tail(1)))
    loop._collect()
    loop.turn()
    loop.submit(ticket(2, SYSTEM + tail(2), lane=Lane.INTERACTIVE))
    loop._collect()
    loop.turn()
    assert [(c.key, len(c.tokens)) for c in engine.steps[-1]] == [(2, 16)]


def test_a_lost_engine_remembers_nothing() -> None:
    """After its memory is gone nobody begins with it."""
    engine = engine_of(1)
    loop = Loop(engine)
    drive(loop, [ticket(1, SYSTEM + tail(1))])
    engine.fates = ["lost"]
    drive(loop, [ticket(2, SYSTEM + tail(2))])
    third = ticket(3, SYSTEM + tail(3))
    drive(loop, [third])
    check([third])
    assert got(third).cached == 0


def test_holes_are_closed_while_nobody_waits() -> None:
    """When short lines end among long ones, the long ones move together and go on."""
    engine = engine_of(6)
    lines = [ticket(i, [i + 1] * 40, limit=2 if i % 2 == 0 else 12) for i in range(6)]
    drive(Loop(engine), lines)
    check(lines)
    assert [c.seq for c in engine.steps[8]] == list(range(len(engine.steps[8])))


def test_a_sequence_that_is_computed_alone_shares_no_step_and_always_the_same_chunks() -> None:
    """Beside others, displaced or aborted, its rows are those of a run on an idle engine."""

    def rows_of(engine: Arithmetic, key: int) -> list[tuple[int, int]]:
        own = [step for step in engine.steps if any(c.key == key for c in step)]
        assert all(len(step) == 1 for step in own)
        return [(step[0].start, len(step[0].tokens)) for step in own]

    prompt = list(range(1, 300))
    idle, busy = engine_of(2), engine_of(2, parks=False)
    drive(Loop(idle), [ticket(1, prompt, limit=6, alone=True)])
    calm = rows_of(idle, 1)
    assert calm[:3] == [(0, 128), (128, 128), (256, 43)]

    loop = Loop(busy)
    quiet = ticket(1, prompt, limit=6, alone=True)
    others = [ticket(i, [*prompt, i], limit=9) for i in range(2, 5)]
    for t in (quiet, *others):
        loop.submit(t)
    for _ in range(9):
        loop._collect()
        loop.turn()
    drive(loop, [ticket(i, [3], lane=Lane.INTERACTIVE, limit=4) for i in (8, 9)])
    finish(loop, [quiet, *others])
    check([quiet, *others])
    noisy = rows_of(busy, 1)
    # It was displaced without being parked, and began again.
    assert noisy[-len(calm) :] == calm
    assert got(quiet).cached == 0
