"""Usage reports: what may be asked for, and how sums are written."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any, get_args

from tidemill.prices import shown
from tidemill.types import Grouping, UsageQuery, UsageSum

GROUPINGS: tuple[Grouping, ...] = get_args(Grouping)
COLUMNS = (
    "requests",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "reasoning_tokens",
    "cost",
)


class BadQuery(ValueError):
    """One part of a query is wrong; ``param`` names it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def query(
    *, since: str | None, until: str | None, by: str | None, owner: str | None, now: int
) -> UsageQuery:
    """The rows of whole days, UTC: ``since`` up to and with ``until``, by default this month.

    ``by`` names groupings, comma-separated. Raises ``BadQuery`` with one sentence.
    """
    today = datetime.fromtimestamp(now, UTC).date()
    first = today.replace(day=1) if since is None else _day("since", since)
    last = today if until is None else _day("until", until)
    groups = [name.strip() for name in (by or "day,model").split(",") if name.strip()]
    for name in groups:
        if name not in GROUPINGS:
            raise BadQuery("group_by", f"'{name[:40]}' is not one of {', '.join(GROUPINGS)}")
    return UsageQuery(
        since_at=_begin(first),
        until_at=_begin(last + timedelta(days=1)),
        owner=owner,
        by=tuple(name for name in GROUPINGS if name in groups),
    )


def _day(param: str, text: str) -> date:
    try:
        day = date.fromisoformat(text)
        day + timedelta(days=1)
    except (ValueError, OverflowError):
        raise BadQuery(param, f"'{text[:40]}' is not a day like 2026-11-30") from None
    return day


def _begin(day: date) -> int:
    return int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp())


def rows(sums: Sequence[UsageSum]) -> list[dict[str, Any]]:
    """One flat object per sum; the cost is exact, as a text."""
    return [
        {
            **one.group,
            "requests": one.rows,
            "input_tokens": one.usage.input,
            "cached_tokens": one.usage.cached,
            "output_tokens": one.usage.output,
            "reasoning_tokens": one.usage.reasoning,
            "cost": shown(one.cost),
        }
        for one in sums
    ]


def as_csv(by: Sequence[Grouping], sums: Sequence[UsageSum]) -> str:
    """The same as CSV (RFC 4180) with a header line.

    A text that a spreadsheet would take for a formula begins with an apostrophe.
    """
    out = io.StringIO()
    writer = csv.DictWriter(out, [*by, *COLUMNS])
    writer.writeheader()
    for row in rows(sums):
        writer.writerow({name: _cell(value) for name, value in row.items()})
    return out.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in "=+-@\t\r" and value[:1]:
        return "'" + value
    return value
