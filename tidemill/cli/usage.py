"""``tidemill usage`` and ``tidemill audit``: what was used, and who did what."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from tidemill import clock, reports
from tidemill.cli import options
from tidemill.cli.office import on_office
from tidemill.cli.screen import emit, out, table, when
from tidemill.types import UsageSum

NUMBERS = ("requests", "input_tokens", "output_tokens", "cost")
BAR = "▏▎▍▌▋▊▉█"
BAR_CELLS = 24
"""At most; at least ``BAR_CELLS_LEAST``, or there is none: a bar in two lines tells nothing."""
BAR_CELLS_LEAST = 4
GAP = 2


@click.command()
@click.option("--since", metavar="DAY", help="First day, UTC  [default: the month's first]")
@click.option("--until", metavar="DAY", help="Last day, UTC  [default: today]")
@click.option("--by", metavar="WHAT,…", help=f"Of {', '.join(reports.GROUPINGS)}.")
@click.option("--owner", help="Only this owner's.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@options.config
@options.setting_flags(("storage_path",))
@options.as_json
def usage(
    since: str | None,
    until: str | None,
    by: str | None,
    owner: str | None,
    as_csv: bool,
    config: Path | None,
    storage_path: str | None,
    as_json: bool,
) -> None:
    """Tokens and cost by day and model, or by what you name; a bar shows the share of the cost.

    Works on the store, also while a server runs on it.
    """
    try:
        query = reports.query(since=since, until=until, by=by, owner=owner, now=clock.now())
    except ValueError as exc:
        raise click.UsageError(f"{exc}.") from None
    sums = on_office(config, storage_path, lambda office: office.ledger.report(query))
    if as_csv:
        click.echo(reports.as_csv(query.by, sums), nl=False)
    elif as_json:
        emit(reports.rows(sums))
    else:
        show(query.by, sums)


def show(by: Sequence[str], sums: Sequence[UsageSum]) -> None:
    """The sums as a table, for a person with a bar per row."""
    columns = (*by, *NUMBERS)
    rows = [[row[name] for name in columns] for row in reports.rows(sums)]
    bars = _bars(sums, _room(columns, rows)) if sys.stdout.isatty() else []
    table(
        (*columns, *(["share"] if bars else [])),
        [(*row, *bars[n : n + 1]) for n, row in enumerate(rows)],
        right=",".join(NUMBERS),
    )


def _room(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> int:
    """Cells of a line that the other columns leave for a bar."""
    widths = (max(len(str(cell)) for cell in column) for column in zip(columns, *rows, strict=True))
    return out().width - sum(width + GAP for width in widths)


def _bars(sums: Sequence[UsageSum], room: int) -> list[str]:
    """A bar per row: its share of the cost, or of the tokens where nothing costs anything. None
    where there is no room for them."""
    if room < BAR_CELLS_LEAST:
        return []
    values = [one.cost for one in sums]
    if not any(values):
        values = [one.usage.input + one.usage.output for one in sums]
    most = max(values, default=0)
    return [_bar(value, most, min(room, BAR_CELLS)) for value in values]


def _bar(value: int, most: int, cells: int) -> str:
    """A bar in eighths of a cell.

    >>> _bar(1, 2, 8), _bar(0, 2, 8), _bar(1, 1000, 8)
    ('████', '', '▏')
    """
    eighths = -(-value * cells * 8 // most) if most else 0
    whole, rest = divmod(eighths, 8)
    return BAR[-1] * whole + (BAR[rest - 1] if rest else "")


@click.command()
@click.option("--object", "about", metavar="ID", help="Only what concerns this id.")
@click.option("--after", type=click.IntRange(min=0), default=0, help="Go on after this number.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=1000, show_default=True)
@options.config
@options.setting_flags(("storage_path",))
@options.as_json
def audit(
    about: str | None,
    after: int,
    limit: int,
    config: Path | None,
    storage_path: str | None,
    as_json: bool,
) -> None:
    """Who created, cancelled, changed, revoked or deleted what, oldest first."""
    entries = on_office(
        config,
        storage_path,
        lambda office: office.audit.page(after=after, limit=limit, object=about),
    )
    if as_json:
        emit([msgspec.to_builtins(entry) for entry in entries])
        return
    rows: list[tuple[Any, ...]] = [
        (e.seq, when(e.at), e.actor, e.action, e.object, e.owner, e.request_id) for e in entries
    ]
    table(("no", "when", "actor", "action", "object", "owner", "request"), rows, right="no")
    if len(entries) == limit and sys.stdout.isatty():
        out().print(f"There may be more: --after {entries[-1].seq}")
