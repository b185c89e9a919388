"""One ticket on its way through the engine."""

from __future__ import annotations

from typing import Generic, TypeVar

from tidemill.scheduler.lookup import Lookup
from tidemill.scheduler.plan import Candidate, Limits
from tidemill.scheduler.steps import Chunk, Ticket
from tidemill.types import Lane

C = TypeVar("C")

FIXED_CHUNK = 128
"""Prompt rows of a step of a sequence that is computed alone. Not a setting: another size is
another rounding, and may be another text."""


class Sequence(Generic[C]):
    """``tokens`` is prompt and answer; the first ``done`` of them are computed."""

    __slots__ = (
        "alone",
        "answer",
        "chooser",
        "done",
        "epoch",
        "group",
        "key",
        "klass",
        "lane",
        "limit",
        "lookup",
        "order",
        "outgrown",
        "parked",
        "passed",
        "prompt_len",
        "reused",
        "scope",
        "seq",
        "slot",
        "started",
        "tokens",
    )

    def __init__(
        self, ticket: Ticket[C], order: int, epoch: int, *, slot: int, limits: Limits
    ) -> None:
        """``order``: arrival. ``epoch``: lines of one epoch may change places. ``slot``: the handle
        of its logical slot."""
        self.slot = slot
        # One that is computed alone never moves: another context may round otherwise.
        longest = len(limits.classes) - 1
        need = len(ticket.prompt) + ticket.expected
        self.klass = longest if ticket.alone else limits.class_for(need)
        self.outgrown = False
        """True while it waits for an id of a longer class than it had."""
        self.key, self.lane, self.order, self.epoch = ticket.key, ticket.lane, order, epoch
        self.tokens, self.prompt_len = list(ticket.prompt), len(ticket.prompt)
        self.limit, self.chooser, self.answer = ticket.limit, ticket.chooser, ticket.answer
        self.alone, self.scope, self.group = ticket.alone, ticket.scope, ticket.group
        self.lookup = Lookup()
        self.done = 0
        self.passed = 0
        """How many of its lane that were behind it entered while it waited."""
        self.seq: int | None = None
        self.started = self.parked = self.reused = False

    @property
    def answered(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.prompt_len

    def candidate(self) -> Candidate:
        """As the planner sees it."""
        left = len(self.tokens) - self.done
        return Candidate(
            key=self.key,
            lane=self.lane,
            order=self.order,
            left=min(left, self._fixed()) if self.alone else left,
            decoding=left == 1 and self.answered > 0,
            seq=self.seq,
            klass=self.klass,
            alone=self.alone,
        )

    def _fixed(self) -> int:
        # Cuts at the same places always; after it had to give way without being parked, its answer
        # is computed again as it was the first time, token by token.
        if self.done >= self.prompt_len:
            return 1
        return min(FIXED_CHUNK - self.done % FIXED_CHUNK, self.prompt_len - self.done)

    def chunk(self, seq: int, count: int) -> Chunk[C]:
        """Its next ``count`` rows."""
        upto = self.done + count
        return Chunk(
            key=self.key,
            seq=seq,
            start=self.done,
            tokens=self.tokens[self.done : upto],
            chooser=self.chooser if upto == len(self.tokens) else None,
        )

    def __lt__(self, other: Sequence[C]) -> bool:
        """Who enters first: by lane; those that had to make way; then by arrival, but lines of one
        epoch in the order of their tokens, so that neighbours begin alike. Those that have outgrown
        a class come as if they were new: more of them follow, and those that need the longer class
        from the start would never have their turn."""
        if self.lane != other.lane:
            return self.lane < other.lane
        made_way = self.started and not self.outgrown
        if made_way != (other.started and not other.outgrown):
            return made_way
        if made_way or self.lane is Lane.INTERACTIVE:
            return self.order < other.order
        if self.epoch != other.epoch:
            return self.epoch < other.epoch
        return (self.scope, self.tokens, self.order) < (other.scope, other.tokens, other.order)


def leave_the_line(waiting: list[Sequence[C]], sequence: Sequence[C]) -> None:
    """It enters: of its lane, it has passed those that were ahead of it and are left."""
    place = waiting.index(sequence)
    for ahead in waiting[:place]:
        ahead.passed += ahead.lane is sequence.lane
    del waiting[place]
