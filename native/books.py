"""The Python slot pool's books: its arrays, and the small moves that its verbs are made of."""

from __future__ import annotations

import mmap
import threading
from bisect import insort
from collections import deque
from collections.abc import Collection
from typing import Literal

from tidemill.native.holes import Holes
from tidemill.native.slots import (
    ALIGN,
    MAX_CLASSES,
    MAX_LIVE,
    IllegalTransition,
    StaleHandle,
    State,
)


class Gate:
    """Holds a copy back until its source is ready. Opens once."""

    def __init__(self) -> None:
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def wait(self) -> None:
        """Block until it opens."""
        self._opened.wait()


class Slot:
    """One slot. ``drain`` names the copy that is in flight; ``phase`` what it goes back to."""

    __slots__ = (
        "age", "doomed", "drain", "generation", "index", "klass", "offset", "phase", "saved",
        "seq", "state", "weight",
    )  # fmt: skip

    def __init__(self, index: int) -> None:
        self.index = index
        self.generation = 1
        self.state = State.FREE
        self.phase = State.ACTIVE
        self.drain = ""
        self.doomed = False
        self.klass = 0
        self.seq: int | None = None
        self.age = 0
        self.weight = 0
        self.offset = 0
        self.saved = 0

    @property
    def handle(self) -> int:
        return self.generation << 32 | self.index


class Copy:
    """A copy that is made when it is observed to have ended: as good as at any moment before."""

    def __init__(
        self, number: int, slot: Slot, to: memoryview, source: memoryview, gate: Gate | None
    ):
        self.number, self.slot, self.to, self.source, self.gate = number, slot, to, source, gate

    @property
    def ready(self) -> bool:
        return self.gate is None or self.gate.is_open

    def make(self) -> None:
        """Let the copy happen, once its gate is open."""
        self.to[:] = self.source
        self.to.release()
        self.source.release()


class Books:
    """What a pool owns. Every method here is called with the lock held."""

    def __init__(
        self,
        *,
        slots: int = 10240,
        live: int = 16,
        classes: int = 3,
        arena_bytes: int = 0,
        arena: str = "auto",
    ) -> None:
        if not 1 <= slots <= 1 << 20:
            raise ValueError("slots must be 1 to 1,048,576")
        if not 1 <= live <= MAX_LIVE:
            raise ValueError("live must be 1 to 256")
        if not 1 <= classes <= MAX_CLASSES:
            raise ValueError("classes must be 1 to 8")
        if arena not in ("auto", "host", "cuda"):
            raise ValueError(f"arena must be auto, host or cuda, not {arena}")
        note = "" if arena == "host" or arena_bytes < ALIGN else "the extension was not built"
        if arena == "cuda" and note:
            raise ValueError(f'arena="cuda" is not possible: {note}')
        self._lock = threading.Lock()
        self._next_age = 1
        self.note = note
        self.slots = [Slot(i) for i in range(slots)]
        self.free = list(reversed(self.slots))
        self.queues: list[list[tuple[int, int]]] = [[] for _ in range(classes)]
        """For each class (age, slot number), oldest first."""
        self.holders: list[Slot | None] = [None] * live
        self.holes = Holes(arena_bytes)
        self._arena = mmap.mmap(-1, self.holes.total) if self.holes.total else None
        self.lanes: tuple[deque[Copy], deque[Copy]] = (deque(), deque())
        self._submitted = [0, 0]
        self.parks = self.resumes = self.requeues = self.refused = self.peak = 0

    def _gate(self, after: Gate | int | None) -> Gate | None:
        if after is None or isinstance(after, Gate):
            return after
        raise ValueError("an event needs the CUDA arena; pass a Gate")

    def _submit(
        self,
        lane: Literal[0, 1],
        slot: Slot,
        to: memoryview,
        source: memoryview,
        gate: Gate | None,
    ) -> int:
        self._submitted[lane] += 1
        self.lanes[lane].append(Copy(self._submitted[lane], slot, to, source, gate))
        return self._submitted[lane] << 1 | lane

    def _find(self, handle: int) -> Slot:
        index = handle & 0xFFFF_FFFF
        if index < len(self.slots):
            slot = self.slots[index]
            if slot.handle == handle and slot.state is not State.FREE:
                return slot
        raise StaleHandle(f"no slot has handle {handle}: it was released, or never reserved")

    def _at(self, handle: int, call: str, states: Collection[State]) -> Slot:
        slot = self._find(handle)
        ending = slot.doomed and slot.state is State.DRAINING
        if ending or slot.state not in states:
            of = " of a finished slot" if ending else ""
            raise IllegalTransition(
                f"{call} does not leave from {slot.state.name}{of} (slot {slot.index})"
            )
        return slot

    def _drained(self, handle: int, drain: str, call: str) -> Slot:
        slot = self._find(handle)
        if slot.drain != drain:
            raise IllegalTransition(
                f"{call} closes a block that was not lent for it"
                f" (slot {slot.index}, {slot.state.name})"
            )
        return slot

    def _check_class(self, klass: int) -> None:
        if not 0 <= klass < len(self.queues):
            raise ValueError(f"there is no class {klass} among {len(self.queues)}")

    def _enqueue(self, slot: Slot, state: State) -> None:
        slot.state = state
        insort(self.queues[slot.klass], (slot.age, slot.index))

    def _dequeue(self, slot: Slot) -> None:
        self.queues[slot.klass].remove((slot.age, slot.index))

    def _free_seq(self, wanted: int | None) -> int | None:
        """The lowest free sequence id, or the one that is wanted if that is free."""
        if wanted is None:
            return next((seq for seq, holder in enumerate(self.holders) if holder is None), None)
        if not 0 <= wanted < len(self.holders):
            raise ValueError(f"there is no sequence id {wanted} among {len(self.holders)}")
        return wanted if self.holders[wanted] is None else None

    def _take_seq(self, slot: Slot, wanted: int | None = None) -> bool:
        seq = self._free_seq(wanted)
        if seq is None:
            return False
        self.holders[seq], slot.seq = slot, seq
        return True

    def _give_seq(self, slot: Slot) -> None:
        if slot.seq is not None:
            self.holders[slot.seq], slot.seq = None, None

    def _take_block(self, slot: Slot, nbytes: int) -> bool:
        if nbytes < 1:
            raise ValueError("there is nothing to park")
        offset = self.holes.take(nbytes)
        if offset is None:
            self.refused += 1
            return False
        slot.offset, slot.saved = offset, nbytes
        self.peak = max(self.peak, self.holes.total - self.holes.free)
        return True

    def _give_block(self, slot: Slot) -> None:
        if slot.saved:
            self.holes.give(slot.offset, slot.saved)
            slot.saved = 0

    def _block(self, slot: Slot) -> memoryview:
        assert self._arena is not None
        return memoryview(self._arena)[slot.offset : slot.offset + slot.saved]

    def _end_drain(self, slot: Slot, state: State) -> None:
        slot.drain = ""
        if state in (State.PARKED, State.STAGED):
            self._enqueue(slot, state)
        else:
            slot.state = state

    def _landed(self, slot: Slot) -> None:
        if slot.doomed:
            self._give_seq(slot)
            self._give_block(slot)
            self._end_drain(slot, State.DONE)
        elif "park" in slot.drain:
            self.parks += 1
            self._give_seq(slot)
            self._end_drain(slot, State.PARKED)
        else:
            self.resumes += 1
            self._give_block(slot)
            self._end_drain(slot, slot.phase)
