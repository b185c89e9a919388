"""Which models are in memory: what to load, what to unload, who takes no more batch lines.

Interactive requests come first, in the order of their arrival. Batch lines of a model that is not
in memory wait while the lines of one that is are worked on, so that models are not swapped for
every line, and get their turn after ``turn_s`` at the latest. Of those that wait for one, the lines
of a batch that would miss its deadline come first, up to every other turn::

    waits ──► fits? ──► load
                └► idle ones, least recently used first ──► unload
                     └► those whose lines had their turn ──► hold: finish what runs, start no more

Pure: sees a picture of all models and the time, never awaits, never reads a clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tidemill.types import ModelState, Record

URGENT_S = 900.0
"""Lines this close to their deadline do not wait for the turn of those with a later one."""


class Resident(Record, frozen=True, kw_only=True):
    """One model as it stands. Times are epoch seconds."""

    key: str
    size: int
    """Bytes that it takes while it is loaded."""
    state: ModelState
    busy: int = 0
    """Requests in flight; a model with any is never unloaded."""
    used_at: float = 0.0
    """When it last had something to do."""
    kept_until: float = 0.0
    """Lines of another model wait for it until then: a person used it and may come back."""
    turn_at: float = 0.0
    """When its lines' last turn began; 0.0: they had none."""
    asked_at: float | None = None
    """Since when an interactive request waits for it."""
    lines_at: float | None = None
    """Since when batch lines wait for it."""
    deadline: float = math.inf
    """The nearest one of those lines."""
    lifted: bool = False
    """One of their batches would miss its deadline at its pace."""
    not_before: float = 0.0
    """It is not loaded earlier: the last attempt failed."""


class Moves(Record, frozen=True, kw_only=True):
    """What to do now."""

    load: tuple[str, ...] = ()
    unload: tuple[str, ...] = ()
    hold: frozenset[str] = frozenset()
    """Loaded models that start no batch line, because another one waits for their memory."""
    look_at: float = math.inf
    """When to decide again, if nothing happens before."""


def decide(residents: Sequence[Resident], budget: int, turn_s: float, now: float) -> Moves:
    """The moves that ``budget`` bytes allow. One model is always allowed, whatever its size.

    Who waits longest is served first; nobody later takes memory that the first one waits for. A
    lifted one counts as having waited for two turns of everybody more, unless the last turn was
    that of a lifted one. So every other turn is theirs, and nobody waits longer than two turns of
    everybody.
    """
    taken = sum(one.size for one in residents if one.state != "unloaded")
    loads: list[str] = []
    look_at = min((r.not_before for r in _waiting(residents) if r.not_before > now), default=_NEVER)
    ready = [one for one in _waiting(residents) if one.not_before <= now]
    last = max(residents, key=lambda one: one.turn_at, default=None)
    their_turn = last is None or last.turn_at == 0.0 or not last.lifted
    head_start = 2 * turn_s * len(ready) if their_turn else 0.0
    waiting = sorted(ready, key=lambda one: _order(one, head_start, now))
    for one in waiting:
        if taken == 0 or taken + one.size <= budget:
            loads.append(one.key)
            taken += one.size
            continue
        missing = min(taken, taken + one.size - budget)
        missing -= sum(other.size for other in residents if other.state == "unloading")
        if missing <= 0:
            break  # what is being unloaded is enough
        victims, ends_at = _victims(one, residents, missing, turn_s, now)
        if any(victim.busy for victim in victims):
            held = frozenset(victim.key for victim in victims)
            return Moves(load=tuple(loads), hold=held, look_at=min(look_at, ends_at))
        unload = tuple(victim.key for victim in victims)
        return Moves(load=tuple(loads), unload=unload, look_at=min(look_at, ends_at))
    return Moves(load=tuple(loads), look_at=look_at)


_NEVER = math.inf


def _waiting(residents: Sequence[Resident]) -> list[Resident]:
    return [
        one
        for one in residents
        if one.state == "unloaded" and (one.asked_at is not None or one.lines_at is not None)
    ]


def _order(one: Resident, head_start: float, now: float) -> tuple[int, float, str]:
    """Interactive requests, then lines near their deadline, then by how long somebody waits;
    ``head_start``: seconds by which lifted ones are ahead."""
    if one.asked_at is not None:
        return 0, one.asked_at, one.key
    assert one.lines_at is not None, "nobody waits for it"
    if one.deadline - now <= URGENT_S:
        return 1, one.deadline, one.key
    return 2, one.lines_at - (head_start if one.lifted else 0.0), one.key


def _victims(
    one: Resident, residents: Sequence[Resident], missing: int, turn_s: float, now: float
) -> tuple[list[Resident], float]:
    """Who makes room of ``missing`` bytes for ``one``; nobody where that is not possible yet, and
    when the next turn ends."""
    victims: list[Resident] = []
    next_end = _NEVER
    for other in sorted(residents, key=_keep):
        if other.state != "loaded" or missing <= 0:
            continue
        ends_at = _turn_ends_at(other, one, turn_s, now)
        if ends_at > now:
            next_end = min(next_end, ends_at)
        else:
            victims.append(other)
            missing -= other.size
    return ([], next_end) if missing > 0 else (victims, _NEVER)


def _keep(one: Resident) -> tuple[bool, float, str]:
    """Least worth keeping first: idle ones by use, then those at work by turn."""
    at_work = one.busy > 0 or one.lines_at is not None
    return at_work, one.turn_at if at_work else one.used_at, one.key


def _turn_ends_at(one: Resident, waiting: Resident, turn_s: float, now: float) -> float:
    """Until when a loaded model goes on taking lines although another one waits. What it has in
    flight is finished in any case."""
    if waiting.asked_at is not None:
        return now
    if one.lines_at is None:
        return one.kept_until if waiting.deadline - now > URGENT_S else now
    if waiting.deadline < one.deadline and waiting.deadline - now <= URGENT_S:
        return now
    if one.deadline < waiting.deadline and one.deadline - now <= URGENT_S:
        return _NEVER
    return one.turn_at + turn_s
