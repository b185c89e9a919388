"""Uploads: MB/s and how much memory the server takes on, for 50 MB and 200 MB."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import OpenAI

from tests.worlds.server import Server


def _peak_mb(pid: int) -> float:
    """Most memory a process has held since it started, in MB (VmHWM of /proc)."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


@pytest.mark.parametrize("megabytes", [50, 200])
def bench_upload(
    benchmark: Any,
    echo_server: Server,
    input_file: Callable[[int, int], Path],
    report: Callable[..., None],
    megabytes: int,
) -> None:
    """Upload through the SDK; the growth is over the server's memory before the first upload."""
    path = input_file(megabytes * 1000, 1000)
    client = OpenAI(base_url=f"{echo_server.base_url}/v1", api_key="-", timeout=600)
    small = input_file(10, 1000)
    client.files.create(file=small.open("rb"), purpose="batch")  # warm: lazy imports are done
    before = psutil.Process(echo_server.pid).memory_info().rss / 1e6

    def upload() -> None:
        with path.open("rb") as file:
            client.files.create(file=file, purpose="batch")

    benchmark.pedantic(upload, rounds=2, iterations=1)
    size = path.stat().st_size / 1e6
    report(
        f"upload of {size:.0f} MB",
        **{
            "MB/s": size / benchmark.stats.stats.min,
            "memory growth MB": _peak_mb(echo_server.pid) - before,
        },
    )


def bench_check(
    benchmark: Any, input_file: Callable[[int, int], Path], report: Callable[..., None]
) -> None:
    """The check of 50,000 lines alone, in the pieces in which an upload arrives."""
    from tidemill.jsonl import Checker

    data = input_file(50_000, 300).read_bytes()

    def check() -> None:
        checker = Checker(1 << 30, 1 << 20, knows=lambda model: True)
        for start in range(0, len(data), 65_536):
            checker.feed(data[start : start + 65_536])
        checker.finish()

    benchmark.pedantic(check, rounds=3, iterations=1, warmup_rounds=1)
    seconds = benchmark.stats.stats.min
    report("check of 50,000 lines", **{"ms": seconds * 1e3, "MB/s": len(data) / 1e6 / seconds})
