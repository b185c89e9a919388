"""``tidemill serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tidemill.cli import options
from tidemill.settings import load


@click.command()
@options.config
@options.setting_flags()
def serve(config: Path | None, **flags: Any) -> None:
    """Start the server.

    Every option is a setting: the environment variable and the file tidemill.toml set it too, and
    a flag wins over both.
    """
    loaded = load(flags, toml=config)
    # Late: the other commands start without loading the server.
    from tidemill.app import serve as run_server

    run_server(loaded)
