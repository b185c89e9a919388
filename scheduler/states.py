"""The two state machines, as tables, and the pure functions over them.

Every transition in the store is conditional on the state that it leaves, and asks this file which
those are::

    validating ──► in_progress ──► finalizing ──► completed
        │   │          │  │  │          │
        │   │          │  │  └► failed ◄┘
        │   │          │  └► expiring ──► expired          (shown as finalizing)
        │   └──────────┴───► cancelling ──► cancelled
        └► failed
"""

from __future__ import annotations

from tidemill.types import TERMINAL, BatchStatus, LineState

B, L = BatchStatus, LineState

BATCH_MOVES: dict[BatchStatus, frozenset[BatchStatus]] = {
    B.VALIDATING: frozenset({B.IN_PROGRESS, B.FAILED, B.CANCELLING, B.EXPIRING}),
    B.IN_PROGRESS: frozenset({B.FINALIZING, B.FAILED, B.CANCELLING, B.EXPIRING}),
    B.FINALIZING: frozenset({B.COMPLETED, B.FAILED}),
    B.CANCELLING: frozenset({B.CANCELLED}),
    B.EXPIRING: frozenset({B.EXPIRED}),
    B.COMPLETED: frozenset(),
    B.FAILED: frozenset(),
    B.CANCELLED: frozenset(),
    B.EXPIRED: frozenset(),
}

LINE_MOVES: dict[LineState, frozenset[LineState]] = {
    L.QUEUED: frozenset({L.RUNNING, L.CANCELLED, L.EXPIRED}),
    L.RUNNING: frozenset({L.SUCCEEDED, L.FAILED, L.QUEUED}),
    L.SUCCEEDED: frozenset(),
    L.FAILED: frozenset(),
    L.CANCELLED: frozenset(),
    L.EXPIRED: frozenset(),
}

CANCELLABLE = frozenset(state for state, to in BATCH_MOVES.items() if B.CANCELLING in to)
OPEN = frozenset(BATCH_MOVES) - TERMINAL
LINE_ENDS = frozenset(state for state, to in LINE_MOVES.items() if not to)

STAMPS: dict[BatchStatus, str] = {
    B.IN_PROGRESS: "in_progress_at",
    B.FINALIZING: "finalizing_at",
    B.EXPIRING: "finalizing_at",
    B.COMPLETED: "completed_at",
    B.FAILED: "failed_at",
    B.EXPIRED: "expired_at",
    B.CANCELLING: "cancelling_at",
    B.CANCELLED: "cancelled_at",
}
"""The time field that entering a state fills in."""

DRAINED: dict[BatchStatus, BatchStatus] = {B.IN_PROGRESS: B.FINALIZING}
"""Where the settlement of the last line moves a batch, in the same commit."""

ENDS: dict[BatchStatus, BatchStatus] = {
    B.FINALIZING: B.COMPLETED,
    B.CANCELLING: B.CANCELLED,
    B.EXPIRING: B.EXPIRED,
}
"""Where a batch goes once no line of it is queued or running."""


def sources(to: BatchStatus) -> frozenset[BatchStatus]:
    """The states that may move to ``to``."""
    return frozenset(state for state, targets in BATCH_MOVES.items() if to in targets)


def allowed(frm: BatchStatus, to: BatchStatus) -> bool:
    """True when the batch table has the move."""
    return to in BATCH_MOVES[frm]


def allowed_line(frm: LineState, to: LineState) -> bool:
    """True when the line table has the move."""
    return to in LINE_MOVES[frm]
