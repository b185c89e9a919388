"""``stats()`` and ``check()`` of the Python slot pool."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tidemill.native.holes import Holes
from tidemill.native.slots import PoolBroken, State, Stats

if TYPE_CHECKING:
    from tidemill.native.books import Books


def stats(pool: Books) -> Stats:
    """Count everything anew; nothing here is kept up to date elsewhere."""
    states = Counter(slot.state for slot in pool.slots)
    holes = pool.holes
    return {
        "slots": len(pool.slots),
        "free": states[State.FREE],
        "used": len(pool.slots) - states[State.FREE],
        "states": {state.name: states[state] for state in State},
        "live": sum(holder is not None for holder in pool.holders),
        "live_max": len(pool.holders),
        "waiting": [len(queue) for queue in pool.queues],
        "in_flight": sum(map(len, pool.lanes)),
        "parks": pool.parks,
        "resumes": pool.resumes,
        "requeues": pool.requeues,
        "refused": pool.refused,
        "arena": {
            "kind": "model",
            "pinned": False,
            "note": pool.note,
            "bytes": holes.total,
            "used": holes.total - holes.free,
            "free": holes.free,
            "largest": holes.largest,
            "peak": pool.peak,
            "blocks": sum(slot.saved > 0 for slot in pool.slots),
        },
    }


def check(pool: Books) -> None:
    """Raise ``PoolBroken`` with the first thing that does not add up."""
    waiting = {(klass, *entry) for klass, queue in enumerate(pool.queues) for entry in queue}
    blocks = [(offset, size, True) for offset, size in pool.holes.holes]
    for slot in pool.slots:
        lives = slot.state in (State.PREFILL, State.ACTIVE, State.DRAINING)
        waits = slot.state in (State.STAGED, State.PARKED)
        stored = slot.state in (State.PARKED, State.DRAINING)
        name = f"slot {slot.index} ({slot.state.name})"
        _hold((slot.seq is not None) == lives, f"{name} and its sequence id disagree")
        _hold(
            ((slot.klass, slot.age, slot.index) in waiting) == waits,
            f"{name} and its queue disagree",
        )
        _hold((slot.saved > 0) == stored, f"{name} and its block disagree")
        _hold(bool(slot.drain) == (slot.state is State.DRAINING), f"{name} and its copy disagree")
        if slot.seq is not None:
            _hold(pool.holders[slot.seq] is slot, f"{name} does not hold its sequence id")
        if slot.saved:
            blocks.append((slot.offset, Holes.rounded(slot.saved), False))
    free = sum(slot.state is State.FREE for slot in pool.slots)
    _hold(len(pool.free) == free, "free + used is not the total")
    _hold(
        len(waiting) == sum(slot.state in (State.STAGED, State.PARKED) for slot in pool.slots),
        "a queue holds a slot that does not wait",
    )
    held = sum(holder is not None for holder in pool.holders)
    _hold(held == sum(slot.seq is not None for slot in pool.slots), "a sequence id is lost")
    edge, after_hole = 0, False
    for offset, size, hole in sorted(blocks):
        _hold(offset == edge, f"the arena has a gap or an overlap at {edge}")
        _hold(not (hole and after_hole), f"two holes touch at {offset}")
        edge, after_hole = offset + size, hole
    _hold(edge == pool.holes.total, "the arena's blocks and holes do not fill it")


def _hold(condition: bool, broken: str) -> None:
    if not condition:
        raise PoolBroken(broken)
