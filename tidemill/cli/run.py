"""``tidemill run``: a file in, a file out."""

from __future__ import annotations

import filecmp
import json
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from tidemill import clock, models
from tidemill.cli import answers, options
from tidemill.cli.batches import judge
from tidemill.cli.check import problems_shown
from tidemill.cli.child import ServerProcess, StartFailed
from tidemill.cli.screen import Exit, Failed, batch_bar, emit, program, rate, say
from tidemill.client import TidemillClient
from tidemill.lines import Splitter
from tidemill.settings import load
from tidemill.wire import ENDPOINTS, canonical_endpoint

# What an embedded server may be told; it listens on loopback only and lives as long as the run.
_EMBEDDED = (
    "storage_path",
    "drain_seconds",
    "engine",
    "model",
    "model_name",
    "embedding_model",
    "gpu_layers",
    "max_context_length",
    "max_decoding_length",
    "slots",
    "threads",
    "max_batch_file_bytes",
    "max_batch_requests",
)

_UNDER_WAY = ("validating", "in_progress", "finalizing")


@click.command()
@click.argument(
    "input_path", metavar="[INPUT.jsonl]", required=False, type=click.Path(path_type=Path)
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where the answers go.",
)
@click.option(
    "-e",
    "--errors",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where the failed lines go  [default: beside the output, as NAME.errors.jsonl]",
)
@click.option("--resume", metavar="BATCH", help="Go on with this batch instead of a new one.")
@click.option(
    "--endpoint",
    type=click.Choice(ENDPOINTS),
    help="The batch's endpoint  [default: the url of the first line]",
)
@click.option("--strict", is_flag=True, help="Exit with 1 when any line failed.")
@click.option("--show", is_flag=True, help="Print the answers as a table.")
@click.option("--poll-interval", type=float, default=0.5, show_default=True, metavar="SECONDS")
@options.url(None)
@options.api_key
@options.as_json
@options.config
@options.setting_flags(_EMBEDDED)
def run(
    input_path: Path | None,
    output: Path,
    errors: Path | None,
    resume: str | None,
    endpoint: str | None,
    strict: bool,
    show: bool,
    poll_interval: float,
    url: str | None,
    api_key: str | None,
    as_json: bool,
    config: Path | None,
    **flags: Any,
) -> None:
    """Answer a file here or at --url.

    Every line of INPUT.jsonl is answered and the answers are written to the output file.

    With --url (or $TIDEMILL_URL) the server there does it. Without, a server is started here for
    the length of the run; its settings are those of 'tidemill serve'. What a run of the same file
    left unfinished in its store is gone on with.
    """
    if (input_path is None) == (resume is None):
        raise click.UsageError("Give an INPUT.jsonl, or --resume BATCH.")
    if input_path is not None and not input_path.is_file():
        raise click.UsageError(f"There is no file {input_path}.")
    if errors is None:
        errors = _beside(output)
    _keep_apart(input_path, output, errors)
    called_at = clock.now()
    with _server(url, api_key, config, flags) as (client, store):
        began = clock.monotonic()
        if store is not None and input_path is not None:
            resume = _unfinished(client, input_path, endpoint, called_at)
        batch_id = resume or _create(client, input_path, endpoint, as_json)
        with _explained(batch_id, _again(output, errors, config, flags), url, store):
            before = (0, 0) if resume is None else _done(client.get_batch(resume))
            say(f"Batch {batch_id} {'at' if resume is None else 'goes on at'} {client.root}")
            with batch_bar(not as_json) as update:
                batch = client.wait_for_batch(batch_id, poll_interval, on_poll=update)
            seconds = clock.monotonic() - began
            failed = batch["status"] == "failed"
            written = [] if failed else client.save_results(batch, output, errors)
    if errors not in written:
        errors.unlink(missing_ok=True)  # what an earlier run left there is not this run's

    if as_json:
        emit({"batch": batch, "written": [str(path) for path in written], "seconds": seconds})
    else:
        if show:
            answers.show(written, answers.order(input_path) if input_path else [])
        _report(batch, before, seconds, output, errors, written, store)
    judge(batch, strict)


def _beside(output: Path) -> Path:
    return output.with_name(f"{output.stem}.errors{output.suffix or '.jsonl'}")


def _keep_apart(input_path: Path | None, output: Path, errors: Path) -> None:
    """Results are moved over what is there: that must be neither the input nor one another."""
    places = {"the answers": output.resolve(), "the failed lines": errors.resolve()}
    if input_path is not None:
        for what, place in places.items():
            if place == input_path.resolve():
                raise click.UsageError(f"{input_path} is the input; {what} need another file.")
    if len(set(places.values())) < len(places):
        raise click.UsageError(f"The answers and the failed lines cannot both go to {output}.")


@contextmanager
def _server(
    url: str | None, api_key: str | None, config: Path | None, flags: dict[str, Any]
) -> Iterator[tuple[TidemillClient, Path | None]]:
    """A client of the named server, or of one that lives inside this block; and its store."""
    if url is not None:
        given = [name for name, value in flags.items() if value is not None]
        if given:
            raise click.UsageError(
                f"'{given[0].replace('_', '-')}' is a setting of the server at {url}; "
                "it cannot be given together with --url."
            )
        with options.client(url, api_key) as client:
            yield client, None
        return

    loaded = load(flags, toml=config)
    store = Path(loaded.settings.storage_path)
    settings = {
        name: value for name, value in flags.items() if value is not None and name != "storage_path"
    }
    env = dict(os.environ)
    if config is not None:
        env["TIDEMILL_CONFIG"] = str(config)
    process = ServerProcess({**settings, "storage_path": store}, store / "server.log", env)
    say(f"Starting a server with {loaded.settings.model_name or _engine(loaded.settings)} …")
    try:
        base_url = process.start()
    except StartFailed as exc:
        code = Exit.USAGE if exc.code == Exit.USAGE else Exit.UNREACHABLE
        there = "; or send the file to that server with --url" if " in use by " in str(exc) else ""
        raise Failed(f"{exc}{there} (the server's log is {process.log})", code) from exc
    except KeyboardInterrupt:
        process.kill()
        raise
    try:
        key = api_key or loaded.settings.api_keys.split(",")[0] or None
        with TidemillClient(base_url, key, connection_retries=1) as client:
            yield client, store
    finally:
        _stop(process, loaded.settings.drain_seconds)


def _engine(settings: Any) -> str:
    if settings.engine != "llama":
        return str(settings.engine)
    return str(settings.model or ("its models" if settings.models else models.DEFAULT))


def _stop(process: ServerProcess, drain_s: float) -> None:
    try:
        process.stop(drain_s + 30)
    except KeyboardInterrupt:
        process.kill()
        raise


def _create(client: TidemillClient, path: Path | None, endpoint: str | None, as_json: bool) -> str:
    assert path is not None
    with problems_shown(client, as_json):
        file = client.upload_file(path)
    batch = client.create_batch(file["id"], endpoint or _endpoint_of(path))
    return str(batch["id"])


def _unfinished(
    client: TidemillClient, path: Path, endpoint: str | None, called_at: int
) -> str | None:
    """The batch of this very file that a run left in the store, so that the same command goes on
    with it; None: there is none. The server has gone on with it already, maybe to its end."""
    wanted = endpoint or _endpoint_of(path)
    for batch in client.list_batches(limit=100)["data"]:
        left = (batch["completed_at"] or 0) > called_at or batch["status"] in _UNDER_WAY
        if left and batch["endpoint"] == wanted and _is_file(client, batch, path):
            return str(batch["id"])
    return None


def _is_file(client: TidemillClient, batch: dict[str, Any], path: Path) -> bool:
    """True where the batch's input has the bytes of the file."""
    if client.get_file(batch["input_file_id"])["bytes"] != path.stat().st_size:
        return False
    with TemporaryDirectory() as folder:
        theirs = client.download_file(batch["input_file_id"], Path(folder) / "input")
        return filecmp.cmp(theirs, path, shallow=False)


def _endpoint_of(path: Path) -> str:
    """The url of the first line. A file that is not as it should be is the server's to explain."""
    splitter = Splitter()
    with path.open("rb") as file:
        while piece := file.read(64 * 1024):
            if texts := splitter.feed(piece):
                break
        else:
            texts = splitter.finish()
    try:
        url = json.loads(texts[0].data)["url"]
        return canonical_endpoint(url) or ENDPOINTS[0]
    except (IndexError, KeyError, TypeError, ValueError, AttributeError):
        return ENDPOINTS[0]


def _again(
    output: Path, errors: Path, config: Path | None, flags: dict[str, Any]
) -> tuple[str, str]:
    """Words of the command line that hold for another command, too: where results go, and what the
    server was told. Another model would fail the lines that are left."""
    places = ["-o", str(output)]
    if errors != _beside(output):
        places += ["-e", str(errors)]
    told = [] if config is None else ["--config", str(config)]
    for name, value in flags.items():
        if value is not None and name != "storage_path":
            told += ["--" + name.replace("_", "-"), str(value)]
    return shlex.join(places), "".join(" " + word for word in map(shlex.quote, told))


@contextmanager
def _explained(
    batch_id: str, words: tuple[str, str], url: str | None, store: Path | None
) -> Iterator[None]:
    """On Ctrl-C: what becomes of the batch, and how to go on or to cancel."""
    try:
        yield
    except KeyboardInterrupt:
        places, told = words
        me = program()
        resume = f"{me} run --resume {batch_id} {places}"
        if store is None:
            say(f"\nInterrupted. Batch {batch_id} goes on at {url}.")
            say(f"  watch it:        {me} batches watch {batch_id} --url {url}")
            say(f"  get its results: {resume} --url {url}")
            say(f"  cancel it:       {me} batches cancel {batch_id} --url {url}")
        else:
            say(f"\nInterrupted. Finished lines of {batch_id} are kept in {store}; lines in flight")
            say("may finish now (Ctrl-C again stops at once).")
            at = f"--storage-path {shlex.quote(str(store))}{told}"
            say(f"  go on:     {resume} {at}")
            say(f"  cancel it: {me} serve {at}, and elsewhere {me} batches cancel {batch_id}")
        raise


def _done(batch: dict[str, Any]) -> tuple[int, int]:
    """Lines that have ended, and tokens that were generated for them."""
    counts, usage = batch["request_counts"], batch.get("usage") or {}
    return counts["completed"] + counts["failed"], usage.get("output_tokens", 0)


def _report(
    batch: dict[str, Any],
    before: tuple[int, int],
    seconds: float,
    output: Path,
    errors: Path,
    written: list[Path],
    store: Path | None,
) -> None:
    counts = batch["request_counts"]
    # What was done before a resume is no work of these seconds.
    lines, tokens = (now - then for now, then in zip(_done(batch), before, strict=True))
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    speed = (
        f" in {seconds:.1f} s: {rate(lines, seconds):.1f} lines/s, "
        f"{rate(tokens, seconds):.0f} tokens/s generated ({tokens} tokens)"
    )
    say(
        f"{counts['completed']} of {counts['total']} lines answered{failed}"
        f"{speed if lines else ', all before'}."
    )
    if output in written:
        say(f"  answers:          {output}")
    if errors in written:
        say(f"  failed lines:     {errors}")
    if store is not None:
        say(f"  incremental file: {store / 'incremental' / batch['id']}.jsonl")
        say(f"  server log:       {store / 'server.log'}")
