"""What an engine's sequence ids remember, and who may begin with it.

live id    a sequence computes on it; others copy what it has so far
free id    keeps what was computed last, until somebody else needs the id
the side   conversations that were overwritten on their id, oldest given up first
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Generic, TypeVar

from tidemill.scheduler.prefixes import Prefixes
from tidemill.scheduler.sequence import Sequence
from tidemill.scheduler.slots import Slots
from tidemill.scheduler.steps import Engine
from tidemill.types import Lane

C = TypeVar("C")

LEAST = 16
"""Fewer shared tokens are computed again. A copy of these costs a thousandth of computing them; but
a sequence that waits for another one to compute them should win a step by it."""
PATIENCE = 2
"""In slots: a sequence that so many have passed waits no longer for what another one computes."""
MOST_ASIDE = 64


class Kept:
    """What a free id, or the side, remembers."""

    __slots__ = ("done", "lane", "scope", "tokens")

    def __init__(self, tokens: list[int], lane: Lane, scope: str) -> None:
        self.tokens, self.done, self.lane, self.scope = tokens, len(tokens), lane, scope


class Memory(Generic[C]):
    """Keeps the books over an engine's memory. Used by the engine's thread.

    Holders are sequence ids from 0 up, and what is parked aside below 0.
    """

    def __init__(self, engine: Engine[C], slots: Slots[C]) -> None:
        self._engine, self._slots = engine, slots
        self._tree = Prefixes()
        self._holders: dict[int, Sequence[C] | Kept] = {}
        self._aside: dict[int, int] = {}
        """Holders on the side and their slots, oldest first."""
        self._numbers = itertools.count(1)

    @property
    def aside(self) -> int:
        """Conversations on the side."""
        return len(self._aside)

    @property
    def held(self) -> int:
        """What is remembered by free ids and on the side."""
        return sum(isinstance(there, Kept) for there in self._holders.values())

    def entrants(self, waiting: Iterable[Sequence[C]], free: int) -> list[Sequence[C]]:
        """Those that could enter now, of ``waiting`` in order: everybody INTERACTIVE, and as many
        others as ids are free. Left out are those that had better wait, since somebody who is
        live or ahead of them computes what they begin with; but nobody for ever: not those that
        ``PATIENCE`` others have passed."""
        ahead, entrants, room = Prefixes(), list[Sequence[C]](), free
        patience = PATIENCE * self._engine.limits.slots
        alone = False
        for number, sequence in enumerate(waiting):
            if sequence.lane is not Lane.INTERACTIVE and room <= 0:
                break
            if sequence.alone:
                if alone:
                    continue
                alone = True
            elif self._may_share(sequence) and not sequence.parked:
                if sequence.passed < patience and self._had_better_wait(sequence, ahead):
                    continue
                ahead.put(number, sequence.tokens, sequence.scope)
            entrants.append(sequence)
            room -= 1
        return entrants

    def _had_better_wait(self, sequence: Sequence[C], ahead: Prefixes) -> bool:
        limit = len(sequence.tokens) - 1
        # INTERACTIVE does not wait for a line, whose prompt is computed in small pieces.
        coming = max(
            (depth for depth, _ in ahead.matches(sequence.tokens, sequence.scope)), default=0
        )
        have = 0
        for depth, holders in self._tree.matches(sequence.tokens, sequence.scope):
            for holder in holders:
                there = self._holders[holder]
                have = max(have, min(depth, there.done))
                if there.lane <= sequence.lane:
                    coming = max(coming, depth)
        return min(coming, limit) - min(have, limit) >= LEAST

    def enter(self, sequence: Sequence[C], seq: int) -> None:
        """Give a sequence an id, with as much of its tokens as can be had from elsewhere."""
        if sequence.parked:
            self._vacate(seq)
            sequence.parked = False
            if not self._slots.resume(sequence.slot, seq):
                sequence.done = 0
        else:
            sequence.done = self._bring(sequence, seq) if self._may_share(sequence) else 0
            if not sequence.done:
                self._vacate(seq)
            self._slots.start(sequence.slot, seq)
        sequence.seq = seq
        if self._may_share(sequence):
            self._hold(seq, sequence)

    def leave(self, sequence: Sequence[C]) -> None:
        """It is over: its id is free, and remembers."""
        assert sequence.seq is not None
        seq, sequence.seq = sequence.seq, None
        if self._may_share(sequence) and sequence.done >= LEAST:
            kept = Kept(sequence.tokens[: sequence.done], sequence.lane, sequence.scope)
            self._hold(seq, kept)
        else:
            self.clear(seq)

    def clear(self, seq: int) -> None:
        """The id remembers nothing any more."""
        self._drop(seq)
        self._engine.forget(seq)

    def move(self, sequence: Sequence[C], seq: int) -> bool:
        """Give a live sequence another, free id; False: it stays where it is."""
        assert sequence.seq is not None
        self._vacate(seq)
        if sequence.done and not self._engine.copy(sequence.seq, seq):
            self._engine.forget(seq)
            return False
        self.clear(sequence.seq)
        self._slots.move(sequence.slot, seq)
        sequence.seq = seq
        if self._may_share(sequence):
            self._hold(seq, sequence)
        return True

    def park(self, sequence: Sequence[C]) -> bool:
        """Put a live sequence aside and free its id; False: there is no room, it is as before."""
        assert sequence.seq is not None
        while not self._slots.park(sequence.slot, sequence.seq):
            if not self._aside:
                return False
            self._give_up_oldest()
        self.clear(sequence.seq)
        sequence.seq, sequence.parked = None, True
        return True

    def make_room(self, ids: range) -> bool:
        """Forget what free ones of these ids remember; False when there was nothing."""
        free = [h for h, there in self._holders.items() if h in ids and isinstance(there, Kept)]
        for seq in free:
            self.clear(seq)
        return bool(free)

    def lost(self, ids: range) -> None:
        """The engine threw the memory of these ids away; what is on the side is still there."""
        for seq in ids:
            self._drop(seq)

    def close(self) -> None:
        """Forget everything."""
        self.make_room(range(self._engine.limits.slots))
        while self._aside:
            self._give_up_oldest()

    def _may_share(self, sequence: Sequence[C]) -> bool:
        return self._engine.reuses and not sequence.alone

    def _bring(self, sequence: Sequence[C], seq: int) -> int:
        """Make the id remember the longest beginning of the tokens that can be had; its length."""
        source, length = self._best(sequence, seq)
        if length < LEAST:
            return 0
        if source == seq:
            self._save(seq, beyond=length)
        else:
            if source < 0:  # used last, and so the last to be given up
                self._aside[source] = self._aside.pop(source)
            self._vacate(seq)
            if source not in self._holders:
                return 0
            came = (
                self._fetch(source, seq, length) if source < 0 else self._engine.copy(source, seq)
            )
            if not came:
                self._engine.forget(seq)
                return 0
        self._engine.trim(seq, length)
        return length

    def _fetch(self, source: int, seq: int, length: int) -> bool:
        """From the side onto an id: a conversation that goes on comes back; of one that only begins
        alike a copy does."""
        goes_on = length == self._holders[source].done
        came = self._slots.fetch(self._aside[source], seq, keep=not goes_on)
        if goes_on or not came:
            self._drop(source)
            del self._aside[source]
        return came

    def _best(self, sequence: Sequence[C], seq: int) -> tuple[int, int]:
        """Holder and length of the longest beginning that is computed; the id itself if it has as
        much, else a live or free id, else the side. At least one token is left to compute. A memory
        is copied as a whole and then cut, so that one for which the id has no room is no use."""
        limit = len(sequence.tokens) - 1
        limits = self._engine.limits
        context = limits.classes[limits.class_of(seq)].context
        best = (0, 0, 0)
        for depth, holders in self._tree.matches(sequence.tokens, sequence.scope):
            if depth < best[0]:
                break
            for holder in holders:
                there = self._holders[holder]
                if there.done > context:
                    continue
                length = min(depth, there.done, limit)
                rank = 2 if holder == seq else int(holder >= 0)
                best = max(best, (length, rank, holder))
        return best[2], best[0]

    def _vacate(self, seq: int) -> None:
        """Empty a free id for somebody else."""
        if seq in self._holders:
            self._save(seq, beyond=0)
            self.clear(seq)

    def _save(self, seq: int, *, beyond: int) -> None:
        """Before a conversation is overwritten from token ``beyond`` on, put it aside: its next
        turn begins with it."""
        kept = self._holders[seq]
        if kept.lane is not Lane.INTERACTIVE or kept.done - beyond < LEAST:
            return
        if len(self._aside) >= MOST_ASIDE:
            self._give_up_oldest()
        while (slot := self._slots.put_aside(seq)) is None:
            if not self._aside:
                return
            self._give_up_oldest()
        holder = -next(self._numbers)
        self._aside[holder] = slot
        self._hold(holder, Kept(kept.tokens[: kept.done], kept.lane, kept.scope))

    def _give_up_oldest(self) -> None:
        holder = next(iter(self._aside))
        self._drop(holder)
        self._slots.release(self._aside.pop(holder))

    def _hold(self, holder: int, what: Sequence[C] | Kept) -> None:
        self._tree.put(holder, what.tokens, what.scope)
        self._holders[holder] = what

    def _drop(self, holder: int) -> None:
        self._tree.drop(holder)
        self._holders.pop(holder, None)
