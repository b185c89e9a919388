"""A small deterministic engine that checks every promise the loop makes to it."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable

from tidemill.errors import TidemillError
from tidemill.scheduler.loop import Chunk, Fate, Loop, Observation, Sampled, Ticket
from tidemill.scheduler.plan import Limits
from tidemill.types import FinishReason, Lane

BYTES = 8
"""Of a token in a saved state."""


def successor(tokens: list[int]) -> int:
    """The model of these tests: the next token depends on all that came before."""
    return 1 + (sum((i + 1) * t for i, t in enumerate(tokens)) % 97)


def parrot(tokens: list[int]) -> int:
    """A model that copies: it goes round in circles of 5 tokens, which change now and then, and now
    and then it says what it never said."""
    n = len(tokens)
    if n % 11 == 0:
        return successor(tokens)
    return 20 + n % 5 + n // 40


class Arithmetic:
    """An engine that remembers tokens per sequence id, and refuses what llama.cpp would abort on.

    ``fates`` are what the next steps do instead of computing; ``room`` is how many tokens it can
    remember over all ids.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        room: int = 10**9,
        parks: bool = True,
        reuses: bool = False,
        model: Callable[[list[int]], int] = successor,
    ) -> None:
        self.model = model
        self.limits, self.room, self.parks, self.reuses = limits, room, parks, reuses
        self.fates: list[Fate] = []
        self.memory: dict[int, list[int]] = {}
        self.steps: list[list[Chunk[str]]] = []
        self.closed = False
        self.interrupts = 0

    def step(self, chunks: list[Chunk[str]]) -> Observation:
        assert chunks
        rows = sum(len(c.tokens) + len(c.drafts) for c in chunks)
        seqs = [c.seq for c in chunks]
        assert seqs == sorted(set(seqs))
        [klass] = {self.limits.class_of(seq) for seq in seqs}
        ids, context = self.limits.ids[klass], self.limits.classes[klass].context
        assert rows <= self.limits.rows - self.limits.slots + len(ids)
        assert all(c.start + len(c.tokens) + len(c.drafts) <= context for c in chunks)
        self.steps.append(chunks)
        fate: Fate = self.fates.pop(0) if self.fates else "done"
        needed = sum(len(m) for m in self.memory.values()) + rows
        if fate == "interrupted":
            return Observation(fate=fate)
        if fate == "no_room" or needed > self.room:
            return Observation(fate="no_room")
        if fate == "lost":
            for seq in ids:
                self.memory.pop(seq, None)
            return Observation(fate="lost", reason="as told")
        sampled = {}
        for chunk in chunks:
            known = self.memory.setdefault(chunk.seq, [])
            if fate == "aborted":
                known.append(-1)  # undefined: nobody may build on it
                continue
            assert len(known) == chunk.start, "positions must follow on"
            known.extend(chunk.tokens)
            if chunk.chooser is not None:
                sampled[chunk.key] = self._choose(known, chunk.drafts)
                known.extend(chunk.drafts)
        return Observation(fate=fate, sampled=sampled if fate == "done" else {})

    def _choose(self, known: list[int], drafts: list[int]) -> list[Sampled]:
        chosen = []
        for draft in [*drafts, None]:
            token = self.model([*known, *drafts[: len(chosen)]])
            end = token % 13 == 0
            chosen.append(Sampled(token=token, piece=bytes([token]), end=end))
            if end or token != draft:
                break
        return chosen

    def interrupt(self) -> None:
        self.interrupts += 1

    def forget(self, seq: int) -> None:
        self.memory.pop(seq, None)

    def state_size(self, seq: int) -> int:
        return BYTES * len(self.memory[seq]) if self.parks else 0

    def save(self, seq: int, to: memoryview) -> int:
        to[:] = array("q", self.memory[seq]).tobytes()
        return len(to)

    def load(self, seq: int, state: memoryview) -> bool:
        assert not self.memory.get(seq)
        self.memory[seq] = array("q", bytes(state)).tolist()
        self._fits(seq)
        return True

    def trim(self, seq: int, length: int) -> None:
        assert self.reuses
        del self.memory[seq][length:]

    def copy(self, source: int, to: int) -> bool:
        assert self.reuses
        assert not self.memory.get(to)
        self.memory[to] = list(self.memory[source])
        self._fits(to)
        return True

    def _fits(self, seq: int) -> None:
        context = self.limits.classes[self.limits.class_of(seq)].context
        assert len(self.memory[seq]) <= context

    def close(self) -> None:
        self.closed = True


class Collected:
    """An answer that keeps what it gets, and checks the order of the calls."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.tokens: list[int] = []
        self.reason: FinishReason | None = None
        self.error: TidemillError | None = None
        self.cached = 0
        self.closed = False
        self.ended = threading.Event()
        self._stop_after = stop_after

    def reused(self, tokens: int) -> None:
        assert tokens > 0
        assert not self.cached
        self.cached = tokens

    def take(self, sampled: Sampled) -> FinishReason | None:
        assert not self.closed
        self.tokens.append(sampled.token)
        return "stop" if len(self.tokens) == self._stop_after else None

    def finish(self, reason: FinishReason) -> None:
        assert self.reason is None
        self.reason = reason

    def fail(self, error: TidemillError) -> None:
        self.error = error

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        self.ended.set()


def ticket(
    key: int,
    prompt: list[int],
    *,
    lane: Lane = Lane.BATCH,
    limit: int = 5,
    stop_after: int | None = None,
    alone: bool = False,
    scope: str = "",
    expected: int = 0,
) -> Ticket[str]:
    """A completion whose answer is ``Collected``."""
    return Ticket(
        key=key, lane=lane, prompt=prompt, limit=limit, chooser="next",
        answer=Collected(stop_after), alone=alone, scope=scope, expected=expected,
    )  # fmt: skip


def got(t: Ticket[str]) -> Collected:
    """The answer of a ticket."""
    assert isinstance(t.answer, Collected)
    return t.answer


def by_itself(
    t: Ticket[str], model: Callable[[list[int]], int] = successor
) -> tuple[list[int], FinishReason]:
    """What the model says to a prompt when nobody else is there."""
    tokens, out = list(t.prompt), list[int]()
    while True:
        token = model(tokens)
        if token % 13 == 0:
            return out, "stop"
        out.append(token)
        tokens.append(token)
        if len(out) == t.limit:
            return out, "length"


def drive(loop: Loop[str], tickets: list[Ticket[str]], turns: int = 10_000) -> None:
    """Submit tickets and turn the loop on this thread until every one has ended."""
    for t in tickets:
        loop.submit(t)
    finish(loop, tickets, turns)


def finish(loop: Loop[str], tickets: list[Ticket[str]], turns: int = 10_000) -> None:
    """Turn the loop on this thread until every ticket, submitted before, has ended."""
    for _ in range(turns):
        if all(got(t).closed for t in tickets):
            return
        loop._collect()
        loop.turn()
    raise AssertionError(f"not done after {turns} turns")


def left_over(loop: Loop[str]) -> int:
    """Logical slots in use and bytes parked, of a pool that adds up."""
    loop._slots.check()
    stats = loop._slots.stats
    return stats["used"] + stats["arena"]["used"]
