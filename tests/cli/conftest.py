"""A server for the client commands, and the command line as a function."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog

from tests.worlds.server import Server
from tidemill.cli import main


@dataclass(frozen=True)
class Ran:
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Standard output as JSON."""
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def tidemill(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[Run]:
    """Run a command in an empty folder, with none of the machine's own settings."""
    for name in list(os.environ):
        if name.startswith(("TIDEMILL_", "LOGOS_")) or name == "PORT":
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    # What a command says about logging must not outlive it: its standard error does not.
    monkeypatch.setattr(logging.getLogger(), "handlers", logging.getLogger().handlers[:])

    def run(*args: object) -> Ran:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Ran(code, captured.out, captured.err)

    yield run
    structlog.reset_defaults()


@pytest.fixture(scope="module")
def live() -> Iterator[Server]:
    """A server on the echo engine, without keys."""
    with Server() as server:
        yield server
