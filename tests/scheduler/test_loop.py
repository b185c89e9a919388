"""The loop over a small deterministic engine that checks every promise the loop makes to it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.errors import EngineLost, TidemillError
from tidemill.scheduler.loop import Chunk, Fate, Gauges, Loop, Observation, Sampled, Ticket
from tidemill.scheduler.plan import Limits
from tidemill.types import FinishReason, Lane

END = 0


def successor(tokens: list[int]) -> int:
    """The model of these tests: the next token depends on all that came before."""
    return 1 + (sum((i + 1) * t for i, t in enumerate(tokens)) % 97)


class Arithmetic:
    """An engine that remembers tokens per sequence id, and refuses what llama.cpp would abort on.

    ``fates`` are what the next steps do instead of computing; ``room`` is how many tokens it can
    remember over all ids.
    """

    def __init__(self, limits: Limits, *, room: int = 10**9, parks: bool = True) -> None:
        self.limits, self.room, self.parks = limits, room, parks
        self.fates: list[Fate] = []
        self.memory: dict[int, list[int]] = {}
        self.parked: dict[int, list[int]] = {}
        self.steps: list[list[Chunk[str]]] = []
        self.closed = False

    def step(self, chunks: list[Chunk[str]]) -> Observation:
        assert chunks
        assert sum(len(c.tokens) for c in chunks) <= self.limits.rows
        seqs = [c.seq for c in chunks]
        assert seqs == sorted(set(seqs))
        self.steps.append(chunks)
        fate: Fate = self.fates.pop(0) if self.fates else "done"
        needed = sum(len(m) for m in self.memory.values()) + sum(len(c.tokens) for c in chunks)
        if fate == "no_room" or needed > self.room:
            return Observation(fate="no_room")
        if fate == "lost":
            self.memory.clear()
            return Observation(fate="lost", reason="as told")
        sampled = {}
        for chunk in chunks:
            known = self.memory.setdefault(chunk.seq, [])
            assert len(known) == chunk.start, "positions must follow on"
            known.extend(chunk.tokens)
            if chunk.chooser is not None:
                token = successor(known)
                sampled[chunk.key] = Sampled(token=token, piece=bytes([token]), end=token % 13 == 0)
        return Observation(fate=fate, sampled=sampled if fate == "done" else {})

    def forget(self, seq: int) -> None:
        self.memory.pop(seq, None)

    def park(self, key: int, seq: int) -> bool:
        if self.parks:
            self.parked[key] = list(self.memory[seq])
        return self.parks

    def resume(self, key: int, seq: int) -> bool:
        assert seq not in self.memory
        self.memory[seq] = self.parked.pop(key)
        return True

    def discard(self, key: int) -> None:
        del self.parked[key]

    def close(self) -> None:
        self.closed = True


class Collected:
    """An answer that keeps what it gets, and checks the order of the calls."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.tokens: list[int] = []
        self.reason: FinishReason | None = None
        self.error: TidemillError | None = None
        self.closed = False
        self.ended = threading.Event()
        self._stop_after = stop_after

    def take(self, sampled: Sampled) -> FinishReason | None:
        assert not self.closed
        self.tokens.append(sampled.token)
        return "stop" if len(self.tokens) == self._stop_after else None

    def finish(self, reason: FinishReason) -> None:
        assert self.reason is None
        self.reason = reason

    def fail(self, error: TidemillError) -> None:
        self.error = error

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        self.ended.set()


def ticket(
    key: int,
    prompt: list[int],
    *,
    lane: Lane = Lane.BATCH,
    limit: int = 5,
    stop_after: int | None = None,
) -> Ticket[str]:
    """A completion whose answer is ``Collected``."""
    return Ticket(
        key=key, lane=lane, prompt=prompt, limit=limit, chooser="next",
        answer=Collected(stop_after),
    )  # fmt: skip


def got(t: Ticket[str]) -> Collected:
    """The answer of a ticket."""
    assert isinstance(t.answer, Collected)
    return t.answer


def alone(t: Ticket[str]) -> tuple[list[int], FinishReason]:
    """What the model says to a prompt when nobody else is there."""
    tokens, out = list(t.prompt), list[int]()
    while True:
        token = successor(tokens)
        if token % 13 == 0:
            return out, "stop"
        out.append(token)
        tokens.append(token)
        if len(out) == t.limit:
            return out, "length"


def drive(loop: Loop[str], tickets: list[Ticket[str]], turns: int = 10_000) -> None:
    """Turn the loop on this thread until every ticket has ended."""
    for t in tickets:
        loop.submit(t)
    for _ in range(turns):
        loop._collect()
        loop.turn()
        if all(got(t).closed for t in tickets):
            return
    raise AssertionError(f"not done after {turns} turns")


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
        thread.join(timeout=10)
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
    slots: int,
    prefill: int,
    headroom: int,
    parks: bool,
    fates: list[Fate],
) -> None:
    """Chunking, parking, recomputing, full memory and aborted steps never change what the model
    says, and at the end nothing is left in the engine."""
    engine = Arithmetic(
        Limits(slots=slots, rows=slots + prefill, prefill=prefill, prefill_shared=2,
               headroom=headroom),
        parks=parks,
    )  # fmt: skip
    engine.fates = list(fates)
    asked_for = [
        ticket(i, prompt, lane=lane, limit=limit) for i, (prompt, lane, limit) in enumerate(asked)
    ]
    drive(Loop(engine), asked_for)
    for t in asked_for:
        tokens, reason = alone(t)
        answer = got(t)
        if answer.reason == "length" and len(answer.tokens) < t.limit:
            # The memory was full and it was alone: it ends with what it has.
            assert "no_room" in fates
            assert answer.tokens == tokens[: len(answer.tokens)]
        else:
            assert (answer.tokens, answer.reason) == (tokens, reason)
    assert engine.memory == {}
    assert engine.parked == {}


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
    assert (got(line).tokens, got(line).reason) == alone(line)
    computed = [t for step in engine.steps for c in step if c.key == 1 for t in c.tokens]
    assert computed == [*line.prompt, *got(line).tokens][: len(computed)]


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
    assert (got(line).tokens, got(line).reason) == alone(line)


def test_a_full_memory_parks_the_youngest_line_and_fails_nobody() -> None:
    """With memory for two and a half sequences, four of them still finish with their own words."""
    engine = Arithmetic(Limits(slots=4, rows=516), room=50)
    many = [ticket(i, [i + 1] * 15, limit=5) for i in range(4)]
    drive(Loop(engine), many)
    for t in many:
        assert (got(t).tokens, got(t).reason) == alone(t)


def test_a_sequence_that_fills_the_memory_alone_ends_by_length() -> None:
    """Nobody can make room for it: it ends with what it has."""
    engine = Arithmetic(Limits(slots=2, rows=514), room=6)
    t = ticket(1, [3, 3, 3], limit=50)
    drive(Loop(engine), [t])
    assert got(t).reason in ("length", "stop")
    assert got(t).tokens == alone(t)[0][: len(got(t).tokens)]
    assert len(got(t).tokens) <= 4


def test_a_lost_step_fails_those_in_it_and_spares_those_who_wait() -> None:
    """A fatal engine error costs the live sequences; whoever waited is computed afterwards."""
    engine = Arithmetic(Limits(slots=1, rows=513))
    engine.fates = ["lost"]
    first, second = ticket(1, [1, 2]), ticket(2, [3, 4])
    drive(Loop(engine), [first, second])
    assert isinstance(got(first).error, EngineLost)
    assert (got(second).tokens, got(second).reason) == alone(second)


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
    assert list(engine.parked) == [1]
    loop.cancel(1)
    loop._collect()
    assert engine.parked == {}
    assert got(line).closed


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
        assert got(quick).ended.wait(10)
        again = ticket(2, [1, 1], limit=1)
        loop.submit(again)
        assert got(again).ended.wait(10)
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
    assert (last.active, last.waiting, last.parked) == (0, 0, 0)
    assert flushed[-1] == last
