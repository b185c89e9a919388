"""What a person sees: tables in a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from tidemill.cli import screen

BATCH = "batch_" + "a" * 32
WHEN = "2026-11-30 18:09:19Z"


class Terminal(io.StringIO):
    """Standard output that a person looks at."""

    def isatty(self) -> bool:
        return True


def test_ids_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut in two they cannot be copied; other columns give way."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", Terminal())
    rows = [(BATCH, WHEN, "a name that is longer than what is left of the line")]
    screen.table(("batch", "created", "name"), rows)
    lines = sys.stdout.getvalue().splitlines()
    assert len(lines) > 2
    assert BATCH in lines[1]


def test_a_record_shows_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    """Fields without a value are left out, and a time is no number."""
    screen.pairs(
        {"id": "file-1", "created_at": 1_796_062_159, "expired_at": None, "usage": {"a": 1}}
    )
    assert capsys.readouterr().out == (
        'id\tfile-1\ncreated_at\t2026-11-30 18:09:19Z\nusage\t{"a": 1}\n'
    )
