"""``tidemill settings``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tidemill.cli import options
from tidemill.cli.screen import emit, table
from tidemill.settings import Row, load, rows


@click.command()
@options.config
@options.as_json
def settings(config: Path | None, as_json: bool) -> None:
    """Show the effective settings.

    Each with its value and where that comes from; secrets are masked.
    """
    loaded = load(toml=config)
    shown = [(row, masked(row, getattr(loaded.settings, row.name))) for row in rows()]
    if as_json:
        emit(
            {
                row.name: {"value": value, "source": loaded.sources[row.name], "env": row.env}
                for row, value in shown
            }
        )
        return
    table(
        ("setting", "value", "unit", "source", "flag"),
        [
            (row.name, value, row.unit, loaded.sources[row.name], row.flags[0])
            for row, value in shown
        ],
    )


def masked(row: Row, value: Any) -> Any:
    """The value, or for a secret only whether there is one."""
    return "********" if row.secret and value else value
