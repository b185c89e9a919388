"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import click

from tidemill.client import TidemillClient
from tidemill.settings import Row, rows

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_URL = "http://127.0.0.1:10900"

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
config = click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Settings file  [default: $TIDEMILL_CONFIG, else ./tidemill.toml where it exists]",
)


def url(default: str | None) -> Callable[[F], F]:
    """``--url``, with or without a default."""
    return click.option(
        "--url",
        envvar="TIDEMILL_URL",
        default=default,
        show_default=default is not None,
        show_envvar=True,
        help="Server, with or without /v1.",
    )


api_key = click.option(
    "--api-key", envvar="TIDEMILL_API_KEY", show_envvar=True, help="Key for that server."
)


def server(function: F) -> F:
    """``--url`` and ``--api-key`` for commands that talk to a running server."""
    return url(DEFAULT_URL)(api_key(function))


def paged(one: str, several: str, limit: int) -> Callable[[F], F]:
    """``--limit`` and ``--after`` for commands that list ``several`` of something."""

    def decorate(function: F) -> F:
        after = click.option("--after", metavar="ID", help=f"Go on after this {one}.")
        return click.option(
            "--limit", type=int, default=limit, show_default=True, help=f"Most {several} to show."
        )(after(function))

    return decorate


def client(url: str, api_key: str | None) -> TidemillClient:
    """A client that gives up on a dead server within a second or so: somebody is watching."""
    try:
        return TidemillClient(url, api_key, connection_retries=1)
    except ValueError as exc:
        raise click.BadParameter(f"{exc}.", param_hint="--url") from exc


def setting_flags(names: Collection[str] | None = None) -> Callable[[F], F]:
    """One option per setting (all, or those named). Values stay text: settings check them."""

    def decorate(function: F) -> F:
        for row in reversed(rows()):
            if names is None or row.name in names:
                function = _flag(row)(function)
        return function

    return decorate


def _flag(row: Row) -> Callable[[F], F]:
    default = "none" if row.default == "" else row.default
    unit = f" {row.unit}" if row.unit and row.default != "" else ""
    help = f"{row.help}  [{row.env}; default: {default}{unit}]"
    if row.type == "bool":
        name = row.flags[0]
        return click.option(f"{name}/--no-{name[2:]}", row.name, default=None, help=help)
    metavar = f"[{'|'.join(row.choices)}]" if row.choices else row.type.upper()

    def complete(ctx: click.Context, param: click.Parameter, begun: str) -> list[str]:
        return [choice for choice in row.choices if choice.startswith(begun)]

    return click.option(
        *row.flags, row.name, default=None, metavar=metavar, help=help, shell_complete=complete
    )
