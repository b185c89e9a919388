"""``tidemill models``."""

from __future__ import annotations

import click

from tidemill.cli import options
from tidemill.cli.screen import emit, table


@click.command()
@options.server
@options.as_json
def models(url: str, api_key: str | None, as_json: bool) -> None:
    """List the models that the server answers with."""
    with options.client(url, api_key) as client:
        found = client.list_models()
    if as_json:
        emit(found)
        return
    table(
        ("model", "owned by", "context", "state"),
        [
            (model["id"], model["owned_by"], model.get("context_length"), model.get("state"))
            for model in found
        ],
        right="context",
    )
