"""What one step of the engine computes: a pure function from sequences and limits to a plan.

The planner reads no clock, waits for nothing and knows no engine. Its rules, in order:

1. Waiting sequences enter by lane, then as given, each on the lowest free sequence id of its class:
   an engine that groups rows by consecutive ids computes such a batch in one pass.
2. Where a class is full, an id of a longer one will do that nobody of the lane waits for.
3. Sequences that are not INTERACTIVE leave ``headroom`` ids of each class to those that are.
4. INTERACTIVE without a free id displaces the youngest sequence of the lowest lane, of its class if
   it can.
5. One sequence at most that is computed alone has an id, the highest of its class that is free. It
   has steps of its own, in turn with everybody else's.
6. Nobody waits for a hole between the ids in use of a class: the highest one moves into it.
7. Every sequence on an id gets one row; what is left of the prefill budget goes to prompts, by
   lane, then arrival. The budget shrinks while somebody INTERACTIVE would feel a long step, and
   grows while nobody is there who could.
8. In a hurry, a step with an INTERACTIVE prompt has rows of INTERACTIVE sequences only.
9. Rows are sorted by sequence id.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import accumulate

import msgspec

from tidemill.types import Lane

UNBOUNDED = 1 << 62


class SlotClass(msgspec.Struct, frozen=True, kw_only=True):
    """Sequence ids that follow each other, with the same room."""

    slots: int
    context: int = UNBOUNDED
    """Most tokens of a sequence on one of them."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a step may hold. Rows and tokens are the same thing."""

    slots: int
    """Sequence ids, ``0 .. slots - 1``."""
    split: tuple[SlotClass, ...] = ()
    """Who has how much room, shorter classes first; empty: one class without bound."""
    rows: int
    """Most rows of one step; at least ``slots``."""
    prefill: int = 512
    """Prompt rows of one step."""
    prefill_shared: int = 128
    """The same while an INTERACTIVE sequence decodes or waits."""
    prefill_lines: int = 0
    """The same while nobody INTERACTIVE is there, where such a step can be given up; 0:
    ``prefill``."""
    headroom: int = 0
    """Ids of each class that lanes below INTERACTIVE leave free; at least one id stays theirs."""
    moves: int = 0
    """Sequences that one step may move into holes."""

    @property
    def classes(self) -> tuple[SlotClass, ...]:
        """At least one."""
        return self.split or (SlotClass(slots=self.slots),)

    @property
    def ids(self) -> list[range]:
        """The sequence ids of each class."""
        ends = list(accumulate(one.slots for one in self.classes))
        return [range(end - one.slots, end) for one, end in zip(self.classes, ends, strict=True)]

    def class_of(self, seq: int) -> int:
        """The class of a sequence id."""
        return next(klass for klass, ids in enumerate(self.ids) if seq in ids)

    def class_for(self, tokens: int) -> int:
        """The shortest class with room for so many; the longest where none has."""
        fits = (klass for klass, one in enumerate(self.classes) if tokens <= one.context)
        return next(fits, len(self.classes) - 1)


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence, as the planner sees it."""

    key: int
    lane: Lane
    order: int
    """Arrival; unique, lower is older."""
    left: int
    """Tokens that may be computed now, at least one."""
    decoding: bool = False
    """True once its prompt was computed: its one row is the token chosen last."""
    seq: int | None = None
    """Its sequence id; None while it waits or is parked."""
    klass: int = 0
    """The shortest class that has room for it."""
    alone: bool = False
    """It shares no step; all of ``left`` is computed in one."""


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """A waiting sequence takes an id, or one on an id takes another."""

    key: int
    seq: int


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive rows of one sequence."""

    key: int
    seq: int
    count: int


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Carried out in this order: displace, admit, move, compute."""

    displace: tuple[int, ...] = ()
    """Keys that give their id up: parked, or requeued to be computed again."""
    admit: tuple[Admission, ...] = ()
    move: tuple[Admission, ...] = ()
    """To free ids of the same class, each below the sequence's own."""
    rows: tuple[Rows, ...] = ()
    alone: bool = False
    """True for a step of the sequence that is computed alone."""
    hurried: bool = False
    """True for a step that leaves others out, so that an INTERACTIVE prompt is through earlier."""


def plan(
    candidates: Seq[Candidate], limits: Limits, *, alone: bool = False, hurry: bool = False
) -> StepPlan:
    """The next step. ``candidates`` are all sequences on an id and at least as many that wait, in
    the order of their turns, as could enter. ``alone``: the turn is that of the sequence which is
    computed alone, if there is one. ``hurry``: others may be left out for INTERACTIVE prompts."""
    scene = _Scene(candidates, limits)
    scene.admit()
    solo, hurried = scene.solo, False
    if solo is not None and solo.seq is not None and (alone or len(scene.live) == 1):
        rows: tuple[Rows, ...] = (Rows(key=solo.key, seq=solo.seq, count=solo.left),)
    else:
        solo = None
        scene.fill_holes()
        shared = {seq: c for seq, c in scene.live.items() if not c.alone}
        first = {seq: c for seq, c in shared.items() if c.lane is Lane.INTERACTIVE}
        if hurry and any(not c.decoding for c in first.values()):
            hurried, shared = len(first) < len(shared), first
        rows = _rows(shared, limits, scene.held_back or scene.waited_for)
    return StepPlan(
        displace=tuple(scene.displaced),
        admit=tuple(scene.admitted),
        move=tuple(scene.moved),
        rows=rows,
        alone=solo is not None,
        hurried=hurried,
    )


class _Scene:
    """Who is on which id, while the next step is being planned."""

    def __init__(self, candidates: Seq[Candidate], limits: Limits) -> None:
        self.live = {c.seq: c for c in candidates if c.seq is not None}
        self._waiting = [c for c in candidates if c.seq is None]
        self._limits = limits
        self._classes = [_Ids(ids, self.live, limits.headroom) for ids in limits.ids]
        self.displaced: list[int] = []
        self.admitted: list[Admission] = []
        self.moved: list[Admission] = []
        self.held_back = False
        """True when somebody INTERACTIVE got no id."""

    @property
    def solo(self) -> Candidate | None:
        """The sequence on an id that is computed alone."""
        return next((c for c in self.live.values() if c.alone), None)

    @property
    def waited_for(self) -> bool:
        """True when somebody INTERACTIVE is computed alone, in turn with everybody's steps."""
        return any(c.alone and c.lane is Lane.INTERACTIVE for c in self.live.values())

    def admit(self) -> None:
        """Let in whoever may come in: by lane, and there those first who need the longest class, so
        that nobody else has its ids while they wait."""
        for lane in Lane:
            for klass in reversed(range(len(self._classes))):
                self._admit_all(c for c in self._waiting if (c.lane, c.klass) == (lane, klass))

    def _admit_all(self, waiting: Iterable[Candidate]) -> None:
        """Let them in, in this order, until one gets no id."""
        for c in waiting:
            urgent = c.lane is Lane.INTERACTIVE
            if c.alone and (solo := self.solo) is not None:
                if not urgent or solo.lane is Lane.INTERACTIVE:
                    self.held_back |= urgent
                    continue
                self._displace(solo)
            ids = self._open_to(c)
            if ids is None:
                self.held_back |= urgent
                return
            seq = ids.take(c)
            self.admitted.append(Admission(key=c.key, seq=seq))
            self.live[seq] = msgspec.structs.replace(c, seq=seq)

    def _open_to(self, c: Candidate) -> _Ids | None:
        """Where the sequence gets an id; somebody may have made way for it."""
        urgent = c.lane is Lane.INTERACTIVE
        classes = self._classes[c.klass :]
        for ids in classes:
            if ids.has_room(urgent):
                return ids
        for ids in classes if urgent else ():
            behind = [
                there
                for seq, there in self.live.items()
                if seq in ids.all and there.lane is not Lane.INTERACTIVE
            ]
            if behind:
                self._displace(max(behind, key=_turn))
                return ids
        return None

    def fill_holes(self) -> None:
        """Move the highest ids of a class into its lowest holes."""
        entered = {a.key for a in self.admitted}
        for ids in self._classes:
            while len(self.moved) < self._limits.moves and ids.free:
                shared = [seq for seq, c in self.live.items() if seq in ids.all and not c.alone]
                if not shared or (highest := max(shared)) < ids.free[0]:
                    break
                c = self.live[highest]
                if c.key in entered:  # nothing of it is computed yet, or it was just brought here
                    break
                seq = ids.free.pop(0)
                del self.live[highest]
                insort(ids.free, highest)
                self.live[seq] = msgspec.structs.replace(c, seq=seq)
                self.moved.append(Admission(key=c.key, seq=seq))

    def _displace(self, c: Candidate) -> None:
        assert c.seq is not None
        self.displaced.append(c.key)
        del self.live[c.seq]
        next(ids for ids in self._classes if c.seq in ids.all).give(c, c.seq)


class _Ids:
    """The sequence ids of one class."""

    def __init__(self, ids: range, live: dict[int, Candidate], headroom: int) -> None:
        self.all = ids
        self.free = [seq for seq in ids if seq not in live]
        self._background = sum(
            seq in live and live[seq].lane is not Lane.INTERACTIVE for seq in ids
        )
        self._room = len(ids) - min(headroom, len(ids) - 1)

    def has_room(self, urgent: bool) -> bool:
        """True when there is a free id for somebody INTERACTIVE, or for others."""
        return bool(self.free) and (urgent or self._background < self._room)

    def take(self, c: Candidate) -> int:
        """The id that a sequence gets."""
        self._background += c.lane is not Lane.INTERACTIVE
        return self.free.pop(-1 if c.alone else 0)

    def give(self, c: Candidate, seq: int) -> None:
        """The id of a sequence is free again."""
        self._background -= c.lane is not Lane.INTERACTIVE
        insort(self.free, seq)


def _rows(live: dict[int, Candidate], limits: Limits, held_back: bool) -> tuple[Rows, ...]:
    interactive = [c for c in live.values() if c.lane is Lane.INTERACTIVE]
    shared = held_back or any(c.decoding for c in interactive)
    whole = limits.prefill if interactive else max(limits.prefill, limits.prefill_lines)
    budget = limits.prefill_shared if shared else whole
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
