"""The slot pool's words: states, legal moves, errors, statistics, and one interface.

Two classes have the interface: ``_core.SlotPool`` in C++ and ``model.SlotPool`` in Python, which
is the oracle in tests and the fallback where the extension cannot be built.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Protocol, TypedDict


class State(IntEnum):
    """States of a slot."""

    FREE = 0
    RESERVED = 1
    """Taken, in a group or alone; its request is being prepared."""
    STAGED = 2
    """Waits in the queue of its class for a sequence id."""
    PREFILL = 3
    """Has a sequence id; its prompt is being computed."""
    ACTIVE = 4
    """Decodes."""
    PARKED = 5
    """Made way: its state is in the arena, its sequence id is gone, it waits to be resumed."""
    DRAINING = 6
    """A copy of its state is in flight; sequence id and block are both held until it has ended."""
    DONE = 7
    """Finished or cancelled; only the handle is still held."""


MOVES: dict[State, frozenset[State]] = {
    State.FREE: frozenset({State.RESERVED}),
    State.RESERVED: frozenset({State.STAGED, State.DONE}),
    State.STAGED: frozenset({State.PREFILL, State.DONE}),
    State.PREFILL: frozenset({State.ACTIVE, State.DRAINING, State.STAGED, State.DONE}),
    State.ACTIVE: frozenset({State.DRAINING, State.STAGED, State.DONE}),
    State.PARKED: frozenset({State.DRAINING, State.STAGED, State.DONE}),
    State.DRAINING: frozenset(
        {State.PARKED, State.PREFILL, State.ACTIVE, State.STAGED, State.DONE}
    ),
    State.DONE: frozenset({State.FREE}),
}
"""Every legal transition; the pools refuse all others with ``IllegalTransition``."""

Buffer = bytes | bytearray | memoryview
"""What states are copied from and to; the C++ pool takes whatever has the buffer protocol."""

MAX_LIVE = 256
"""Most sequence ids of a llama.cpp context (its compile-time ``LLAMA_MAX_SEQ``)."""
MAX_CLASSES = 8
ALIGN = 256
"""Blocks of the arena are multiples of this many bytes."""


class StaleHandle(LookupError):
    """The handle's slot was released since, or it never was a handle of this pool."""


class IllegalTransition(RuntimeError):
    """The slot is in a state that this call does not leave from."""


class PoolBroken(RuntimeError):
    """``check()`` found that the pool does not add up; the message names what."""


class ArenaStats(TypedDict):
    """The parking lot. ``used + free == bytes``; ``largest`` is the biggest block that fits now."""

    kind: str
    """``host``, ``cuda`` or ``model``."""
    pinned: bool
    note: str
    """Why there is no CUDA arena, where one was wanted; else empty."""
    bytes: int
    used: int
    free: int
    largest: int
    peak: int
    blocks: int


class Stats(TypedDict):
    """What a pool holds. ``used + free == slots``."""

    slots: int
    free: int
    used: int
    states: dict[str, int]
    live: int
    """Sequence ids in use."""
    live_max: int
    waiting: list[int]
    """Staged and parked slots, a number for each class."""
    in_flight: int
    """Copies that have not been observed to end."""
    parks: int
    resumes: int
    requeues: int
    refused: int
    """Parks for which the arena had no room."""
    arena: ArenaStats


class Pool(Protocol):
    """Many logical slots on few sequence ids, and a parking lot for those that had to make way.

    Handles are ``generation << 32 | index`` and are checked on every call. Class 0 goes first. A
    call that finds no room answers None (``reserve``: an empty list); a call that is wrong raises
    ``StaleHandle``, ``IllegalTransition`` or ``ValueError``. Any thread may call any method.
    """

    # --- the life of a slot
    def reserve(self, n: int, klass: int) -> list[int]:
        """All of ``n`` slots of a class, or none of them."""

    def stage(self, handle: int) -> None:
        """RESERVED to STAGED: into the queue of its class, ordered by when it was reserved."""

    def start(self, handle: int, seq: int | None = None) -> int | None:
        """STAGED to PREFILL with the lowest free sequence id, or ``seq``; None: it is taken."""

    def activate(self, handle: int) -> None:
        """PREFILL to ACTIVE."""

    def requeue(self, handle: int) -> None:
        """PREFILL, ACTIVE or PARKED back to STAGED: sequence id and parked state are given up."""

    def finish(self, handle: int) -> bool:
        """To DONE from anywhere; False when a copy in flight must end first (``poll`` tells)."""

    def release(self, handle: int) -> None:
        """DONE to FREE; the handle is stale from here on."""

    def lift(self, handle: int, klass: int) -> None:
        """Change the priority class; the age stays."""

    def move(self, handle: int, seq: int | None = None) -> int | None:
        """The lowest free sequence id, if below its own, or ``seq``, if that is free; the caller
        moves the state itself."""

    # --- who is next, who makes way
    def head(self, klass: int | None = None) -> int | None:
        """The oldest waiting slot of the first class that has one, or of ``klass``."""

    def victim(self, klass: int) -> int | None:
        """Of the live slots below ``klass``: the lowest class's youngest that fits the arena."""

    def weigh(self, handle: int, nbytes: int) -> None:
        """Say how many bytes the state of a PREFILL or ACTIVE slot has now, for ``victim``."""

    # --- park and resume
    def park(self, handle: int, data: Buffer, after: Any = None) -> int | None:
        """Copy ``data`` into the arena and return the copy's ticket; None when it does not fit.

        DRAINING until ``poll`` or ``wait`` observes the end, then PARKED. ``data`` must not change
        before. ``after``: a gate, or with the CUDA arena the address of a recorded ``cudaEvent_t``.
        """

    def park_at(self, handle: int, address: int, nbytes: int, after: Any = None) -> int | None:
        """``park`` from an address: host memory, or with the CUDA arena also the device's."""

    def resume(self, handle: int, out: Buffer, after: Any = None) -> int | None:
        """Copy the parked bytes to ``out`` (exactly as long); None without a free sequence id.

        DRAINING until the end is observed, then PREFILL or ACTIVE as before it was parked.
        """

    def resume_at(self, handle: int, address: int, nbytes: int, after: Any = None) -> int | None:
        """``resume`` to an address."""

    def park_open(self, handle: int, nbytes: int) -> memoryview | None:
        """Lend ``nbytes`` of the arena to write the state into; then ``park_close``."""

    def park_close(self, handle: int, used: int) -> None:
        """PARKED with the first ``used`` bytes; 0: nothing saved, it goes on as before."""

    def resume_open(self, handle: int, seq: int | None = None) -> tuple[int, memoryview] | None:
        """The lowest free sequence id, or ``seq``, and the parked bytes; None: it is taken. Then
        ``resume_close`` or ``resume_keep``."""

    def resume_close(self, handle: int, ok: bool = True) -> None:
        """The block is free again; ``ok=False``: the state was of no use, back to STAGED."""

    def resume_keep(self, handle: int) -> None:
        """PARKED as before: what was read was a copy. The sequence id is free again."""

    def poll(self) -> list[int]:
        """Slots that left DRAINING because their copy has ended. Never blocks."""

    def wait(self, ticket: int) -> list[int]:
        """Block (without the GIL) until this copy has ended, then as ``poll``."""

    # --- looking
    def state(self, handle: int) -> int:
        """A value of ``State``."""

    def seq(self, handle: int) -> int | None:
        """The sequence id, where the slot has one."""

    def klass(self, handle: int) -> int: ...

    def age(self, handle: int) -> int:
        """Grows with every reserved slot of the pool: lower is older."""

    def parked(self, handle: int) -> int:
        """Bytes of the arena that hold the slot's state; 0 when none do."""

    def live(self) -> list[int]:
        """Slots with a sequence id, ascending by it: the row order of a decode step."""

    def waiting(self, klass: int | None = None) -> int:
        """How many slots wait, STAGED or PARKED."""

    def stats(self) -> Stats: ...

    def check(self) -> None:
        """Raise ``PoolBroken`` when something does not add up."""
