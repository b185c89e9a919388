"""``tidemill files``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from tidemill.cli import options
from tidemill.cli.check import problems_shown
from tidemill.cli.screen import emit, page, pairs, say, when


@click.group()
def files() -> None:
    """Input and result files on the server."""


@files.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--expires-after", type=int, metavar="SECONDS", help="Delete it so long after now.")
@options.server
@options.as_json
def upload(
    path: Path, expires_after: int | None, url: str, api_key: str | None, as_json: bool
) -> None:
    """Upload an input file; prints its id."""
    with options.client(url, api_key) as client, problems_shown(client, as_json):
        file = client.upload_file(path, expires_after_s=expires_after)
    emit(file) if as_json else click.echo(file["id"])


@files.command("list")
@options.paged("file", "files", 100)
@click.option("--purpose", help="Only files of this purpose: batch or batch_output.")
@options.server
@options.as_json
def list_(
    limit: int,
    after: str | None,
    purpose: str | None,
    url: str,
    api_key: str | None,
    as_json: bool,
) -> None:
    """List files, newest first."""
    with options.client(url, api_key) as client:
        found = client.list_files(limit=limit, after=after, purpose=purpose)
    page(
        found,
        ("file", "purpose", "bytes", "created", "expires", "name"),
        lambda file: (
            file["id"],
            file["purpose"],
            file["bytes"],
            when(file["created_at"]),
            when(file.get("expires_at")),
            file["filename"],
        ),
        as_json=as_json,
        right="bytes",
    )


@files.command()
@click.argument("file_id")
@options.server
@options.as_json
def show(file_id: str, url: str, api_key: str | None, as_json: bool) -> None:
    """Show one file's record."""
    with options.client(url, api_key) as client:
        file = client.get_file(file_id)
    emit(file) if as_json else pairs(file)


@files.command()
@click.argument("file_id")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write here instead."
)
@options.server
def content(file_id: str, output: Path | None, url: str, api_key: str | None) -> None:
    """Print a file's bytes, or stream them to -o."""
    with options.client(url, api_key) as client:
        if output is not None:
            client.download_file(file_id, output)
            return
        # By way of a file: whole or not at all, and never in memory.
        with TemporaryDirectory() as folder:
            whole = client.download_file(file_id, Path(folder) / "content")
            with whole.open("rb") as file:
                shutil.copyfileobj(file, sys.stdout.buffer)


@files.command()
@click.argument("file_id")
@options.server
@options.as_json
def delete(file_id: str, url: str, api_key: str | None, as_json: bool) -> None:
    """Delete a file."""
    with options.client(url, api_key) as client:
        answer = client.delete_file(file_id)
    emit(answer) if as_json else say(f"Deleted {file_id}.")
