"""What one step of the engine computes: a pure function from sequences and limits to a plan.

The planner reads no clock, waits for nothing and knows no engine. Its rules, in order:

1. Waiting sequences enter by lane, then arrival, each on the lowest free sequence id: an engine
   that groups rows by consecutive ids computes such a batch in one pass.
2. Sequences that are not INTERACTIVE leave ``headroom`` ids to those that are.
3. INTERACTIVE without a free id displaces the youngest sequence of the lowest lane.
4. Every sequence on an id gets one row; what is left of the prefill budget goes to prompts, by
   lane, then arrival. The budget shrinks while somebody INTERACTIVE would feel a long step.
5. Rows are sorted by sequence id.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq

import msgspec

from tidemill.types import Lane


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a step may hold. Rows and tokens are the same thing."""

    slots: int
    """Sequence ids, ``0 .. slots - 1``."""
    rows: int
    """Most rows of one step; at least ``slots``."""
    prefill: int = 512
    """Prompt rows of one step."""
    prefill_shared: int = 128
    """The same while an INTERACTIVE sequence decodes or waits."""
    headroom: int = 0
    """Ids that lanes below INTERACTIVE leave free; at least one id stays theirs."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence, as the planner sees it."""

    key: int
    lane: Lane
    order: int
    """Arrival; unique, lower is older."""
    left: int
    """Tokens that are not in the engine's memory yet, at least one."""
    decoding: bool = False
    """True once its prompt was computed: its one row is the token chosen last."""
    seq: int | None = None
    """Its sequence id; None while it waits or is parked."""


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """A waiting sequence takes an id."""

    key: int
    seq: int


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive rows of one sequence."""

    key: int
    seq: int
    count: int


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Carried out in this order: displace, admit, compute."""

    displace: tuple[int, ...] = ()
    """Keys that give their id up: parked, or requeued to be computed again."""
    admit: tuple[Admission, ...] = ()
    rows: tuple[Rows, ...] = ()


def plan(candidates: Seq[Candidate], limits: Limits) -> StepPlan:
    """The next step. ``candidates`` are all sequences on an id and at least the first
    ``limits.slots`` that wait, in any order."""
    live = {c.seq: c for c in candidates if c.seq is not None}
    waiting = sorted((c for c in candidates if c.seq is None), key=_turn)
    free = [seq for seq in range(limits.slots) if seq not in live]
    heapq.heapify(free)

    headroom = min(limits.headroom, limits.slots - 1)
    background = sum(c.lane is not Lane.INTERACTIVE for c in live.values())
    displace: list[int] = []
    admit: list[Admission] = []
    for c in waiting:
        if c.lane is Lane.INTERACTIVE:
            if not free:
                victim = max(live.values(), key=_turn)
                if victim.lane is Lane.INTERACTIVE or victim.seq is None:
                    break
                displace.append(victim.key)
                background -= 1
                del live[victim.seq]
                heapq.heappush(free, victim.seq)
        elif not free or background >= limits.slots - headroom:
            break
        else:
            background += 1
        seq = heapq.heappop(free)
        admit.append(Admission(key=c.key, seq=seq))
        live[seq] = msgspec.structs.replace(c, seq=seq)
    held_back = any(c.lane is Lane.INTERACTIVE for c in waiting[len(admit) :])
    return StepPlan(
        displace=tuple(displace), admit=tuple(admit), rows=_rows(live, limits, held_back)
    )


def _rows(live: dict[int, Candidate], limits: Limits, held_back: bool) -> tuple[Rows, ...]:
    interactive = [c for c in live.values() if c.lane is Lane.INTERACTIVE]
    shared = held_back or any(c.decoding for c in interactive)
    budget = limits.prefill_shared if shared else limits.prefill
    # An INTERACTIVE prompt may use the full budget; prompts behind it must not lengthen its step.
    behind = limits.prefill_shared if interactive else budget

    prompts = sorted((c for c in live.values() if c.left > 1), key=_turn)
    spent = len(prompts)
    space = limits.rows - len(live)
    extra: dict[int, int] = {}
    for c in prompts:
        cap = budget if c.lane is Lane.INTERACTIVE else min(budget, behind)
        more = max(0, min(c.left - 1, cap - spent, space))
        extra[c.key] = more
        spent += more
        space -= more
    return tuple(
        Rows(key=c.key, seq=seq, count=1 + extra.get(c.key, 0)) for seq, c in sorted(live.items())
    )


def _turn(c: Candidate) -> tuple[int, int]:
    return (c.lane, c.order)
