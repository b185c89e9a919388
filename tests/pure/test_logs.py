"""What a log line may never hold, however it comes about."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import structlog

from tidemill import telemetry
from tidemill.settings import Settings

PROGRAM = textwrap.dedent(
    """
    import logging

    import structlog

    from tidemill import telemetry
    from tidemill.settings import Settings

    telemetry.configure_logging(Settings(log_format={format!r}, api_keys="sk-the-secret"))

    def answer(settings, headers, prompt):
        raise RuntimeError("it broke")

    try:
        answer(
            Settings(api_keys="sk-" + "the-secret"),
            [(b"authorization", b"Bearer sk-" + b"the-secret")],
            "a very " + "private prompt",
        )
    except RuntimeError as exc:
        structlog.get_logger().error("unexpected error", exc_info=exc)
        logging.getLogger("a.library").error("it failed", exc_info=exc)
    """
)


@pytest.mark.parametrize("format", ["json", "console"])
def test_a_traceback_tells_where_and_not_what_the_variables_held(
    format: str, tmp_path: Path
) -> None:
    """The frames' variables are prompts, headers and settings; a log is read by more people."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(format=format))
    ran = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        check=True,
    )
    for event in ("unexpected error", "it failed"):
        assert event in ran.stderr
    assert ran.stderr.count("it broke") >= 2
    assert "RuntimeError" in ran.stderr
    assert "in answer" in ran.stderr or '"name": "answer"' in ran.stderr
    assert "sk-the-secret" not in ran.stderr
    assert "very private prompt" not in ran.stderr


def test_a_log_whose_reader_has_gone_is_lost_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A closed standard error does not reach whoever logs."""
    gone = (tmp_path / "gone").open("w")
    monkeypatch.setattr("sys.stderr", gone)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    telemetry.configure_logging(Settings())
    gone.close()
    try:
        structlog.get_logger().warning("nobody reads this")
        logging.getLogger("elsewhere").warning("nor this")
    finally:
        structlog.reset_defaults()
