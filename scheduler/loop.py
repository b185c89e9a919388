"""Continuous batching: plan, step, observe, over any engine that one thread owns.

The loop keeps the sequences and their tokens; the engine keeps memory per sequence id and chooses
tokens; the answer behind each sequence decides when it is over. Other threads only ``submit``,
``cancel`` and ``close``: they ring a condition, and the engine's thread looks at the start of its
next step. Nothing polls.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Generic, Literal, Protocol, TypeVar

import msgspec

from tidemill.errors import EngineLost, TidemillError
from tidemill.scheduler.plan import Candidate, Limits, StepPlan, plan
from tidemill.types import FinishReason, Lane, TokenLogprob

C = TypeVar("C")
"""What the engine chooses the next token with; opaque to the loop."""


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """The token that was chosen for a sequence."""

    token: int
    piece: bytes = b""
    """Its text; may end within a character."""
    end: bool = False
    """True for an end-of-generation token, which is no part of the answer."""
    logprob: TokenLogprob | None = None


class Chunk(msgspec.Struct, Generic[C], frozen=True, kw_only=True):
    """Rows of one sequence in one step: ``tokens`` at positions ``start ..``."""

    key: int
    seq: int
    start: int
    tokens: list[int]
    chooser: C | None
    """None: more prompt follows, no token is chosen after this chunk."""


Fate = Literal["done", "no_room", "aborted", "lost"]


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What a step did.

    ``no_room``: nothing was computed, memory is as before. ``aborted``: the memory of the step's
    sequences is undefined. ``lost``: the engine threw all its memory away and is usable again.
    """

    fate: Fate = "done"
    sampled: dict[int, Sampled] = {}
    """By key, one for each chunk with a chooser."""
    reason: str = ""


class Engine(Protocol[C]):
    """Something that computes steps. All methods are called by one thread."""

    @property
    def limits(self) -> Limits: ...

    def step(self, chunks: list[Chunk[C]]) -> Observation:
        """Compute chunks that are sorted by sequence id."""

    def forget(self, seq: int) -> None:
        """Drop the memory of a sequence id."""

    def park(self, key: int, seq: int) -> bool:
        """Move a sequence's memory to the side; False: it could not, compute it again."""

    def resume(self, key: int, seq: int) -> bool:
        """Put parked memory onto a sequence id; False: it could not, compute it again."""

    def discard(self, key: int) -> None:
        """Drop parked memory."""

    def close(self) -> None: ...


class AnswerSink(Protocol):
    """Receives one answer. Called by the engine's thread; must not block for long."""

    def take(self, sampled: Sampled) -> FinishReason | None:
        """One more token; a reason when the answer is complete (a stop string matched)."""

    def finish(self, reason: FinishReason) -> None: ...

    def fail(self, error: TidemillError) -> None: ...

    def close(self) -> None:
        """Nothing more will come: after ``finish``, ``fail`` or a cancel."""


class Ticket(msgspec.Struct, Generic[C], kw_only=True, eq=False):
    """One completion to compute."""

    key: int
    lane: Lane
    prompt: list[int]
    """At least one token."""
    limit: int
    """Most tokens of the answer, at least one; prompt and answer fit the engine's context."""
    chooser: C
    answer: AnswerSink


class Errands(Protocol):
    """Other work for the engine's thread, done one piece at a time between steps."""

    def pending(self) -> bool: ...

    def run_one(self, rows: int) -> None:
        """Do one piece of about as much work as ``rows`` rows of a step."""


class NoErrands:
    """An engine that only generates."""

    def pending(self) -> bool:
        return False

    def run_one(self, rows: int) -> None:
        """Nothing to do."""


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """Load and totals since the start."""

    active: int = 0
    waiting: int = 0
    parked: int = 0
    tokens_generated: int = 0
    tokens_prefilled: int = 0


class _Sequence(Generic[C]):
    """A ticket on its way. ``tokens`` is prompt and answer; the first ``done`` are computed."""

    __slots__ = (
        "answer",
        "chooser",
        "done",
        "key",
        "lane",
        "limit",
        "order",
        "parked",
        "prompt_len",
        "seq",
        "tokens",
    )

    def __init__(self, ticket: Ticket[C], order: int) -> None:
        self.key, self.lane, self.order = ticket.key, ticket.lane, order
        self.tokens, self.prompt_len = list(ticket.prompt), len(ticket.prompt)
        self.limit, self.chooser, self.answer = ticket.limit, ticket.chooser, ticket.answer
        self.done = 0
        self.seq: int | None = None
        self.parked = False

    def candidate(self) -> Candidate:
        left = len(self.tokens) - self.done
        decoding = left == 1 and len(self.tokens) > self.prompt_len
        return Candidate(
            key=self.key,
            lane=self.lane,
            order=self.order,
            left=left,
            decoding=decoding,
            seq=self.seq,
        )

    def chunk(self, seq: int, count: int) -> Chunk[C]:
        upto = self.done + count
        return Chunk(
            key=self.key,
            seq=seq,
            start=self.done,
            tokens=self.tokens[self.done : upto],
            chooser=self.chooser if upto == len(self.tokens) else None,
        )

    def __lt__(self, other: _Sequence[C]) -> bool:
        return (self.lane, self.order) < (other.lane, other.order)


class Loop(Generic[C]):
    """Runs an engine. ``run`` belongs to one thread; ``submit``, ``cancel``, ``wake`` and ``close``
    to any."""

    def __init__(
        self,
        engine: Engine[C],
        *,
        flush: Callable[[Gauges], None] = lambda gauges: None,
        errands: Errands | None = None,
    ) -> None:
        self._engine, self._flush = engine, flush
        self._errands = errands or NoErrands()
        self._bell = threading.Condition()
        self._inbox: deque[Ticket[C]] = deque()
        self._cancels: set[int] = set()
        self._closing = False
        # From here on: the engine thread's own.
        self._live: dict[int, _Sequence[C]] = {}
        self._waiting: list[_Sequence[C]] = []
        self._full = False
        """Memory ran out before the ids did: nobody enters until somebody leaves."""
        self._order = 0
        self._generated = self._prefilled = 0

    # --- any thread

    def submit(self, ticket: Ticket[C]) -> None:
        """Queue a completion; it starts when a step has room for it."""
        with self._bell:
            self._inbox.append(ticket)
            self._bell.notify()

    def cancel(self, key: int) -> None:
        """Stop a completion at the next step; unknown and finished keys are ignored."""
        with self._bell:
            self._cancels.add(key)
            self._bell.notify()

    def wake(self) -> None:
        """There is an errand."""
        with self._bell:
            self._bell.notify()

    def close(self) -> None:
        """Let ``run`` return after its current step."""
        with self._bell:
            self._closing = True
            self._bell.notify()

    # --- the engine's thread

    def run(self) -> None:
        """Work until ``close``; then fail what is left and close the engine."""
        try:
            while self._collect():
                self.turn()
        finally:
            for sequence in [*self._live.values(), *self._waiting]:
                self._drop(sequence)
                sequence.answer.fail(EngineLost("The engine was stopped."))
                sequence.answer.close()
            self._flush(self.gauges())
            self._engine.close()

    def gauges(self) -> Gauges:
        """Load now."""
        parked = sum(s.parked for s in self._waiting)
        return Gauges(
            active=len(self._live),
            waiting=len(self._waiting) - parked,
            parked=parked,
            tokens_generated=self._generated,
            tokens_prefilled=self._prefilled,
        )

    def turn(self) -> None:
        """One errand and one step, where there are any, and one flush."""
        if self._errands.pending():
            self._errands.run_one(self._errand_rows())
        if self._live or self._waiting:
            step = plan(self._candidates(), self._engine.limits)
            chunks = self._prepare(step)
            self._observe(chunks, self._engine.step(chunks))
        self._flush(self.gauges())

    def _errand_rows(self) -> int:
        """An errand lengthens the step as prompts do, and has their budget."""
        limits = self._engine.limits
        sequences = (*self._live.values(), *self._waiting[:1])
        felt = any(s.lane is Lane.INTERACTIVE for s in sequences)
        return limits.prefill_shared if felt else limits.prefill

    def _collect(self) -> bool:
        """Take in what other threads left; sleeps while there is nothing to do. False: close."""
        with self._bell:
            while not (
                self._closing
                or self._inbox
                or self._cancels
                or self._live
                or self._waiting
                or self._errands.pending()
            ):
                self._bell.wait()
            if self._closing:
                arrived, cancels = list(self._inbox), set[int]()
                self._inbox.clear()
            else:
                arrived, cancels = list(self._inbox), self._cancels
                self._inbox.clear()
                self._cancels = set()
        for ticket in arrived:
            self._order += 1
            insort(self._waiting, _Sequence(ticket, self._order))
        if cancels:
            self._cancel(cancels)
        return not self._closing

    def _cancel(self, keys: set[int]) -> None:
        for key in keys & self._live.keys():
            self._retire(self._live[key])
        for sequence in [s for s in self._waiting if s.key in keys]:
            self._retire(sequence)

    def _candidates(self) -> list[Candidate]:
        # The list is sorted, so that no more than this many of it can enter in one step.
        full = self._full and bool(self._live)
        waiting = [] if full else self._waiting[: self._engine.limits.slots]
        return [s.candidate() for s in (*self._live.values(), *waiting)]

    def _prepare(self, step: StepPlan) -> list[Chunk[C]]:
        for key in step.displace:
            self._displace(self._live[key])
        entering = {
            s.key: s for s in self._waiting[: self._engine.limits.slots + len(step.displace)]
        }
        for admission in step.admit:
            sequence = entering[admission.key]
            self._waiting.remove(sequence)
            if sequence.parked:
                sequence.parked = False
                if not self._engine.resume(sequence.key, admission.seq):
                    sequence.done = 0
            sequence.seq = admission.seq
            self._live[sequence.key] = sequence
        return [self._live[rows.key].chunk(rows.seq, rows.count) for rows in step.rows]

    def _observe(self, chunks: list[Chunk[C]], seen: Observation) -> None:
        if seen.fate == "no_room":
            self._make_room()
            return
        if seen.fate == "lost":
            for sequence in list(self._live.values()):
                self._retire(sequence, error=EngineLost(f"The engine failed: {seen.reason}."))
            return
        for chunk in chunks:
            sequence = self._live[chunk.key]
            if seen.fate == "aborted":
                self._requeue(sequence)
                continue
            sequence.done += len(chunk.tokens)
            self._prefilled += max(0, min(sequence.done, sequence.prompt_len) - chunk.start)
            if chunk.key in seen.sampled:
                self._take(sequence, seen.sampled[chunk.key])

    def _take(self, sequence: _Sequence[C], sampled: Sampled) -> None:
        if sampled.end:
            self._retire(sequence, reason="stop")
            return
        self._generated += 1
        sequence.tokens.append(sampled.token)
        reason = sequence.answer.take(sampled)
        if reason is None and len(sequence.tokens) - sequence.prompt_len >= sequence.limit:
            reason = "length"
        if reason is not None:
            self._retire(sequence, reason=reason)

    def _make_room(self) -> None:
        """The engine's memory is full: the youngest of the lowest lane gives way. One that is alone
        and still does not fit has used up its context."""
        victim = max(self._live.values())
        if len(self._live) > 1:
            self._full = True
            self._displace(victim)
        else:
            self._retire(victim, reason="length")

    def _displace(self, sequence: _Sequence[C]) -> None:
        assert sequence.seq is not None
        if sequence.done and self._engine.park(sequence.key, sequence.seq):
            sequence.parked = True
            self._engine.forget(sequence.seq)
            self._back(sequence)
        else:
            self._requeue(sequence)

    def _requeue(self, sequence: _Sequence[C]) -> None:
        """Back to the queue with its tokens, to be computed again."""
        assert sequence.seq is not None
        self._engine.forget(sequence.seq)
        sequence.done = 0
        self._back(sequence)

    def _back(self, sequence: _Sequence[C]) -> None:
        del self._live[sequence.key]
        sequence.seq = None
        insort(self._waiting, sequence)

    def _retire(
        self,
        sequence: _Sequence[C],
        *,
        reason: FinishReason | None = None,
        error: TidemillError | None = None,
    ) -> None:
        """Over: finished, failed, or (with neither) cancelled."""
        self._full = False
        self._drop(sequence)
        if error is not None:
            sequence.answer.fail(error)
        elif reason is not None:
            sequence.answer.finish(reason)
        sequence.answer.close()

    def _drop(self, sequence: _Sequence[C]) -> None:
        if sequence.seq is not None:
            self._engine.forget(sequence.seq)
            del self._live[sequence.key]
        else:
            self._waiting.remove(sequence)
            if sequence.parked:
                self._engine.discard(sequence.key)
