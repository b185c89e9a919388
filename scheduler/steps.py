"""The words between the loop and an engine: tickets, chunks, observations, and who listens."""

from __future__ import annotations

from typing import Generic, Literal, Protocol, TypeVar

import msgspec

from tidemill.errors import TidemillError
from tidemill.scheduler.plan import Limits
from tidemill.types import ArenaStatus, FinishReason, Lane, TokenLogprob

C = TypeVar("C")
"""What the engine chooses the next token with; opaque to the loop."""


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """The token that was chosen for a sequence."""

    token: int
    piece: bytes = b""
    """Its text; may end within a character."""
    end: bool = False
    """True for an end-of-generation token, which is no part of the answer."""
    logprob: TokenLogprob | None = None


class Chunk(msgspec.Struct, Generic[C], frozen=True, kw_only=True):
    """Rows of one sequence in one step: ``tokens`` at positions ``start ..``, then ``drafts``."""

    key: int
    seq: int
    start: int
    tokens: list[int]
    chooser: C | None
    """None: no token is chosen after this chunk."""
    drafts: list[int] = []
    """Tokens that may be chosen next, computed ahead; only with a chooser. A token is chosen after
    ``tokens``; while it is the next draft and not the end, another one after that."""


Fate = Literal["done", "no_room", "interrupted", "aborted", "lost"]


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What a step did.

    ``no_room`` and ``interrupted``: nothing was computed, memory is as before. ``aborted``: the
    memory of the step's sequences is undefined. ``lost``: the engine threw all memory of the class
    away and is usable again; what was saved can still be loaded.
    """

    fate: Fate = "done"
    sampled: dict[int, list[Sampled]] = {}
    """By key, for each chunk with a chooser: all that were chosen, in order. All but the last are
    drafts, whose memory is there; the memory of drafts beyond them is to be trimmed."""
    reason: str = ""


class Engine(Protocol[C]):
    """Something that computes steps. All methods are called by one thread."""

    @property
    def limits(self) -> Limits: ...

    @property
    def reuses(self) -> bool:
        """True when ``copy`` and ``trim`` work on this model; else they are never called."""

    def step(self, chunks: list[Chunk[C]]) -> Observation:
        """Compute chunks of one class that are sorted by sequence id."""

    def interrupt(self) -> None:
        """Let the step that runs now end early, ``interrupted``, if that is possible and not too
        late. Called by other threads."""

    def forget(self, seq: int) -> None:
        """Drop the memory of a sequence id."""

    def trim(self, seq: int, length: int) -> None:
        """Drop the memory of a sequence id from position ``length`` on."""

    def copy(self, source: int, to: int) -> bool:
        """Give an id that has no memory what another one has, which has room for that; False: it
        could not."""

    def state_size(self, seq: int) -> int:
        """Bytes that ``save`` needs at most; 0: this memory cannot be saved now."""

    def save(self, seq: int, to: memoryview) -> int:
        """Write the memory of a sequence id; how many bytes that took, 0: it could not."""

    def load(self, seq: int, state: memoryview) -> bool:
        """Give an id without memory what was saved; False: it could not, and has none."""

    def close(self) -> None: ...


class AnswerSink(Protocol):
    """Receives one answer. Called by the engine's thread; must not block for long."""

    def reused(self, tokens: int) -> None:
        """So many tokens of the prompt were there already; called once, if any were."""

    def take(self, sampled: Sampled) -> FinishReason | None:
        """One more token; a reason when the answer is complete (a stop string matched)."""

    def finish(self, reason: FinishReason) -> None: ...

    def fail(self, error: TidemillError) -> None: ...

    def close(self) -> None:
        """Nothing more will come: after ``finish``, ``fail`` or a cancel."""


class Ticket(msgspec.Struct, Generic[C], kw_only=True, eq=False):
    """One completion to compute."""

    key: int
    lane: Lane
    prompt: list[int]
    """At least one token."""
    limit: int
    """Most tokens of the answer, at least one; prompt and answer fit the engine's longest class."""
    expected: int = 0
    """Tokens of the answer for which there should be room at the start. If more come, it moves to a
    longer class."""
    chooser: C
    answer: AnswerSink
    alone: bool = False
    """Computed in steps of its own, in fixed chunks, from nothing: the same numbers every time."""
    scope: str = ""
    """Prompts of one scope may share what was computed; others learn nothing of each other."""
    group: str = ""
    """Answers of one group, as of the lines of a batch, are likely to be drafted equally well."""


class Errands(Protocol):
    """Other work for the engine's thread, done one piece at a time between steps."""

    def pending(self) -> bool: ...

    def run_one(self, rows: int) -> None:
        """Do one piece of about as much work as ``rows`` rows of a step."""


class NoErrands:
    """An engine that only generates."""

    def pending(self) -> bool:
        return False

    def run_one(self, rows: int) -> None:
        """Nothing to do."""


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """Load and totals since the start."""

    active: int = 0
    waiting: int = 0
    parked: int = 0
    held: int = 0
    """What free sequence ids remember, and conversations put aside."""
    arena: ArenaStatus = ArenaStatus()
    tokens_generated: int = 0
    tokens_prefilled: int = 0
    """Prompt tokens that were computed."""
    tokens_reused: int = 0
    """Prompt tokens that were there already."""
    tokens_drafted: int = 0
    """Tokens that were looked up and computed ahead."""
    tokens_accepted: int = 0
    """Those of them that were then chosen."""
    parks: int = 0
    resumes: int = 0
    requeues: int = 0
    """Sequences that lost what was computed of them, and are computed again."""
    refused: int = 0
    """States for which the arena had no room."""


TOTALS = tuple(
    name
    for name in Gauges.__struct_fields__
    if name not in ("active", "waiting", "parked", "held", "arena")
)
"""The gauges that only grow. They go on over restarts of an engine, and over its unloading."""
