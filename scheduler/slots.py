"""The logical slots of an engine: where every ticket stands, and the state of those that made way.

A ticket has one slot from its arrival to its end, however often it changes its sequence id; a
conversation that is put aside has one too. The slot pool (``tidemill.native``) checks every move,
and keeps the states of parked slots in one block of memory that is taken once.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from tidemill.native import Pool, SlotPool, State, Stats
from tidemill.scheduler.steps import Engine
from tidemill.types import ArenaStatus, Lane

C = TypeVar("C")

SLOTS = 10_240
INTERACTIVE_ONLY = 1_024
"""Slots that nobody else takes: a person does not wait outside for a line to end."""
PARKING_BYTES = 1 << 30
"""Host memory for parked states; a page of it is used once something was written there. A sequence
that finds no room is computed again."""
ASIDE = len(Lane)
"""The class of conversations that were put aside, behind every lane."""


class Slots(Generic[C]):
    """The slot pool of one engine. Used by the engine's thread.

    The planner chooses sequence ids; the pool holds who has which.
    """

    def __init__(self, engine: Engine[C], *, parking: int) -> None:
        """``parking``: bytes for parked states."""
        self._engine = engine
        self._pool: Pool = SlotPool(
            slots=SLOTS, live=engine.limits.slots, classes=ASIDE + 1, arena_bytes=parking
        )
        self._seen: Stats | None = None
        self._taken = 0

    @property
    def stats(self) -> Stats:
        """As of the last move; counted once for each."""
        if self._seen is None:
            self._seen = self._pool.stats()
        return self._seen

    @property
    def arena(self) -> ArenaStatus:
        """The memory of the parked states."""
        arena = self.stats["arena"]
        return ArenaStatus(
            kind=arena["kind"],
            bytes=arena["bytes"],
            used=arena["used"],
            free=arena["free"],
            largest=arena["largest"],
            blocks=arena["blocks"],
        )

    def reserve(self, klass: int) -> int | None:
        """The handle of a slot that waits for a sequence id; None: there is none for this class."""
        if self._taken >= SLOTS - (0 if klass == Lane.INTERACTIVE else INTERACTIVE_ONLY):
            return None
        [slot] = self._pool.reserve(1, klass)
        self._pool.stage(slot)
        self._seen, self._taken = None, self._taken + 1
        return slot

    def start(self, slot: int, seq: int) -> None:
        """Its prompt is computed on a free id from here on."""
        self._seen = None
        taken = self._pool.start(slot, seq)
        assert taken == seq, f"sequence id {seq} is taken"

    def activate(self, slot: int) -> None:
        """It has chosen a token. May be called again."""
        if self._pool.state(slot) == State.PREFILL:
            self._seen = None
            self._pool.activate(slot)

    def move(self, slot: int, seq: int) -> None:
        """It has another id, which was free."""
        self._seen = None
        moved = self._pool.move(slot, seq)
        assert moved == seq, f"sequence id {seq} is taken"

    def requeue(self, slot: int) -> None:
        """It gave up its id, and waits with nothing computed."""
        self._seen = None
        self._pool.requeue(slot)

    def release(self, slot: int) -> None:
        """It is over; its id and what was parked of it are free."""
        self._pool.finish(slot)
        self._pool.release(slot)
        self._seen, self._taken = None, self._taken - 1

    def park(self, slot: int, seq: int) -> bool:
        """Copy its state into the arena and free its id; False: there is no room, it is as
        before."""
        self._seen = None
        size = self._engine.state_size(seq)
        block = self._pool.park_open(slot, size) if size else None
        if block is None:
            return False
        used = self._engine.save(seq, block)
        self._pool.park_close(slot, used)
        return used > 0

    def resume(self, slot: int, seq: int) -> bool:
        """Put its state onto a free id; False: the state is of no use and dropped, the id is its
        own nevertheless."""
        came = self._engine.load(seq, self._open(slot, seq))
        self._pool.resume_close(slot, came)
        if not came:
            self.start(slot, seq)
        return came

    def put_aside(self, seq: int) -> int | None:
        """Park what a free id remembers, in a slot of its own; None: there is no room."""
        slot = self.reserve(ASIDE)
        if slot is None:
            return None
        self.start(slot, seq)
        if self.park(slot, seq):
            return slot
        self.release(slot)
        return None

    def fetch(self, slot: int, seq: int, *, keep: bool) -> bool:
        """Put what is aside onto a free id, and keep it aside or not; False: it is of no use, and
        not kept."""
        came = self._engine.load(seq, self._open(slot, seq))
        if came and keep:
            self._pool.resume_keep(slot)
        else:
            self._pool.resume_close(slot, came)
            self.release(slot)
        return came

    def check(self) -> None:
        """Raise ``PoolBroken`` when something does not add up."""
        self._pool.check()

    def _open(self, slot: int, seq: int) -> memoryview:
        self._seen = None
        opened = self._pool.resume_open(slot, seq)
        assert opened is not None, f"sequence id {seq} is taken"
        return opened[1]
