"""``tidemill migrate``."""

from __future__ import annotations

from pathlib import Path

import click

from tidemill.cli import options
from tidemill.cli.screen import emit, say
from tidemill.settings import load


@click.command()
@options.config
@options.setting_flags(("storage_path",))
@options.as_json
def migrate(config: Path | None, storage_path: str | None, as_json: bool) -> None:
    """Bring the store to this version.

    A store that does not exist is made. The server does the same when it starts; this is for
    release steps that run before it.
    """
    settings = load({"storage_path": storage_path}, toml=config).settings
    path = Path(settings.storage_path)
    # Late: the other commands start without loading the store.
    from tidemill.storage import migrate as apply

    done = apply(path)
    if as_json:
        emit({"storage_path": str(path), "applied": done})
    else:
        say(f"The store in {path} is up to date ({', '.join(done) or 'nothing to do'}).")
