"""A store killed at any named point loses nothing that it has acknowledged."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import tidemill.storage
from tests.storage import crash_scenario
from tests.storage.world import OWNER, Hand, S, content, fresh, results
from tidemill.crash import CRASH_POINTS
from tidemill.storage import SqliteStore, open_store
from tidemill.types import BatchRecord, Page

pytestmark = pytest.mark.anyio

_SOURCE = "".join(
    file.read_text() for file in sorted(Path(tidemill.storage.__file__).parent.glob("*.py"))
)
_PASSED = re.findall(r'(?:crash_point\(|after\.append\()"([a-z_.]+)"', _SOURCE)
_TOPICS = ("draft.", "batch.", "lines.", "incremental.", "file.", "sweep.")
_HERE = sorted({name for name in _PASSED if name.startswith(_TOPICS)})
_LATER = [
    "lines.settle.after_commit:3",
    "lines.settle.before_commit:4",
    "lines.close.after_commit:2",
    "incremental.append.half_a_row:4",
    "batch.end.before_commit:2",
    "draft.commit.after_commit:2",
]


def test_every_crash_point_has_a_name() -> None:
    """The list has each point that the store's code passes, once."""
    assert set(_PASSED) <= set(CRASH_POINTS)
    assert len(set(CRASH_POINTS)) == len(CRASH_POINTS)
    assert len(_HERE) >= 12


def _run(path: Path, at: str) -> tuple[int, list[Any]]:
    """Run the scenario to its death; what it had been told by then."""
    root = Path(crash_scenario.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, crash_scenario.__file__, str(path)],
        env={**os.environ, "TIDEMILL_CRASH_AT": at, "PYTHONPATH": str(root)},
        capture_output=True,
        timeout=120,
        check=False,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("at", _HERE + _LATER)
async def test_nothing_is_lost_at(at: str, tmp_path: Path) -> None:
    """What was acknowledged is there, work goes on, and every line ends once."""
    code, told = _run(tmp_path, at)
    assert code == -signal.SIGKILL
    store = open_store(tmp_path, clock=Hand(), tidy=False)
    await store.start()
    for fact in told:
        await _still_true(store, *fact)
    await _files_follow(store, tmp_path)
    await crash_scenario.drive(store, lambda *fact: None)
    await _conserved(store)
    await crash_scenario.delete(store, lambda *fact: None)
    await _files_follow(store, tmp_path)
    await store.close()


async def _batches(store: SqliteStore) -> list[BatchRecord]:
    return (await store.batches.page(OWNER, Page(order="asc", limit=100)))[0]


async def _deleted(store: SqliteStore, batch: BatchRecord) -> bool:
    """True when the scenario had come to deleting the batch's output."""
    id = batch.output_file_id
    return id is not None and await store.files.get(id, OWNER) is None


async def _still_true(store: SqliteStore, kind: str, id: str, *more: Any) -> None:
    match kind:
        case "file":
            file = await store.files.get(id, OWNER)
            assert file is not None
            assert file.bytes == more[0] == len(await content(store, file))
        case "batch":
            assert await store.batches.get(id, OWNER) is not None
        case "settled":
            batch = await store.batches.get(id, OWNER)
            assert batch is not None
            if await _deleted(store, batch):
                return
            rows = await store.lines.rows(batch.seq, 0, 1000)
            assert set(more[0]) <= {json.loads(row.row)["custom_id"] for row in rows}
        case "ended":
            batch = await store.batches.get(id, OWNER)
            assert batch is not None
            assert batch.status in (S.COMPLETED, S.CANCELLED)
        case "deleted":
            assert await store.files.get(id, OWNER) is None


async def _files_follow(store: SqliteStore, path: Path) -> None:
    for batch in await _batches(store):
        rows = await store.lines.rows(batch.seq, 0, 1000)
        for kind, end in (("output", "jsonl"), ("error", "errors.jsonl")):
            file = path / "incremental" / f"{batch.id}.{end}"
            found = file.read_bytes() if file.exists() else b""
            assert found == b"".join(row.row + b"\n" for row in rows if row.kind == kind)


async def _conserved(store: SqliteStore) -> None:
    batches = await _batches(store)
    assert [batch.status for batch in batches] == [S.COMPLETED, S.CANCELLED]
    booked = Counter(
        (one.batch_id, one.custom_id) for one in await store.ledger.usage(None, 0, 2**40)
    )
    assert set(booked.values()) <= {1}
    for batch, source in zip(batches, crash_scenario.SOURCES.values(), strict=True):
        assert await fresh(store, batch) == batch
        if await _deleted(store, batch):
            continue
        output, errors = await results(store, batch)
        assert (len(output), len(errors)) == (batch.completed, batch.failed)
        assert batch.completed + batch.failed == batch.total == len(source.lines)
        found = Counter(row["custom_id"] for row in [*output, *errors])
        assert found == Counter(line.custom_id for line in source.lines)
        assert sum(one[0] == batch.id for one in booked) == batch.completed
