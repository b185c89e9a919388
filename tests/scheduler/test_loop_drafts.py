"""Drafts in the loop: fewer steps, and never another answer."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.arithmetic import Arithmetic, by_itself, drive, got, left_over, parrot, ticket
from tidemill.scheduler.loop import Chunk, Fate, Loop, Ticket
from tidemill.scheduler.plan import Limits, SlotClass
from tidemill.scheduler.speculation import Speculation
from tidemill.types import Lane

CIRCLE = [20, 21, 22, 23, 24] * 4


def drafting(engine: Arithmetic) -> Loop[str]:
    """A loop that finds any number of rows equally fast: it drafts wherever it can."""
    ticks = itertools.count()
    return Loop(engine, speculation=Speculation(now=lambda: float(next(ticks))))


def engine_of(slots: int, *, reuses: bool = True, room: int = 10**9) -> Arithmetic:
    """One that copies."""
    return Arithmetic(Limits(slots=slots, rows=slots + 64), reuses=reuses, model=parrot, room=room)


def drafted(engine: Arithmetic) -> list[Chunk[str]]:
    """All chunks that had drafts."""
    return [chunk for step in engine.steps for chunk in step if chunk.drafts]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 30), st.sampled_from(Lane), st.integers(1, 60), st.integers(1, 80),
            st.booleans(),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 5),
    st.integers(0, 2),
    st.integers(1, 40),
    st.booleans(),
    st.lists(st.sampled_from(["done", "done", "no_room", "interrupted", "aborted"]), max_size=12),
)  # fmt: skip
def test_any_schedule_gives_each_its_own_answer(
    asked: list[tuple[int, Lane, int, int, bool]],
    slots: int,
    longer: int,
    spare: int,
    parks: bool,
    fates: list[Fate],
) -> None:
    """With drafts as without: the tokens, the reason, and nothing left in the engine; nobody is
    drafted out of the context of its id."""
    short, long = SlotClass(slots=slots, context=35), SlotClass(slots=longer, context=100)
    split = (short, long) if longer else ()
    engine = Arithmetic(
        Limits(
            slots=slots + longer, split=split, rows=slots + longer + spare,
            prefill=min(16, spare), prefill_shared=min(8, spare), headroom=1, moves=2,
        ),
        parks=parks, reuses=True, model=parrot,
    )  # fmt: skip
    engine.fates = list(fates)
    tickets = [
        ticket(i, CIRCLE[:n], lane=lane, limit=limit, stop_after=stop, alone=alone and n <= spare)
        for i, (n, lane, limit, stop, alone) in enumerate(asked)
    ]
    drive(loop := drafting(engine), tickets)
    for t, (_, _, _, stop, _) in zip(tickets, asked, strict=True):
        tokens, reason = by_itself(t, parrot)
        if stop <= len(tokens):
            tokens, reason = tokens[:stop], "stop"
        if got(t).reason == "length" and len(got(t).tokens) < len(tokens):
            assert "no_room" in fates  # the memory was full and it was alone
            tokens, reason = tokens[: len(got(t).tokens)], "length"
        assert (got(t).tokens, got(t).reason) == (tokens, reason)
    alone = {t.key for t in tickets if t.alone}
    assert not alone & {chunk.key for chunk in drafted(engine)}
    assert loop.gauges().tokens_accepted <= loop.gauges().tokens_drafted
    loop.close()
    loop.run()
    assert engine.memory == {}
    assert left_over(loop) == 0


def test_an_answer_that_copies_takes_fewer_steps() -> None:
    """A third of the steps is saved at least, and the counters say by what."""
    engine, plain = engine_of(1), engine_of(1)
    t, same = ticket(1, CIRCLE, limit=60), ticket(1, CIRCLE, limit=60)
    drive(loop := drafting(engine), [t])
    drive(Loop(plain), [same])
    assert got(t).tokens == got(same).tokens
    assert len(engine.steps) < len(plain.steps) * 2 / 3
    gauges = loop.gauges()
    assert gauges.tokens_generated == len(got(t).tokens)
    assert gauges.tokens_drafted == sum(len(chunk.drafts) for chunk in drafted(engine))
    assert 0 < gauges.tokens_accepted < gauges.tokens_drafted


def test_what_an_answer_was_not_is_not_remembered() -> None:
    """Refused drafts, and kept ones behind a stop string, are no part of what others begin with:
    the engine checks every position, and each answer is its own."""
    engine = engine_of(2)
    loop = drafting(engine)
    for stop in (7, 12, 23):
        first = ticket(stop, CIRCLE, limit=50, stop_after=stop)
        drive(loop, [first])
        longer = ticket(100 + stop, CIRCLE + got(first).tokens, limit=30)
        drive(loop, [longer])
        assert got(first).tokens == by_itself(first, parrot)[0][:stop]
        assert (got(longer).tokens, got(longer).reason) == by_itself(longer, parrot)
        assert got(longer).cached > 0
    assert drafted(engine)


def test_memory_that_cannot_be_trimmed_is_not_drafted_into() -> None:
    """Such an engine would have to compute everything again after a refused draft."""
    engine = engine_of(1, reuses=False)
    t = ticket(1, CIRCLE, limit=40)
    drive(drafting(engine), [t])
    assert (got(t).tokens, got(t).reason) == by_itself(t, parrot)
    assert not drafted(engine)


def test_an_answer_that_is_computed_alone_is_not_drafted() -> None:
    """Its steps have the same rows every time."""
    engine = engine_of(2)
    tickets = [ticket(1, CIRCLE, limit=40, alone=True), ticket(2, CIRCLE, limit=40)]
    drive(drafting(engine), tickets)
    assert {chunk.key for chunk in drafted(engine)} == {2}


def test_drafts_that_find_no_room_push_nobody_out() -> None:
    """The memory holds both answers and little more: drafts are given up until somebody leaves,
    and neither is parked for them."""
    engine = engine_of(2, room=2 * (20 + 12) + 2)
    tickets = [ticket(i, [30 + i, *CIRCLE[1:]], limit=12) for i in range(2)]

    class Watched(Loop[str]):
        displaced = 0

        def _displace(self, sequence: object) -> None:
            self.displaced += 1

    loop = Watched(engine, speculation=Speculation(now=itertools.count().__next__))
    drive(loop, tickets)
    assert loop.displaced == 0
    assert [got(t).tokens for t in tickets] == [by_itself(t, parrot)[0] for t in tickets]


def test_the_end_may_be_a_draft() -> None:
    """The token that ends an answer was looked up: it ends it, and what was drafted after it is
    dropped."""

    def ends(tokens: list[int]) -> int:
        return [1, 2, 3, 26][len(tokens) % 4]

    engine = Arithmetic(Limits(slots=1, rows=65), reuses=True, model=ends)
    t: Ticket[str] = ticket(1, [*[1, 2, 3, 26] * 5, 1], limit=40)
    loop = drafting(engine)
    warm = ticket(2, [1, 2, 3, 26] * 5, limit=3)
    drive(loop, [warm, t])
    assert (got(t).tokens, got(t).reason) == ([2, 3], "stop")
    assert engine.memory[0] == [*t.prompt, 2, 3]
    assert any(26 in chunk.drafts for chunk in drafted(engine) if chunk.key == 1)
