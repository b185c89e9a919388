"""Continuous batching: plan, step, observe, over any engine that one thread owns.

The loop keeps the sequences and their tokens; the engine keeps memory per sequence id and chooses
tokens; the answer behind each sequence decides when it is over. Other threads only ``submit``,
``cancel`` and ``close``: they ring a condition, and the engine's thread looks at the start of its
next step. Nothing polls.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import chain, islice
from typing import Generic, TypeVar

from tidemill.errors import EngineLost, TidemillError
from tidemill.scheduler.haste import Haste
from tidemill.scheduler.memory import Memory
from tidemill.scheduler.plan import StepPlan, plan
from tidemill.scheduler.sequence import Sequence, leave_the_line
from tidemill.scheduler.slots import PARKING_BYTES, Slots
from tidemill.scheduler.speculation import Speculation
from tidemill.scheduler.steps import (
    AnswerSink,
    Chunk,
    Engine,
    Errands,
    Fate,
    Gauges,
    NoErrands,
    Observation,
    Sampled,
    Ticket,
)
from tidemill.types import FinishReason, Lane

__all__ = [
    "AnswerSink",
    "Chunk",
    "Engine",
    "Errands",
    "Fate",
    "Gauges",
    "Loop",
    "NoErrands",
    "Observation",
    "Sampled",
    "Ticket",
]

C = TypeVar("C")

EPOCH = 2
"""Lines of an epoch, in slots. A line is overtaken by fewer lines of its lane than an epoch has,
and by those that ``memory.PATIENCE`` lets pass it."""
LOOK_AHEAD = 4
"""How many waiting sequences are looked at for those that may enter, in slots."""


class Loop(Generic[C]):
    """Runs an engine. ``run`` belongs to one thread; ``submit``, ``cancel``, ``wake`` and ``close``
    to any."""

    def __init__(
        self,
        engine: Engine[C],
        *,
        flush: Callable[[Gauges], None] = lambda gauges: None,
        errands: Errands | None = None,
        watch: Callable[[Seq[int]], None] = lambda keys: None,
        parking: int = PARKING_BYTES,
        speculation: Speculation[C] | None = None,
    ) -> None:
        """``watch`` is told whom a step computes before it begins, and that it is over by an empty
        sequence. ``parking``: bytes for the states of sequences that made way. Without
        ``speculation``, or where the engine's memory cannot be trimmed, nothing is drafted."""
        self._engine, self._flush, self._watch = engine, flush, watch
        self._errands = errands or NoErrands()
        self._slots = Slots(engine, parking=parking)
        self._memory = Memory(engine, self._slots)
        self._speculation = speculation if engine.reuses else None
        self._bell = threading.Condition()
        self._inbox: deque[Ticket[C]] = deque()
        self._cancels: set[int] = set()
        self._closing = False
        self._haste = Haste(engine.interrupt)
        # From here on: the engine thread's own.
        self._live: dict[int, Sequence[C]] = {}
        self._waiting: list[list[Sequence[C]]] = [[] for _ in engine.limits.classes]
        """By class, each in the order of their turns."""
        self._outside: list[Ticket[C]] = []
        """More than there are slots for; by lane, then arrival."""
        self._full: set[int] = set()
        """Classes whose memory ran out before the ids did: nobody enters until somebody leaves."""
        self._cramped = False
        """Memory had no room for drafts: there are none until somebody leaves."""
        self._order = 0
        self._arrived = Counter[Lane]()
        self._alone = False
        """The next step is that of the sequence that is computed alone."""
        self._generated = self._prefilled = self._reused = 0
        self._drafted = self._accepted = 0

    # --- any thread

    def submit(self, ticket: Ticket[C]) -> None:
        """Queue a completion; it starts when a step has room for it."""
        with self._bell:
            self._inbox.append(ticket)
            self._bell.notify()
            self._haste.arrived(ticket.lane)

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
            for sequence in [*self._live.values(), *chain(*self._waiting)]:
                self._drop(sequence)
                sequence.answer.fail(EngineLost("The engine was stopped."))
                sequence.answer.close()
            for ticket in self._outside:
                ticket.answer.fail(EngineLost("The engine was stopped."))
                ticket.answer.close()
            self._memory.close()
            self._flush(self.gauges())
            self._engine.close()

    def gauges(self) -> Gauges:
        """Load now."""
        slots = self._slots.stats
        return Gauges(
            active=slots["live"],
            waiting=slots["states"]["STAGED"] + len(self._outside),
            parked=slots["states"]["PARKED"] - self._memory.aside,
            held=self._memory.held,
            arena=self._slots.arena,
            tokens_generated=self._generated,
            tokens_prefilled=self._prefilled,
            tokens_reused=self._reused,
            tokens_drafted=self._drafted,
            tokens_accepted=self._accepted,
            parks=slots["parks"],
            resumes=slots["resumes"],
            requeues=slots["requeues"],
            refused=slots["refused"],
        )

    def turn(self) -> None:
        """One errand and one step, where there are any, and one flush."""
        if self._errands.pending():
            self._errands.run_one(self._errand_rows())
        if self._live or any(self._waiting):
            self._rehouse()
            entrants = self._entrants()
            candidates = [s.candidate() for s in (*self._live.values(), *entrants)]
            hurry = self._haste.hurry
            step = plan(candidates, self._engine.limits, alone=self._alone, hurry=hurry)
            self._alone = not step.alone
            self._haste.planned(step)
            self._watch([*(rows.key for rows in step.rows), *step.displace])
            chunks = self._prepare(step, entrants)
            for ids in self._engine.limits.ids:
                if some := [chunk for chunk in chunks if chunk.seq in ids]:
                    if not self._haste.begin({self._live[chunk.key].lane for chunk in some}):
                        self._watch(())
                        break
                    self._watch([chunk.key for chunk in some])
                    some, seen = self._compute(some, ids, alone=step.alone)
                    self._haste.end(seen)
                    self._watch(())
                    self._observe(some, seen, ids)
        self._flush(self.gauges())

    def _compute(
        self, chunks: list[Chunk[C]], ids: range, *, alone: bool
    ) -> tuple[list[Chunk[C]], Observation]:
        """The step of one class, with drafts where they pay."""
        if self._speculation is None or self._cramped or alone:
            return chunks, self._engine.step(chunks)
        limits = self._engine.limits
        chunks = self._speculation.begin(
            chunks,
            self._live,
            rows=limits.rows - limits.slots + len(ids),
            context=limits.classes[limits.ids.index(ids)].context,
        )
        seen = self._engine.step(chunks)
        if seen.fate == "done":
            self._speculation.end(chunks, seen.sampled)
        return chunks, seen

    def _errand_rows(self) -> int:
        """An errand lengthens the step as prompts do, and has their budget."""
        limits = self._engine.limits
        sequences = (*self._live.values(), *(waiting[0] for waiting in self._waiting if waiting))
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
                or any(self._waiting)
                or self._errands.pending()
            ):
                self._bell.wait()
            self._haste.looked()
            self._outside += self._inbox
            self._inbox.clear()
            cancels, self._cancels = self._cancels, set()
        self._take_in()
        if cancels and not self._closing:
            self._cancel(cancels)
        return not self._closing

    def _take_in(self) -> None:
        """Give a slot to everybody who arrived, as far as there are any."""
        self._outside.sort(key=lambda ticket: ticket.lane)
        limits = self._engine.limits
        taken = 0
        for ticket in self._outside:
            slot = self._slots.reserve(ticket.lane)
            if slot is None:
                break
            taken += 1
            self._order += 1
            epoch = self._arrived[ticket.lane] // (EPOCH * limits.slots)
            self._arrived[ticket.lane] += 1
            sequence = Sequence(ticket, self._order, epoch, slot=slot, limits=limits)
            insort(self._waiting[sequence.klass], sequence)
        del self._outside[:taken]

    def _cancel(self, keys: set[int]) -> None:
        for ticket in [t for t in self._outside if t.key in keys]:
            self._outside.remove(ticket)
            ticket.answer.close()
        for key in keys & self._live.keys():
            self._retire(self._live[key])
        for sequence in [s for s in chain(*self._waiting) if s.key in keys]:
            self._retire(sequence)

    def _rehouse(self) -> None:
        """Whoever has no room for its next token any more waits for an id of a longer class; the
        plan that follows may give it one at once."""
        limits = self._engine.limits
        for sequence in list(self._live.values()):
            assert sequence.seq is not None
            if limits.class_for(len(sequence.tokens)) > limits.class_of(sequence.seq):
                sequence.outgrown = True
                self._watch([sequence.key])
                self._displace(sequence)
                self._watch(())

    def _entrants(self) -> list[Sequence[C]]:
        limits = self._engine.limits
        used = {sequence.seq for sequence in self._live.values()}
        free = [sum(seq not in used for seq in ids) for ids in limits.ids]
        entrants = []
        for klass, waiting in enumerate(self._waiting):
            if klass in self._full and free[klass] < limits.classes[klass].slots:
                continue
            some = islice(waiting, LOOK_AHEAD * limits.classes[klass].slots)
            entrants += self._memory.entrants(some, sum(free[klass:]))
        return entrants

    def _prepare(self, step: StepPlan, entrants: list[Sequence[C]]) -> list[Chunk[C]]:
        for key in step.displace:
            self._displace(self._live[key])
        entering = {sequence.key: sequence for sequence in entrants}
        for admission in step.admit:
            self._enter(entering[admission.key], admission.seq)
        for move in step.move:
            self._memory.move(self._live[move.key], move.seq)
        chunks = []
        for rows in step.rows:
            sequence = self._live[rows.key]
            assert sequence.seq is not None
            # What it began with may have shortened what is left of it.
            count = min(rows.count, sequence.candidate().left)
            chunks.append(sequence.chunk(sequence.seq, count))
        return sorted(chunks, key=lambda chunk: chunk.seq)

    def _enter(self, sequence: Sequence[C], seq: int) -> None:
        leave_the_line(self._waiting[sequence.klass], sequence)
        sequence.outgrown = False
        fresh = sequence.done == 0
        self._memory.enter(sequence, seq)
        self._live[sequence.key] = sequence
        reused = min(sequence.done, sequence.prompt_len) if fresh else 0
        self._reused += reused
        if reused and not sequence.started:
            sequence.answer.reused(reused)
        sequence.started = True

    def _observe(self, chunks: list[Chunk[C]], seen: Observation, ids: range) -> None:
        if seen.fate == "interrupted":
            return
        if seen.fate == "no_room":
            if any(chunk.drafts for chunk in chunks):
                self._cramped = True
            else:
                self._make_room(ids)
            return
        if seen.fate == "lost":
            self._memory.lost(ids)
            for sequence in self._on(ids):
                sequence.done = 0
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
                self._take(sequence, chunk, seen.sampled[chunk.key])

    def _take(self, sequence: Sequence[C], chunk: Chunk[C], sampled: list[Sampled]) -> None:
        reason = None
        for one in sampled:
            reason = self._take_one(sequence, one)
            if reason is not None:  # what was chosen after it is no part of the answer
                break
        if chunk.drafts:
            accepted = len(sampled) - 1
            self._drafted += len(chunk.drafts)
            self._accepted += accepted
            # The memory holds all drafts: those that were not taken go.
            sequence.done = min(sequence.done + accepted, len(sequence.tokens))
            if sequence.done < chunk.start + len(chunk.tokens) + len(chunk.drafts):
                self._engine.trim(chunk.seq, sequence.done)
        if reason is not None:
            self._retire(sequence, reason=reason)

    def _take_one(self, sequence: Sequence[C], sampled: Sampled) -> FinishReason | None:
        if sampled.end:
            return "stop"
        self._generated += 1
        self._slots.activate(sequence.slot)
        sequence.tokens.append(sampled.token)
        reason = sequence.answer.take(sampled)
        return "length" if reason is None and sequence.answered >= sequence.limit else reason

    def _on(self, ids: range) -> list[Sequence[C]]:
        return [sequence for sequence in self._live.values() if sequence.seq in ids]

    def _make_room(self, ids: range) -> None:
        """The memory of a class is full: what free ids remember goes first, then the youngest of
        the lowest lane gives way. One that is the last and still does not fit has used up its
        context."""
        if self._memory.make_room(ids):
            return
        here = self._on(ids)
        victim = max(here)
        if len(here) > 1:
            self._full.add(self._engine.limits.ids.index(ids))
            self._displace(victim)
        else:
            self._retire(victim, reason="length")

    def _displace(self, sequence: Sequence[C]) -> None:
        if sequence.done and self._memory.park(sequence):
            self._back(sequence)
        else:
            self._requeue(sequence)

    def _requeue(self, sequence: Sequence[C]) -> None:
        """Back to the queue with its tokens, to be computed again."""
        assert sequence.seq is not None
        self._memory.clear(sequence.seq)
        self._slots.requeue(sequence.slot)
        sequence.done = 0
        self._back(sequence)

    def _back(self, sequence: Sequence[C]) -> None:
        del self._live[sequence.key]
        sequence.seq = None
        # It may have had an id of a longer class than it asked for, and grown there.
        sequence.klass = max(sequence.klass, self._engine.limits.class_for(len(sequence.tokens)))
        insort(self._waiting[sequence.klass], sequence)

    def _retire(
        self,
        sequence: Sequence[C],
        *,
        reason: FinishReason | None = None,
        error: TidemillError | None = None,
    ) -> None:
        """Over: finished, failed, or (with neither) cancelled."""
        self._full.clear()
        self._cramped = False
        self._drop(sequence)
        if error is not None:
            sequence.answer.fail(error)
        elif reason is not None:
            sequence.answer.finish(reason)
        sequence.answer.close()

    def _drop(self, sequence: Sequence[C]) -> None:
        if sequence.seq is not None:
            self._memory.leave(sequence)
            del self._live[sequence.key]
        else:
            self._waiting[sequence.klass].remove(sequence)
        self._slots.release(sequence.slot)
