"""When money may be spent: pure rules over what is spent, reserved and in flight.

A budget counts three things: what is booked this month, what batches have reserved, and what lines
and interactive requests in flight may cost. A batch that reserved its estimate counts with the
larger of its reservation and its lines in flight, so that nothing counts twice.

A line starts only where all that it may cost fits. An interactive request starts while anything is
left: how long its answer gets is seldom known, and somebody waits for it. What it may cost is in
flight from then on, so a budget is passed by the last request that it let in, never by a burst.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

from tidemill.errors import BudgetExceeded, QuotaExceeded, StorageQuotaExceeded
from tidemill.prices import shown
from tidemill.types import Purse, Record

Turn = Literal["held", "wait", "over", "closing"]
"""What a line that may cost something is told; see ``ports.Budgets.hold``."""

BYTES_PER_TOKEN = 4
"""A rule of thumb for English text; only the model's own tokenizer knows."""


def month(at: float) -> int:
    """The calendar month of a time, UTC.

    >>> month(0), month(1_764_547_200)
    (197001, 202512)
    """
    day = datetime.fromtimestamp(at, UTC)
    return day.year * 100 + day.month


class Position(Record, frozen=True, kw_only=True):
    """One limit, seen by one line that wants to start; all in micro-units."""

    limit: int
    spent: int
    """Booked."""
    reserved: int = 0
    """By other batches until they end: no settlement of a line in flight frees it."""
    in_flight: int = 0
    """What interactive requests in flight may cost, and other batches' lines beyond what their
    batches reserved."""
    own_reserved: int = 0
    """By the line's own batch."""
    own_in_flight: int = 0
    """What other lines of its batch may cost."""


def turn(position: Position, amount: int) -> Turn:
    """Whether a line that may cost ``amount`` can start within one limit.

    ::

        0 ├── spent ──┼─ reserved ─┼── in flight ──┼─ own ─┼─ amount ─┤ ≤ limit   held
        0 ├── spent ──┼─ reserved ─┼── max(own reserved, amount) ──┤   ≤ limit   wait
                                                               else              over
    """
    own = max(position.own_reserved, position.own_in_flight + amount)
    firm = position.spent + position.reserved
    if firm + position.in_flight + own <= position.limit:
        return "held"
    if firm + max(position.own_reserved, amount) <= position.limit:
        return "wait"
    return "over"


def begin(kind: str, position: Position) -> bool:
    """Whether an interactive request may start within one limit; False: not while what is in flight
    may use up the rest.

    Raises ``BudgetExceeded`` where the end of what is in flight would not help.
    """
    chance = turn(position, 1)
    if chance == "over":
        raise _used_up(kind, position.spent + position.reserved, position.limit)
    return chance == "held"


def _used_up(kind: str, used: int, budget: int) -> BudgetExceeded:
    return BudgetExceeded(
        f"The monthly budget of this {kind} is used up: {shown(used)} of {shown(budget)}. It "
        "begins anew with the next month (UTC)."
    )


def admit(purses: Sequence[Purse], *, hold: int = 0, lines: int = 0, tokens: int = 0) -> None:
    """Whether a new batch, or an interactive request that costs nothing, may begin.

    Raises ``BudgetExceeded`` when a budget is used up, or cannot take the reservation ``hold``, and
    ``QuotaExceeded`` when there are too many enqueued lines or tokens.
    """
    for purse in purses:
        limits = purse.limits
        used = purse.spent + purse.committed
        budget = limits.monthly_budget
        if budget is not None and used >= budget:
            raise _used_up(purse.kind, used, budget)
        if budget is not None and used + hold > budget:
            raise BudgetExceeded(
                f"The estimated cost of {shown(hold)} is more than what is left of the monthly "
                f"budget of this {purse.kind}: {shown(budget - used)} of {shown(budget)}."
            )
        _enqueue(purse, "line", purse.lines, lines, limits.enqueued_lines)
        _enqueue(purse, "token", purse.tokens, tokens, limits.enqueued_tokens)


def keep(stored: int, more: int, quota: int) -> None:
    """Whether an owner that keeps ``stored`` bytes of input files may keep ``more``.

    Raises ``StorageQuotaExceeded``.
    """
    if stored + more > quota:
        raise StorageQuotaExceeded(
            f"The file does not fit the storage quota: {stored} of {quota} bytes are used. Delete "
            "files that are no longer needed."
        )


def _enqueue(purse: Purse, what: str, now: int, more: int, limit: int | None) -> None:
    if limit is not None and more and now + more > limit:
        raise QuotaExceeded(
            f"Enqueued {what} limit reached for this {purse.kind}. Limit: {limit} enqueued "
            f"{what}s; {now} are enqueued and the batch has {more}. Please try again once some "
            "in_progress batches have been completed.",
            code=f"{what}_limit_exceeded",
        )
