"""The slot pool in Python: the oracle of the C++ one, and what runs where that was not built.

Same interface, same answers, same arena layout (``tidemill.native.slots.Pool``); nothing is fast.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from tidemill.native.accounts import check, stats
from tidemill.native.books import Books, Gate
from tidemill.native.holes import Holes
from tidemill.native.slots import Buffer, State, Stats

__all__ = ["Gate", "SlotPool"]

P = ParamSpec("P")
R = TypeVar("R")

_LIVE = (State.PREFILL, State.ACTIVE)
_HELD = tuple(state for state in State if state not in (State.FREE, State.DONE))


def _locked(
    method: Callable[Concatenate[SlotPool, P], R],
) -> Callable[Concatenate[SlotPool, P], R]:
    @wraps(method)
    def call(self: SlotPool, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return call


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


class SlotPool(Books):
    """See ``tidemill.native.slots.Pool``."""

    # --- the life of a slot

    @_locked
    def reserve(self, n: int, klass: int) -> list[int]:
        """All of ``n`` slots of a class, or none of them."""
        self._check_class(klass)
        if n < 1:
            raise ValueError("a group has at least one slot")
        if n > len(self.free):
            return []
        group = []
        for _ in range(n):
            slot = self.free.pop()
            slot.klass, slot.age, slot.state = klass, self._next_age, State.RESERVED
            self._next_age += 1
            group.append(slot.handle)
        return group

    @_locked
    def stage(self, handle: int) -> None:
        """RESERVED to STAGED: into the queue of its class, ordered by when it was reserved."""
        self._enqueue(self._at(handle, "stage", (State.RESERVED,)), State.STAGED)

    @_locked
    def start(self, handle: int, seq: int | None = None) -> int | None:
        """STAGED to PREFILL with the lowest free sequence id, or ``seq``; None: it is taken."""
        slot = self._at(handle, "start", (State.STAGED,))
        if not self._take_seq(slot, seq):
            return None
        self._dequeue(slot)
        slot.state = State.PREFILL
        return slot.seq

    @_locked
    def activate(self, handle: int) -> None:
        """PREFILL to ACTIVE."""
        self._at(handle, "activate", (State.PREFILL,)).state = State.ACTIVE

    @_locked
    def requeue(self, handle: int) -> None:
        """PREFILL, ACTIVE or PARKED back to STAGED: sequence id and parked state are given up."""
        slot = self._at(handle, "requeue", (*_LIVE, State.PARKED))
        if slot.state is State.PARKED:
            self._dequeue(slot)
        self._give_block(slot)
        self._give_seq(slot)
        slot.weight = 0
        self.requeues += 1
        self._enqueue(slot, State.STAGED)

    @_locked
    def finish(self, handle: int) -> bool:
        """To DONE from anywhere; False when a copy in flight must end first (``poll`` tells)."""
        slot = self._at(handle, "finish", _HELD)
        if slot.state is State.DRAINING:
            slot.doomed = True
            return False
        if slot.state in (State.STAGED, State.PARKED):
            self._dequeue(slot)
        self._give_seq(slot)
        self._give_block(slot)
        slot.state = State.DONE
        return True

    @_locked
    def release(self, handle: int) -> None:
        """DONE to FREE; the handle is stale from here on."""
        slot = self._at(handle, "release", (State.DONE,))
        slot.weight, slot.doomed = 0, False
        slot.generation = slot.generation % 0xFFFF_FFFF + 1
        slot.state = State.FREE
        self.free.append(slot)

    @_locked
    def lift(self, handle: int, klass: int) -> None:
        """Change the priority class; the age stays."""
        self._find(handle)
        self._check_class(klass)
        slot = self._at(handle, "lift", _HELD)
        waits = slot.state in (State.STAGED, State.PARKED)
        if waits:
            self._dequeue(slot)
        slot.klass = klass
        if waits:
            self._enqueue(slot, slot.state)

    @_locked
    def move(self, handle: int, seq: int | None = None) -> int | None:
        """The lowest free sequence id, if below its own, or ``seq``, if that is free; the caller
        moves the state itself."""
        slot = self._at(handle, "move", _LIVE)
        assert slot.seq is not None
        free = self._free_seq(seq)
        if free is None or (seq is None and free > slot.seq):
            return None
        self._give_seq(slot)
        self._take_seq(slot, free)
        return free

    # --- who is next, who makes way

    @_locked
    def head(self, klass: int | None = None) -> int | None:
        """The oldest waiting slot of the first class that has one, or of ``klass``."""
        queues: Collection[list[tuple[int, int]]] = self.queues
        if klass is not None:
            self._check_class(klass)
            queues = (self.queues[klass],)
        return next((self.slots[queue[0][1]].handle for queue in queues if queue), None)

    @_locked
    def victim(self, klass: int) -> int | None:
        """Of the live slots below ``klass``: the lowest class's youngest that fits the arena."""
        self._check_class(klass)
        largest = self.holes.largest
        able = [
            slot
            for slot in self.holders
            if slot is not None
            and slot.state in _LIVE
            and slot.klass > klass
            and Holes.rounded(max(slot.weight, 1)) <= largest
        ]
        return max(able, key=lambda slot: (slot.klass, slot.age)).handle if able else None

    @_locked
    def weigh(self, handle: int, nbytes: int) -> None:
        """Say how many bytes the state of a PREFILL or ACTIVE slot has now, for ``victim``."""
        self._at(handle, "weigh", _LIVE).weight = nbytes

    # --- park and resume

    def park(self, handle: int, data: Buffer, after: Gate | int | None = None) -> int | None:
        """Copy ``data`` into the arena and return the copy's ticket; None when it does not fit."""
        return self._park(handle, memoryview(data).cast("B"), after)

    def park_at(
        self, handle: int, address: int, nbytes: int, after: Gate | int | None = None
    ) -> int | None:
        """``park`` from an address: host memory, or with the CUDA arena also the device's."""
        return self._park(handle, _memory(address, nbytes), after)

    def resume(self, handle: int, out: Buffer, after: Gate | int | None = None) -> int | None:
        """Copy the parked bytes to ``out`` (exactly as long); None without a free sequence id."""
        return self._resume(handle, memoryview(out).cast("B"), after)

    def resume_at(
        self, handle: int, address: int, nbytes: int, after: Gate | int | None = None
    ) -> int | None:
        """``resume`` to an address."""
        return self._resume(handle, _memory(address, nbytes), after)

    @_locked
    def park_open(self, handle: int, nbytes: int) -> memoryview | None:
        """Lend ``nbytes`` of the arena to write the state into; then ``park_close``."""
        slot = self._at(handle, "park_open", _LIVE)
        if not self._take_block(slot, nbytes):
            return None
        slot.phase, slot.drain, slot.state = slot.state, "lent for park", State.DRAINING
        return self._block(slot)

    @_locked
    def park_close(self, handle: int, used: int) -> None:
        """PARKED with the first ``used`` bytes; 0: nothing saved, it goes on as before."""
        slot = self._drained(handle, "lent for park", "park_close")
        if used > slot.saved:
            raise ValueError(f"{used} bytes were not lent, only {slot.saved}")
        if used == 0 and not slot.doomed:
            self._give_block(slot)
            self._end_drain(slot, slot.phase)
            return
        if used:
            self.holes.shrink(slot.offset, slot.saved, used)
            slot.saved = used
        self._landed(slot)

    @_locked
    def resume_open(self, handle: int, seq: int | None = None) -> tuple[int, memoryview] | None:
        """The lowest free sequence id, or ``seq``, and the parked bytes; None: it is taken. Then
        ``resume_close`` or ``resume_keep``."""
        slot = self._at(handle, "resume_open", (State.PARKED,))
        if not self._take_seq(slot, seq):
            return None
        self._dequeue(slot)
        slot.drain, slot.state = "lent for resume", State.DRAINING
        assert slot.seq is not None
        return slot.seq, self._block(slot)

    @_locked
    def resume_close(self, handle: int, ok: bool = True) -> None:
        """The block is free again; ``ok=False``: the state was of no use, back to STAGED."""
        slot = self._drained(handle, "lent for resume", "resume_close")
        if ok or slot.doomed:
            self._landed(slot)
            return
        self._give_block(slot)
        self._give_seq(slot)
        slot.weight = 0
        self.requeues += 1
        self._end_drain(slot, State.STAGED)

    @_locked
    def resume_keep(self, handle: int) -> None:
        """PARKED as before: what was read was a copy. The sequence id is free again."""
        slot = self._drained(handle, "lent for resume", "resume_keep")
        if slot.doomed:
            self._landed(slot)
            return
        self.resumes += 1
        self._give_seq(slot)
        self._end_drain(slot, State.PARKED)

    @_locked
    def poll(self) -> list[int]:
        """Slots that left DRAINING because their copy has ended. Never blocks."""
        settled = []
        for lane in self.lanes:
            while lane and lane[0].ready:
                copy = lane.popleft()
                copy.make()
                self._landed(copy.slot)
                settled.append(copy.slot.handle)
        return settled

    def wait(self, ticket: int) -> list[int]:
        """Block (without the GIL) until this copy has ended, then as ``poll``."""
        lane, number = ticket & 1, ticket >> 1
        with self._lock:
            if not 0 < number <= self._submitted[lane]:
                raise ValueError(f"there is no ticket {ticket}")
            gates = [copy.gate for copy in self.lanes[lane] if copy.number <= number]
        for gate in gates:
            if gate is not None:
                gate.wait()
        return self.poll()

    # --- looking

    @_locked
    def state(self, handle: int) -> int:
        """A value of ``State``."""
        return self._find(handle).state

    @_locked
    def seq(self, handle: int) -> int | None:
        """The sequence id, where the slot has one."""
        return self._find(handle).seq

    @_locked
    def klass(self, handle: int) -> int:
        """The priority class; 0 goes first."""
        return self._find(handle).klass

    @_locked
    def age(self, handle: int) -> int:
        """Grows with every reserved slot of the pool: lower is older."""
        return self._find(handle).age

    @_locked
    def parked(self, handle: int) -> int:
        """Bytes of the arena that hold the slot's state; 0 when none do."""
        return self._find(handle).saved

    @_locked
    def live(self) -> list[int]:
        """Slots with a sequence id, ascending by it: the row order of a decode step."""
        return [slot.handle for slot in self.holders if slot is not None]

    @_locked
    def waiting(self, klass: int | None = None) -> int:
        """How many slots wait, STAGED or PARKED."""
        if klass is not None:
            self._check_class(klass)
            return len(self.queues[klass])
        return sum(map(len, self.queues))

    @_locked
    def stats(self) -> Stats:
        """Counts of slots by state, of queues and of the arena."""
        return stats(self)

    @_locked
    def check(self) -> None:
        """Raise ``PoolBroken`` when something does not add up."""
        check(self)

    # --- inside

    @_locked
    def _park(self, handle: int, source: memoryview, after: Gate | int | None) -> int | None:
        gate = self._gate(after)
        slot = self._at(handle, "park", _LIVE)
        if not self._take_block(slot, len(source)):
            return None
        slot.phase, slot.drain, slot.state = slot.state, "park", State.DRAINING
        return self._submit(0, slot, self._block(slot), source, gate)

    @_locked
    def _resume(self, handle: int, to: memoryview, after: Gate | int | None) -> int | None:
        gate = self._gate(after)
        slot = self._at(handle, "resume", (State.PARKED,))
        if len(to) != slot.saved:
            raise ValueError(
                f"the parked state has {slot.saved} bytes, room was given for {len(to)}"
            )
        if not self._take_seq(slot):
            return None
        self._dequeue(slot)
        slot.drain, slot.state = "resume", State.DRAINING
        return self._submit(1, slot, to, self._block(slot), gate)
