"""What the commands print: exit codes, JSON, tables and the progress bar."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tidemill import clock


class Exit(IntEnum):
    """Exit codes; docs/reference/cli.md explains them."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    INTERNAL = 70
    INTERRUPTED = 130


class Failed(click.ClickException):
    """The work did not succeed: one sentence and an exit code."""

    def __init__(self, message: str, code: Exit = Exit.FAILED) -> None:
        super().__init__(message)
        self.code = code


def out() -> Console:
    """Standard output, for what was asked for."""
    return Console(highlight=False, markup=False, emoji=False)


def say(message: str) -> None:
    """A remark on standard error, so that standard output stays clean for pipes."""
    click.echo(message, err=True)


def program() -> str:
    """How this command was called, for advice that is to be pasted: an environment that is not
    active has it under its path only."""
    called = Path(sys.argv[0])
    known = called.name != "tidemill" or shutil.which("tidemill") is not None
    return "tidemill" if known else shlex.quote(str(called))


def emit(value: Any) -> None:
    """JSON for scripts, on standard output."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, right: str = "") -> None:
    """A table, or one tab-separated line per row where standard output is no terminal.

    ``right`` names the right-aligned columns, comma-separated.
    """
    if not sys.stdout.isatty():
        for row in rows:
            click.echo("\t".join(_plain(cell).replace("\n", " ") for cell in row))
        return
    grid = Table(box=None, header_style="bold", pad_edge=False)
    for number, column in enumerate(columns):
        cells = [_plain(row[number]) for row in rows]
        grid.add_column(
            column,
            overflow="fold",
            justify="right" if column in right.split(",") else "left",
            # One that is cut in two cannot be copied.
            no_wrap=any(cells) and all(_ID.fullmatch(cell) for cell in cells if cell),
        )
    for row in rows:
        grid.add_row(*(Text(_plain(cell)) for cell in row))
    out().print(grid)


def page(
    found: dict[str, Any],
    columns: Sequence[str],
    row: Callable[[dict[str, Any]], Sequence[Any]],
    *,
    as_json: bool,
    right: str = "",
) -> None:
    """A page of a list from the server, as ``table`` or as JSON, and how to go on after it."""
    if as_json:
        emit(found)
        return
    table(columns, [row(item) for item in found["data"]], right=right)
    if found["has_more"]:
        say(f"There are more: --after {found['last_id']}")


_ID = re.compile(r"(batch|file|key|team|user)[-_]\w+")

# Cells hold what models and strangers wrote: it must not steer the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def _plain(cell: Any) -> str:
    return "" if cell is None else _CONTROL.sub("\ufffd", str(cell).replace("\t", " "))


def pairs(value: dict[str, Any]) -> None:
    """One object, a field per line: those that have a value, times as a person reads them."""
    table(
        ("field", "value"),
        [(name, _short(name, item)) for name, item in value.items() if item is not None],
    )


def _short(name: str, item: Any) -> Any:
    if name.endswith("_at") and isinstance(item, int):
        return when(item)
    return json.dumps(item, ensure_ascii=False) if isinstance(item, dict | list) else item


def problem_table(problems: Sequence[dict[str, Any]]) -> None:
    """What is wrong with an input file, a problem per row."""
    table(
        ("line", "code", "param", "problem"),
        [(p.get("line"), p["code"], p.get("param"), p["message"]) for p in problems],
        right="line",
    )


def when(at: int | None) -> str:
    """Epoch seconds as UTC, to the second."""
    return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def rate(amount: float, seconds: float) -> float:
    """Per second; 0 where no time has passed."""
    return amount / seconds if seconds > 0 else 0.0


@contextmanager
def batch_bar(show: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A progress bar with lines/s and tokens/s, from the first poll on.

    Yields the function that wants to be told of each poll.
    """
    progress = Progress(
        TextColumn("{task.description:<11}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("lines"),
        TextColumn("{task.fields[lines]:.1f} lines/s  {task.fields[tokens]:.0f} tokens/s"),
        TimeElapsedColumn(),
        console=Console(stderr=True, highlight=False),
        disable=not show,
    )
    line = progress.add_task("waiting", total=None, lines=0.0, tokens=0.0)
    first: list[tuple[float, int, int]] = []

    def update(batch: dict[str, Any]) -> None:
        counts = batch["request_counts"]
        done = counts["completed"] + counts["failed"]
        tokens = (batch.get("usage") or {}).get("output_tokens", 0)
        if not first:
            progress.start()
            first.append((clock.monotonic(), done, tokens))
        began, done_then, tokens_then = first[0]
        elapsed = clock.monotonic() - began
        progress.update(
            line,
            description=batch["status"],
            completed=done,
            total=counts["total"] or None,
            lines=rate(done - done_then, elapsed),
            tokens=rate(tokens - tokens_then, elapsed),
        )

    try:
        yield update
    finally:
        if first:
            progress.stop()
