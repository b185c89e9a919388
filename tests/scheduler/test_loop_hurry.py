"""Nobody INTERACTIVE waits behind a batch, and the batch gets on all the same."""

from __future__ import annotations

from tests.scheduler.arithmetic import Arithmetic, Collected
from tidemill.scheduler.haste import HURRIED
from tidemill.scheduler.loop import Chunk, Loop, Observation, Ticket
from tidemill.scheduler.plan import Limits
from tidemill.types import Lane

LIMITS = Limits(slots=4, rows=20, prefill=16, prefill_shared=4, headroom=1)


def ticket(key: int, n: int, *, lane: Lane = Lane.BATCH, limit: int = 50) -> Ticket[str]:
    """A prompt of ``n`` tokens that begins like no other."""
    return Ticket(
        key=key, lane=lane, prompt=[key, *range(2, n + 1)], limit=limit, chooser="",
        answer=Collected(),
    )  # fmt: skip


class Visited(Arithmetic):
    """Somebody arrives while a step runs; an engine that can gives the step up."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.arrivals: list[Ticket[str]] = []
        self.loop: Loop[str] | None = None

    def step(self, chunks: list[Chunk[str]]) -> Observation:
        if self.arrivals and self.loop is not None:
            self.loop.submit(self.arrivals.pop())
        if self.interrupts:
            self.interrupts = 0
            self.fates = ["interrupted"]
        return super().step(chunks)


def turn(loop: Loop[str]) -> None:
    """Take in who arrived, and one step."""
    loop._collect()
    loop.turn()


def test_a_prompt_has_steps_to_itself_and_then_its_neighbours_go_on() -> None:
    """Its steps have no row of a line; once it is computed, all have one."""
    engine = Arithmetic(LIMITS)
    loop = Loop(engine)
    for key in (1, 2):
        loop.submit(ticket(key, 4))
    turn(loop)
    loop.submit(ticket(3, 30, lane=Lane.INTERACTIVE))
    for _ in range(3):
        turn(loop)
    rows = [[(c.key, len(c.tokens)) for c in step] for step in engine.steps[1:]]
    assert rows == [[(3, 16)], [(3, 14)], [(1, 1), (2, 1), (3, 1)]]


def test_lines_are_left_out_a_few_times_in_a_row_at_most() -> None:
    """One prompt after another, and long ones: the lines get a step in ``HURRIED`` + 1."""
    engine = Arithmetic(Limits(slots=40, rows=60, prefill=16, prefill_shared=4))
    loop = Loop(engine)
    loop.submit(ticket(1, 4, limit=200))
    turn(loop)
    for key in range(10, 40):
        loop.submit(ticket(key, 100, lane=Lane.INTERACTIVE, limit=1))
    for _ in range(100):
        turn(loop)
    without = 0
    for step in engine.steps[1:]:
        without = 0 if any(c.key == 1 for c in step) else without + 1
        assert without <= HURRIED
    assert sum(any(c.key == 1 for c in step) for step in engine.steps[1:]) == 100 // (HURRIED + 1)


def test_a_step_of_lines_is_given_up_for_somebody_who_arrives() -> None:
    """What it had begun is computed again later, and nobody's answer is another one."""
    engine = Visited(LIMITS)
    loop = engine.loop = Loop(engine)
    lines = [ticket(key, 12, limit=6) for key in (1, 2)]
    person = ticket(3, 9, lane=Lane.INTERACTIVE, limit=4)
    for line in lines:
        loop.submit(line)
    engine.arrivals = [person]
    turn(loop)
    turn(loop)
    begun, next_step = engine.steps
    assert {c.key for c in begun} == {1, 2}
    assert [(c.key, len(c.tokens)) for c in next_step] == [(3, 9)]
    while loop.gauges().active:
        turn(loop)
    calm = Arithmetic(LIMITS)
    for asked in (*lines, person):
        alone = Loop(calm)
        again = ticket(asked.key, len(asked.prompt), limit=asked.limit)
        alone.submit(again)
        turn(alone)
        while alone.gauges().active:
            turn(alone)
        assert isinstance(asked.answer, Collected)
        assert isinstance(again.answer, Collected)
        assert asked.answer.tokens == again.answer.tokens


def test_no_two_steps_in_a_row_are_given_up() -> None:
    """However many arrive, every other step of lines is computed to its end."""
    engine = Visited(Limits(slots=1, rows=20, prefill=16, prefill_shared=4))
    loop = engine.loop = Loop(engine)
    loop.submit(ticket(1, 4, limit=30))
    for key in range(2, 8):
        # One at a time, each of them gone again before the next one comes.
        engine.arrivals = [ticket(key, 2, lane=Lane.INTERACTIVE, limit=1)]
        turn(loop)
        if engine.steps[-1][0].key != 1:
            continue
        turn(loop)
        turn(loop)
    fates = [step[0].key for step in engine.steps]
    assert fates.count(1) > 0
    line = [chunk for step in engine.steps for chunk in step if chunk.key == 1]
    starts = [chunk.start for chunk in line]
    assert all(starts.count(start) <= 2 for start in starts)
    assert max(starts) > 4


def test_a_step_with_somebody_interactive_is_not_given_up() -> None:
    """It is what the other one waits for."""
    engine = Visited(LIMITS)
    loop = engine.loop = Loop(engine)
    loop.submit(ticket(1, 12, lane=Lane.INTERACTIVE, limit=3))
    engine.arrivals = [ticket(2, 5, lane=Lane.INTERACTIVE, limit=3)]
    turn(loop)
    assert engine.interrupts == 0
    assert [c.key for c in engine.steps[0]] == [1]
    engine.arrivals = [ticket(3, 5, limit=3)]
    turn(loop)
    assert engine.interrupts == 0


def test_a_step_that_somebody_would_wait_for_does_not_begin() -> None:
    """Who arrives while it is planned is as good as who arrives while it runs."""
    engine = Arithmetic(LIMITS)
    loop = Loop(engine)
    loop.submit(ticket(1, 12))
    loop._collect()
    loop.submit(ticket(2, 5, lane=Lane.INTERACTIVE))
    loop.turn()
    assert engine.steps == []
    turn(loop)
    assert [(c.key, len(c.tokens)) for c in engine.steps[0]] == [(2, 5)]
