"""``tidemill batches``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tidemill.cli import options
from tidemill.cli.screen import Failed, batch_bar, emit, page, pairs, say, when
from tidemill.wire import ENDPOINTS


@click.group()
def batches() -> None:
    """Batches on the server."""


@batches.command()
@click.argument("input_file_id")
@click.option("--endpoint", type=click.Choice(ENDPOINTS), default=ENDPOINTS[0], show_default=True)
@click.option("--max-decoding-length", type=int, metavar="TOKENS", help="For lines without one.")
@click.option("--temperature", type=float, help="For lines that give none.")
@click.option("--metadata", multiple=True, metavar="KEY=VALUE", help="May be given several times.")
@options.server
@options.as_json
def create(
    input_file_id: str,
    endpoint: str,
    max_decoding_length: int | None,
    temperature: float | None,
    metadata: tuple[str, ...],
    url: str,
    api_key: str | None,
    as_json: bool,
) -> None:
    """Create a batch of an uploaded file; prints its id."""
    wrong = next((pair for pair in metadata if "=" not in pair), None)
    if wrong is not None:
        raise click.BadParameter(f"{wrong!r} is not KEY=VALUE.", param_hint="--metadata")
    with options.client(url, api_key) as client:
        batch = client.create_batch(
            input_file_id,
            endpoint,
            max_decoding_length=max_decoding_length,
            temperature=temperature,
            metadata=dict(pair.split("=", 1) for pair in metadata) or None,
        )
    emit(batch) if as_json else click.echo(batch["id"])


@batches.command("list")
@options.paged("batch", "batches", 20)
@options.server
@options.as_json
def list_(limit: int, after: str | None, url: str, api_key: str | None, as_json: bool) -> None:
    """List batches, newest first."""
    with options.client(url, api_key) as client:
        found = client.list_batches(limit=limit, after=after)
    page(
        found,
        ("batch", "status", "done", "failed", "total", "created", "model"),
        lambda batch: (
            batch["id"],
            batch["status"],
            batch["request_counts"]["completed"],
            batch["request_counts"]["failed"],
            batch["request_counts"]["total"],
            when(batch["created_at"]),
            batch.get("model"),
        ),
        as_json=as_json,
        right="done,failed,total",
    )


@batches.command()
@click.argument("batch_id")
@options.server
@options.as_json
def show(batch_id: str, url: str, api_key: str | None, as_json: bool) -> None:
    """Show one batch."""
    with options.client(url, api_key) as client:
        batch = client.get_batch(batch_id)
    emit(batch) if as_json else pairs(batch)


@batches.command()
@click.argument("batch_id")
@options.server
@options.as_json
def cancel(batch_id: str, url: str, api_key: str | None, as_json: bool) -> None:
    """Cancel a batch. Lines in flight finish and are kept."""
    with options.client(url, api_key) as client:
        batch = client.cancel_batch(batch_id)
    emit(batch) if as_json else say(f"Batch {batch_id} is {batch['status']}.")


@batches.command()
@click.argument("batch_id")
@click.option("--follow", is_flag=True, help="Wait for further rows until the batch has ended.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write here instead."
)
@options.server
def results(
    batch_id: str, follow: bool, output: Path | None, url: str, api_key: str | None
) -> None:
    """Print the result rows as JSON lines, answers and failures alike, also while it runs."""
    with (
        options.client(url, api_key) as client,
        click.open_file(str(output) if output else "-", "wb") as file,
    ):
        for row in client.results(batch_id, follow=follow):
            file.write(row + b"\n")
            file.flush()


@batches.command()
@click.argument("batch_id")
@click.option("--strict", is_flag=True, help="Exit with 1 when any line failed.")
@click.option("--poll-interval", type=float, default=1.0, show_default=True, metavar="SECONDS")
@options.server
@options.as_json
def watch(
    batch_id: str,
    strict: bool,
    poll_interval: float,
    url: str,
    api_key: str | None,
    as_json: bool,
) -> None:
    """Show a batch's progress until it has ended; the exit code says how."""
    with options.client(url, api_key) as client, batch_bar(not as_json) as update:
        batch = client.wait_for_batch(batch_id, poll_interval, on_poll=update)
    if as_json:
        emit(batch)
    else:
        for name in ("output_file_id", "error_file_id"):
            if batch.get(name):
                click.echo(f"{name}\t{batch[name]}")
    judge(batch, strict)


def judge(batch: dict[str, Any], strict: bool) -> None:
    """Raise ``Failed`` where the exit code must not be 0: the batch did not complete, or with
    ``strict`` a line failed."""
    if batch["status"] != "completed":
        problems = (batch.get("errors") or {}).get("data") or []
        why = f": {problems[0]['message']}" if problems else ""
        raise Failed(f"Batch {batch['id']} is {batch['status']}{why}")
    failed = batch["request_counts"]["failed"]
    if strict and failed:
        raise Failed(f"{failed} lines of batch {batch['id']} failed")
