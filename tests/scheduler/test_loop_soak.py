"""Ten thousand mixed requests, and every step failing in turn: nobody is lost, nothing leaks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.arithmetic import BYTES, Arithmetic, Collected, by_itself, finish, got, ticket
from tidemill.errors import EngineLost
from tidemill.scheduler import memory
from tidemill.scheduler.loop import EPOCH, Chunk, Fate, Loop, Observation, Ticket
from tidemill.scheduler.memory import PATIENCE
from tidemill.scheduler.plan import Limits
from tidemill.types import Lane

REQUESTS = 10_000


def empty(loop: Loop[str], engine: Arithmetic) -> None:
    """Nothing is left of anybody: no slot, no id, no parked byte, no remembered token."""
    gauges = loop.gauges()
    assert (gauges.active, gauges.waiting, gauges.parked) == (0, 0, 0)
    loop._memory.close()
    loop._slots.check()
    stats = loop._slots.stats
    assert (stats["used"], stats["live"], stats["arena"]["used"]) == (0, 0, 0)
    assert not any(engine.memory.values())
    assert len(loop._memory._tree) == 0
    assert not loop._live
    assert not any(loop._waiting)
    assert not loop._outside


def right(t: Ticket[str], *, cut: bool = False) -> None:
    """The answer is the model's own; ``cut``: or the beginning of it."""
    tokens, reason = by_itself(t)
    answer = got(t)
    assert answer.closed
    if cut:
        assert answer.tokens == tokens[: len(answer.tokens)]
    else:
        assert (answer.tokens, answer.reason, answer.error) == (tokens, reason, None)


# --- no leak ------------------------------------------------------------------------------------


class Rough(Arithmetic):
    """Now and then a step has no room, is aborted, or costs the engine all its memory."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__(
            Limits(slots=16, rows=16 + 128, prefill=48, prefill_shared=16, headroom=1, moves=2),
            room=420,
            reuses=True,
        )
        self._dice = dice
        self.suffered: set[Fate] = set()

    def step(self, chunks: list[Chunk[str]]) -> Observation:
        draw = self._dice.random()
        fate: Fate = (
            "lost" if draw < 0.002 else "aborted" if draw < 0.02 else
            "no_room" if draw < 0.04 else "interrupted" if draw < 0.06 else "done"
        )  # fmt: skip
        self.fates = [fate]
        seen = super().step(chunks)
        self.steps.clear()
        self.suffered.add(seen.fate)
        return seen


def test_ten_thousand_mixed_requests_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes, lengths, shared beginnings, conversations, lines that are computed alone; cancels at
    every stage; parking with little room; steps that fail in every way. Everybody hears one end,
    which is the right answer, the beginning of one that was cut, or that the engine was lost; and
    then every slot, id and byte is free."""
    monkeypatch.setattr(memory, "LEAST", 3)
    monkeypatch.setattr(memory, "MOST_ASIDE", 8)
    dice = random.Random(20_251)
    engine = Rough(dice)
    loop = Loop(engine, parking=200 * BYTES)
    stems = [[dice.randrange(1, 5) for _ in range(dice.randrange(3, 16))] for _ in range(9)]
    lanes = [Lane.BATCH] * 6 + [Lane.JOB] + [Lane.INTERACTIVE] * 2
    open_ones: dict[int, Ticket[str]] = {}
    ends = dict.fromkeys(("right", "cut", "lost", "cancelled"), 0)
    cancelled: set[int] = set()
    key = 0

    def settle() -> None:
        for t in [t for t in open_ones.values() if got(t).closed]:
            del open_ones[t.key]
            answer: Collected = got(t)
            if answer.error is not None:
                assert isinstance(answer.error, EngineLost)
                right(t, cut=True)
                ends["lost"] += 1
            elif answer.reason is None:
                assert t.key in cancelled
                right(t, cut=True)
                ends["cancelled"] += 1
            elif (answer.tokens, answer.reason) == by_itself(t):
                ends["right"] += 1
            else:
                # Alone on the engine and without room for one more token.
                assert answer.reason == "length"
                right(t, cut=True)
                ends["cut"] += 1

    while key < REQUESTS or open_ones:
        for _ in range(min(dice.choice((0, 0, 1, 4, 9)), REQUESTS - key)):
            lane = dice.choice(lanes)
            t = ticket(
                key,
                dice.choice(stems) + [dice.randrange(1, 60) for _ in range(dice.randrange(1, 5))],
                lane=lane,
                limit=dice.choice((1, 2, 5, 12)),
                alone=dice.random() < 0.03,
                scope=dice.choice("ab"),
            )
            open_ones[key] = t
            loop.submit(t)
            key += 1
        if open_ones and dice.random() < 0.2:
            victim = dice.choice(list(open_ones))
            cancelled.add(victim)
            loop.cancel(victim)
        if open_ones:
            loop._collect()
            loop.turn()
            settle()
    assert sum(ends.values()) == REQUESTS
    assert min(ends["right"], ends["lost"], ends["cancelled"]) > 50
    assert ends["right"] > REQUESTS / 2
    assert engine.suffered == {"done", "no_room", "interrupted", "aborted", "lost"}
    gauges = loop.gauges()
    assert min(gauges.parks, gauges.resumes, gauges.requeues, gauges.tokens_reused) > 100
    empty(loop, engine)


# --- every step failing in turn -----------------------------------------------------------------


def scene(engine: Arithmetic) -> tuple[Loop[str], list[Ticket[str]]]:
    """Nine requests on three ids, some of them late: lines that begin alike, a line that is
    computed alone, and people who make lines give way."""
    loop = Loop(engine)
    begin = [7, 3] * 10
    lines = [ticket(k, [*begin, 20 + k], limit=7) for k in range(5)]
    lines.append(ticket(5, [9, 8, 7], limit=4, alone=True))
    people = [ticket(k, [40 + k] * 6, lane=Lane.INTERACTIVE, limit=5) for k in (6, 7, 8)]
    for t in lines:
        loop.submit(t)
    for _ in range(4):
        loop._collect()
        loop.turn()
    for t in people:
        loop.submit(t)
    return loop, lines + people


def small(parks: bool) -> Arithmetic:
    return Arithmetic(Limits(slots=3, rows=3 + 128, prefill=16, moves=1), parks=parks, reuses=True)


@pytest.mark.parametrize("parks", [True, False])
@pytest.mark.parametrize("fate", ["aborted", "interrupted", "no_room", "lost"])
def test_any_step_may_fail(fate: Fate, parks: bool) -> None:
    """One run for every step of the scene, with that step failing: what was aborted or had no room
    is computed again and says the same; a lost step costs those who were on an id and nobody else;
    each request ends once."""
    calm = small(parks)
    loop, tickets = scene(calm)
    finish(loop, tickets)
    for t in tickets:
        right(t)
    steps = len(calm.steps)
    assert steps > 20
    for index in range(steps):
        engine = small(parks)
        engine.fates = [*["done"] * index, fate]  # type: ignore[list-item]
        loop, tickets = scene(engine)
        finish(loop, tickets)
        failed = {t.key for t in tickets if got(t).error is not None}
        computed = {chunk.key for chunk in engine.steps[index]}
        if fate == "lost":
            assert computed <= failed
            assert len(failed) <= 3
        else:
            assert not failed
        for t in tickets:
            right(t, cut=t.key in failed)
            assert (got(t).reason is None) == (t.key in failed)
        empty(loop, engine)


@pytest.mark.parametrize("parks", [True, False])
def test_anybody_may_leave_before_any_step(parks: bool) -> None:
    """A cancel of each request before each step: it ends there without a reason, its slot is free
    in the same step, and all others say what they would have said."""
    calm = small(parks)
    loop, tickets = scene(calm)
    finish(loop, tickets)
    for index in range(4, len(calm.steps)):
        for victim in range(len(tickets)):
            engine = small(parks)
            loop, tickets = scene(engine)
            while len(engine.steps) < index and not all(got(t).closed for t in tickets):
                loop._collect()
                loop.turn()
            ended = got(tickets[victim]).closed
            loop.cancel(victim)
            if any(not got(t).closed for t in tickets):
                loop._collect()
                assert got(tickets[victim]).closed
                loop.turn() if loop._live or any(loop._waiting) else None
                assert victim not in {c.key for c in engine.steps[-1]} or len(engine.steps) <= index
            finish(loop, tickets)
            for t in tickets:
                right(t, cut=t.key == victim and not ended)
            empty(loop, engine)


# --- nobody starves -----------------------------------------------------------------------------

bursts = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), max_size=8), min_size=1, max_size=30
)


def most_overtaken(engine: Arithmetic) -> int:
    """Of those that came after a line, how many began before it: the most of any line."""
    begun: list[int] = []
    for step in engine.steps:
        begun += sorted({c.key for c in step} - set(begun))
    return max(sum(other > key for other in begun[:place]) for place, key in enumerate(begun))


@settings(deadline=None, max_examples=80)
@given(bursts, st.integers(1, 4), st.booleans(), st.sampled_from([20, 150]))
def test_a_line_is_overtaken_by_few(
    bursts: list[list[tuple[int, int]]], slots: int, shares: bool, long: int
) -> None:
    """However lines arrive and however long what they begin with, of those that came after a line
    fewer than an epoch has begin before it; where it waits for what another one computes, also
    those that find a slot until its patience is over, and in that one step."""
    stems = [[], [1] * long, [2] * long, [1] * long + [3] * 20]
    engine = Arithmetic(Limits(slots=slots, rows=slots + 16, prefill=8), reuses=shares)
    loop = Loop(engine)
    tickets: list[Ticket[str]] = []
    for burst in [*bursts, [(0, 1)]]:
        for stem, limit in burst:
            t = ticket(len(tickets), [*stems[stem], 30 + len(tickets) % 60], limit=limit)
            tickets.append(t)
            loop.submit(t)
        if not all(got(t).closed for t in tickets):
            loop._collect()
            loop.turn()
    finish(loop, tickets)
    bound = EPOCH * slots + ((PATIENCE + 1) * slots if shares else 0)
    assert most_overtaken(engine) < bound
    empty(loop, engine)


def test_nobody_waits_for_ever_for_a_long_beginning() -> None:
    """A line begins like one whose prompt takes hundreds of steps, and short ones keep coming: it
    lets so many pass, and then computes the beginning itself."""
    slots = 2
    engine = Arithmetic(Limits(slots=slots, rows=slots + 1, prefill=1), reuses=True)
    loop = Loop(engine)
    stem = [1] * 400
    lines = [ticket(0, [*stem, 5], limit=1), ticket(1, [*stem, 6], limit=1)]
    for t in lines:
        loop.submit(t)
    for key in range(2, 40):
        t = ticket(key, [key], limit=1)
        lines.append(t)
        loop.submit(t)
        loop._collect()
        loop.turn()
    assert not got(lines[0]).closed, "the beginning is still being computed"
    assert PATIENCE * slots <= most_overtaken(engine) < (EPOCH + PATIENCE + 1) * slots
    assert any(c.key == 1 for step in engine.steps for c in step)
    finish(loop, lines)
    for t in lines:
        right(t)
    empty(loop, engine)
