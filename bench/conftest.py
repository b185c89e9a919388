"""What benchmarks share: input files, a live server, and how a rate is reported.

``make bench`` runs them all. Machines are noisy: compare figures of one run, and report ratios.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worlds.server import Server

Report = Callable[..., None]


def request_line(no: int, model: str, text: str, **body: Any) -> bytes:
    """One chat line, LF included."""
    line = {
        "custom_id": f"line-{no}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": model, "messages": [{"role": "user", "content": text}], **body},
    }
    return json.dumps(line).encode() + b"\n"


@pytest.fixture(scope="session")
def input_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    """A file of ``lines`` echo requests of about ``line_bytes`` bytes each; made once."""
    folder = tmp_path_factory.mktemp("inputs")

    def make(lines: int, line_bytes: int) -> Path:
        path = folder / f"{lines}x{line_bytes}.jsonl"
        if not path.exists():
            text = "tide " * max(1, (line_bytes - 150) // 5)
            with path.open("wb") as out:
                for no in range(lines):
                    out.write(request_line(no, "echo", text))
        return path

    return make


@pytest.fixture
def echo_server() -> Iterator[Server]:
    """A live server with the echo engine and room for large files."""
    with Server(max_batch_file_bytes=1 << 30, max_batch_requests=1_000_000) as server:
        yield server


@pytest.fixture
def report(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> Report:
    """Print one line with the figures of a benchmark and keep them in its JSON."""

    def say(name: str, **figures: float) -> None:
        benchmark.extra_info.update(figures)
        words = "  ".join(f"{key} {value:,.1f}" for key, value in figures.items())
        with capsys.disabled():
            print(f"\n  {name}: {words}")

    return say
