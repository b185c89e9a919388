"""Writes what pages take from the code: settings, errors, commands, exit codes, metrics, files.

``make docs`` runs it; a test fails when a page is not what it would write. Each page is prose with
marked parts::

    <!-- begin NAME -->
    ... written by the function of that name below ...
    <!-- end NAME -->
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import click
from prometheus_client import Counter, Gauge, Histogram

from tidemill import errors, telemetry
from tidemill.cli import cli
from tidemill.cli.screen import Exit
from tidemill.settings import rows

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGES = ("settings.md", "errors.md", "cli.md", "metrics.md", "../architecture.md")
ROOMS = ("tidemill", "handlers", "backends", "scheduler", "storage", "native")


def settings() -> Iterator[str]:
    """One row per setting."""
    yield "| setting | default | unit | flag | environment | meaning |"
    yield "|---|---|---|---|---|---|"
    for row in rows():
        flags = ", ".join(f"`{flag}`" for flag in row.flags)
        env = ", ".join(f"`{name}`" for name in (row.env, *row.aliases))
        choices = f" One of {', '.join(f'`{c}`' for c in row.choices)}." if row.choices else ""
        secret = " Secret: never shown." if row.secret else ""
        default = f"`{row.default}`" if row.default != "" else "none"
        yield (
            f"| `{row.name}` | {default} | {row.unit} | {flags} | {env} "
            f"| {row.help}{choices}{secret} |"
        )


def error_classes() -> list[type[errors.TidemillError]]:
    """Every error that is answered in the envelope, in the order of the source."""
    return [
        item
        for item in vars(errors).values()
        if inspect.isclass(item) and issubclass(item, errors.TidemillError)
    ]


def error_table() -> Iterator[str]:
    """One row per error class."""
    yield "| error | HTTP status | type | code | retried by the SDKs | when, and what to do |"
    yield "|---|---|---|---|---|---|"
    for item in error_classes():
        meaning = " ".join((item.__doc__ or "").split()).replace("``", "`")
        yield (
            f"| `{item.__name__}` | {item.status} | `{item.type}` | `{item.code or 'null'}` "
            f"| {_retried(item)} | {meaning} |"
        )


def _retried(item: type[errors.TidemillError]) -> str:
    if item.should_retry is not None:
        return "yes" if item.should_retry else "no (`x-should-retry: false`)"
    return "yes" if item.status in (408, 409, 429) or item.status >= 500 else "no"


def metrics() -> Iterator[str]:
    """One row per metric, under the name that a scrape has."""
    yield "| metric | type | labels | meaning |"
    yield "|---|---|---|---|"
    for item in vars(telemetry).values():
        if isinstance(item, Counter | Gauge | Histogram):
            family = next(iter(item.collect()))
            total = "_total" if family.type == "counter" else ""
            labels = ", ".join(f"`{label}`" for label in item._labelnames)
            yield f"| `{family.name}{total}` | {family.type} | {labels} | {family.documentation} |"


def files() -> Iterator[str]:
    """One row per file, by folder, in its own first sentence."""
    for room in ROOMS:
        paths = [
            path
            for path in sorted((ROOT / room).rglob("*.py"), key=lambda path: (path.parent, path))
            if not any(parent.is_symlink() for parent in path.parents) and path.read_bytes()
        ]
        for folder, inside in groupby(paths, lambda path: path.parent):
            yield f"### `{folder.relative_to(ROOT)}/`"
            yield ""
            for path in inside:
                text = inspect.cleandoc(ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "")
                first = re.split(
                    r"(?<!e\.g\.)(?<=[.?])\s", " ".join(text.split("\n\n")[0].split())
                )[0]
                yield f"- `{path.name}`: {first.rstrip('.:').replace('``', '`')}"
            yield ""


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command with its full name, groups before their commands."""

    def walk(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        yield name, command
        if isinstance(command, click.Group):
            for child in command.commands.values():
                yield from walk(f"{name} {child.name}", child)

    yield from walk("tidemill", cli)


def command_reference() -> Iterator[str]:
    """Usage, text and options of every command."""
    pipe, bracket = r"\|", r"\["
    root = click.Context(cli, **cli.context_settings)
    for name, command in commands():
        if name == "tidemill" or isinstance(command, click.Group):
            continue
        # As the command line makes it: what the root sets (`-h`) holds below it.
        context = click.Context(command, info_name=name, parent=root)
        usage = " ".join(command.collect_usage_pieces(context))
        yield f"### `{name}`"
        yield ""
        yield f"    {name} {usage}"
        yield ""
        yield inspect.cleandoc(command.help or "")
        yield ""
        if name == "tidemill serve":
            yield "`--config` names a settings file. Every other option is a setting: see"
            yield "[settings](settings.md)."
            yield ""
            continue
        yield "| option | meaning |"
        yield "|---|---|"
        for parameter in command.get_params(context):
            if isinstance(parameter, click.Option) and not parameter.hidden:
                record = parameter.get_help_record(context)
                if record is not None:
                    option, meaning = (" ".join(part.split()) for part in record)
                    yield f"| `{option.replace('|', pipe)}` | {meaning.replace('[', bracket)} |"
        yield ""


EXITS = {
    Exit.OK: "The work is done.",
    Exit.FAILED: "The work failed: the server refused, a batch did not complete, `check` found a "
    "problem, or with `--strict` a line failed.",
    Exit.USAGE: "A wrong command line or a bad setting; the sentence names it.",
    Exit.UNREACHABLE: "The server cannot be reached, or the embedded one did not start.",
    Exit.INTERNAL: "A defect of Tidemill; `tidemill --traceback …` shows where.",
    Exit.INTERRUPTED: "Ctrl-C.",
}


def exit_codes() -> Iterator[str]:
    """One row per exit code."""
    yield "| code | meaning |"
    yield "|---|---|"
    for code in Exit:
        yield f"| {code.value} | {EXITS[code]} |"


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "settings": settings,
    "errors": error_table,
    "commands": command_reference,
    "exit codes": exit_codes,
    "metrics": metrics,
    "files": files,
}
_PART = re.compile(r"(<!-- begin (?P<name>[a-z ]+) -->\n).*?(<!-- end (?P=name) -->)", re.DOTALL)


def render(page: str) -> str:
    """A page's text with its parts written anew. Raises ``KeyError`` for an unknown part."""
    return _PART.sub(lambda m: m[1] + "\n".join(PARTS[m["name"]]()).rstrip() + "\n" + m[3], page)


def main() -> int:
    """Write what has changed; 0 always."""
    for name in PAGES:
        path = HERE / name
        text = path.read_text("utf-8")
        if (new := render(text)) != text:
            path.write_text(new, "utf-8")
            print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
