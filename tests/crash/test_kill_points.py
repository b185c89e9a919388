"""kill -9 at every named point: after a restart nothing is lost, run twice, or stuck.

A client works against a real server that dies at a named point. The same command then goes on on
the same store, and the conservation law must hold: each custom_id in exactly one result file, the
counts equal to the rows, and the incremental files equal to what is downloaded.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import httpx
import pytest
from openai import APIConnectionError, InternalServerError, NotFoundError, OpenAI

from tests.worlds.server import Server

LINES = 40
_ENDED = ("completed", "failed", "expired", "cancelled")

RUN = (
    "draft.append.before_commit",
    "draft.append.after_commit",
    "draft.commit.before_commit",
    "draft.commit.after_commit",
    "batch.open.before_commit",
    "batch.open.after_commit",
    "lines.add.before_commit",
    "lines.add.after_commit",
    "batch.read.before_start",
    "lines.lease.before_commit",
    "lines.lease.after_commit:3",
    "line.run.before_execute:2",
    "line.run.after_execute:5",
    "lines.settle.before_commit:3",
    "lines.settle.after_commit",
    "lines.settle.after_commit:4",
    "incremental.append.half_a_row",
    "incremental.append.half_a_row:3",
    "batch.end.before_commit",
    "batch.end.after_commit",
)
HELD = {
    "lines.lease.after_commit:3",
    "line.run.before_execute:2",
    "line.run.after_execute:5",
    "lines.settle.before_commit:3",
}
"""Points at which a line is certainly in flight; it runs again, and the batch says so."""
CANCEL = (
    "batch.cancel.after_commit",
    "lines.close.before_commit",
    "lines.close.after_commit",
    "batch.end.before_commit",
    "batch.end.after_commit",
)


def _input(padding: int = 0, *, slow_s: float = 0.02) -> bytes:
    """40 lines, one of which is refused; ``padding`` bytes are added to each. The first dozen takes
    no time, each of the others ``slow_s``."""

    def text(no: int) -> str:
        return "!status 400" if no == 7 else f"!sleep {slow_s if no >= 12 else 0} {no}"

    rows = [
        {
            "custom_id": f"line-{no}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "echo",
                "user": "x" * padding,
                "messages": [{"role": "user", "content": text(no)}],
            },
        }
        for no in range(LINES)
    ]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.base_url}/v1", api_key="-", max_retries=0, timeout=60)


def _work(client: OpenAI, data: bytes, *, cancel: bool) -> None:
    """What a user does, until the server dies under it."""
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.request_counts is None or batch.request_counts.completed < 8:
        batch = client.batches.retrieve(batch.id)
    if cancel:
        client.batches.cancel(batch.id)
    for _ in range(5000):
        client.batches.retrieve(batch.id)
        time.sleep(0.02)


def _await_death(server: Server) -> None:
    for _ in range(5000):
        if server.returncode is not None:
            return
        time.sleep(0.02)
    pytest.fail("the kill point was never reached")


def _ended(client: OpenAI, id: str) -> Any:
    for _ in range(5000):
        batch = client.batches.retrieve(id)
        if batch.status in _ENDED:
            return batch
        time.sleep(0.02)
    pytest.fail(f"stuck: {batch}")


def _rows(content: bytes) -> list[dict[str, Any]]:
    assert content.endswith(b"\n") or not content
    return [json.loads(row) for row in content.split(b"\n")[:-1]]


def _check(server: Server, client: OpenAI, batch: Any, before: dict[str, bytes]) -> None:
    """The conservation law, and that no finished row was lost or rewritten."""
    seen: list[str] = []
    for id, suffix, count in (
        (batch.output_file_id, ".jsonl", batch.request_counts.completed),
        (batch.error_file_id, ".errors.jsonl", batch.request_counts.failed),
    ):
        content = client.files.content(id).read() if id else b""
        rows = _rows(content)
        assert len(rows) == count
        assert (id is not None) == (count > 0)
        seen += [row["custom_id"] for row in rows]
        incremental = server.storage_path / "incremental" / f"{batch.id}{suffix}"
        assert (incremental.read_bytes() if incremental.exists() else b"") == content
        whole, _, _ = before.get(incremental.name, b"").rpartition(b"\n")
        assert content.startswith(whole), "a row that was readable before the crash has changed"
    assert sorted(seen) == sorted(f"line-{no}" for no in range(LINES))
    assert batch.request_counts.total == LINES
    assert 0 <= batch.lines_rerun <= 4


@pytest.mark.parametrize(
    ("point", "cancel"), [(p, False) for p in RUN] + [(p, True) for p in CANCEL]
)
def test_killed_here_nothing_is_lost(point: str, cancel: bool) -> None:
    """After a restart every batch ends by itself, as if nothing had happened."""
    # Small files are written in one go: only a large one is appended in several commits.
    # What is to be cancelled must not end before it is.
    data = _input(100_000 if point.startswith("draft.append") else 0, slow_s=2 if cancel else 0.02)
    env = {"TIDEMILL_CRASH_AT": point}
    with Server(batch_local_concurrency=4, log_level="warning", env=env) as server:
        with suppress(APIConnectionError, InternalServerError, NotFoundError, httpx.HTTPError):
            _work(_client(server), data, cancel=cancel)
        _await_death(server)
        assert server.returncode == -9
        incremental = server.storage_path / "incremental"
        before = {path.name: path.read_bytes() for path in incremental.glob("*")}

        server.env.clear()
        server.restart()
        client = _client(server)
        files = [file for file in client.files.list() if file.purpose == "batch"]
        for file in files:
            assert client.files.content(file.id).read() == data
        batches = list(client.batches.list())
        if not batches:  # it died before the answer to create: the client starts over
            if not files:
                files = [client.files.create(file=("in.jsonl", data), purpose="batch")]
            batches = [
                client.batches.create(
                    input_file_id=files[0].id,
                    endpoint="/v1/chat/completions",
                    completion_window="24h",
                )
            ]
        assert len(batches) == 1
        batch = _ended(client, batches[0].id)
        assert batch.status == ("cancelled" if cancel else "completed")
        _check(server, client, batch, before)
        assert point not in HELD or batch.lines_rerun > 0


def test_every_point_of_the_local_path_is_killed() -> None:
    """A new crash point needs its row here (those of the provider path have tests of their own)."""
    from tidemill.crash import CRASH_POINTS

    tested = {point.partition(":")[0] for point in RUN + CANCEL}
    elsewhere = {"file.delete.after_commit", "sweep.step.after_commit"}
    local = {point for point in CRASH_POINTS if not point.startswith(("upstream.", "provider."))}
    assert local - elsewhere == tested
