"""``tidemill check``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec

from tidemill.cli import options
from tidemill.cli.screen import Failed, emit, problem_table, say, table, when
from tidemill.client import ApiError, TidemillClient
from tidemill.errors import InvalidFile, TidemillError
from tidemill.jsonl import Checker
from tidemill.settings import load
from tidemill.types import FileFacts, Problem

RATES = ("at batch rate", "at standard rate")
BYTES_PER_TOKEN = 4
"""A rule of thumb for English text; only the model's own tokenizer knows."""


@click.command()
@click.argument("input_path", metavar="INPUT.jsonl", type=click.Path(path_type=Path))
@click.option("--model", "models", multiple=True, help="A model that is served; others are wrong.")
@options.url(None)
@options.api_key
@options.config
@options.setting_flags(("max_batch_file_bytes", "max_batch_requests"))
@options.as_json
def check(
    input_path: Path,
    models: tuple[str, ...],
    url: str | None,
    api_key: str | None,
    config: Path | None,
    max_batch_file_bytes: str | None,
    max_batch_requests: str | None,
    as_json: bool,
) -> None:
    """Check an input file: without a server, or with --url by the server that it is for.

    Every problem is shown with its line number, and the exit code is 1. Token counts are
    estimates (bytes / 4). A server also says where the batch would run and why, what it would
    cost, whether there is money and room for it, and about when it would be done. It keeps
    nothing.
    """
    if url is not None:
        _ask(input_path, url, api_key, as_json)
        return
    limits = load(
        {"max_batch_file_bytes": max_batch_file_bytes, "max_batch_requests": max_batch_requests},
        toml=config,
    ).settings
    checker = Checker(
        limits.max_batch_file_bytes,
        limits.max_batch_requests,
        knows=(lambda name: name in models) if models else None,
    )
    try:
        facts = examine(input_path, checker)
    except InvalidFile as exc:
        _complain(input_path, exc.problems, as_json)
        return
    except TidemillError as exc:
        _complain(input_path, [Problem(code=exc.code or "error", message=exc.message)], as_json)
        return
    size = input_path.stat().st_size
    summary = {
        "lines": facts.lines,
        "models": list(facts.models),
        "endpoint": facts.endpoint,
        "bytes": size,
        "longest_line_bytes": facts.max_line_bytes,
        "estimated_prompt_tokens": size // BYTES_PER_TOKEN,
    }
    if as_json:
        emit({"ok": True, **summary, "problems": []})
        return
    table(
        ("", ""),
        [
            ("lines", facts.lines),
            ("models", ", ".join(facts.models)),
            ("endpoint", facts.endpoint),
            ("bytes", size),
            ("longest line", f"{facts.max_line_bytes} bytes"),
            ("prompt tokens", f"about {size // BYTES_PER_TOKEN} (estimate: bytes / 4)"),
        ],
    )


def _ask(path: Path, url: str, api_key: str | None, as_json: bool) -> None:
    """Let the server say what would become of the file."""
    with options.client(url, api_key) as client:
        found = client.preflight(path)
    if as_json:
        emit(found)
    elif found["problems"]:
        problem_table(found["problems"])
        with options.client(url, api_key) as client:
            hint(client, found["problems"])
    else:
        _report(found)
    if found["problems"]:
        n = len(found["problems"])
        raise Failed(f"{path} has {n} problem{'s' if n > 1 else ''}")
    if not found["ok"]:
        raise Failed(found["budget"]["message"].rstrip("."))


@contextmanager
def problems_shown(client: TidemillClient, as_json: bool) -> Iterator[None]:
    """Show every problem of a file that the server refuses inside this block; the error, which
    names the first, goes on."""
    try:
        yield
    except ApiError as exc:
        if exc.problems:
            _show(exc.problems, as_json)
            hint(client, exc.problems)
        raise


def hint(client: TidemillClient, problems: Sequence[dict[str, Any]]) -> None:
    """Where a model is wrong, say which ones are right."""
    if any(problem["code"] == "model_not_found" for problem in problems):
        try:
            names = ", ".join(model["id"] for model in client.list_models())
        except ApiError:
            return  # a key for batches alone may not ask; the problems are said already
        say(f"Models that {client.root} answers with: {names or 'none'}.")


def _report(found: dict[str, Any]) -> None:
    placement, cost = found["placement"], found["cost"]
    provider = placement["provider"]
    where = "here" if provider is None else f"at {provider}"
    reason = placement["reason"].removeprefix(f"{provider}: ")
    table(
        ("", ""),
        [
            ("lines", found["lines"]),
            ("endpoint", found["endpoint"]),
            ("would run", f"{where}: {reason}"),
            ("cost", f"about {cost['estimate']} {cost['currency']}"),
            *zip(RATES, (cost["batch"], cost["standard"]), strict=True),
            ("budget", "enough" if found["budget"]["ok"] else found["budget"]["message"]),
            ("done by", when(found["expected_finish_at"]) or "cannot be told"),
        ],
    )
    table(
        ("model", "lines", "prompt tokens", "which are", "answer tokens at most", *RATES),
        [
            (
                one["model"],
                one["lines"],
                one["input_tokens"],
                one["input_tokens_are"],
                one["output_tokens_at_most"],
                one["cost_batch"],
                one["cost_standard"],
            )
            for one in found["models"]
        ],
        right=",".join(("lines", "prompt tokens", "answer tokens at most", *RATES)),
    )


def examine(path: Path, checker: Checker) -> FileFacts:
    """Feed a file to a checker. Raises ``InvalidFile``, ``TooLarge`` and ``OSError``."""
    with path.open("rb") as file:
        while piece := file.read(1024 * 1024):
            checker.feed(piece)
    return checker.finish()[1]


def _complain(path: Path, problems: list[Problem] | tuple[Problem, ...], as_json: bool) -> None:
    _show([msgspec.to_builtins(problem) for problem in problems], as_json)
    n = len(problems)
    raise Failed(f"{path} has {n} problem{'s' if n > 1 else ''}")


def _show(problems: Sequence[dict[str, Any]], as_json: bool) -> None:
    emit({"ok": False, "problems": problems}) if as_json else problem_table(problems)
