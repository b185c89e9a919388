"""How long a 404 takes says nothing about whether there is such an object."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import tidemill
from tests.handlers.principals import key, seen_by
from tests.handlers.test_access import NOBODY, ROWS
from tests.handlers.world import World
from tidemill.storage.readers import Readers
from tidemill.storage.writer import Tx

pytestmark = pytest.mark.anyio

OURS = str(Path(tidemill.__file__).parent)


@contextmanager
def called() -> Iterator[Counter[str]]:
    """How often each function of the server was called by this task, in which the application runs;
    what the store's threads do is the other test's to see."""
    calls: Counter[str] = Counter()
    ours = asyncio.current_task()

    def count(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or asyncio.current_task() is not ours:
            return
        if code.co_filename.startswith(OURS):
            calls[f"{code.co_filename.removeprefix(OURS)}:{code.co_qualname}"] += 1

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@pytest.fixture
async def objects(world: World) -> dict[str, dict[str, str]]:
    """Ids of somebody's objects, and ids like them that never were."""
    end = await world.finished((await world.create())["id"])
    theirs = {"file_id": end["output_file_id"], "batch_id": end["id"]}
    never = {name: id[:8] + id[:7:-1] for name, id in theirs.items()}
    return {"theirs": {**NOBODY, **theirs}, "never": {**NOBODY, **never}}


async def test_a_foreign_object_is_looked_for_as_one_that_never_was(
    world: World, objects: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every route of every mirror that names an object, and where a body does: the same
    statements run, and each finds as many rows."""
    done: list[tuple[str, int]] = []
    run, one = Readers.run_here, Tx.one

    def read(readers: Readers, fn: Callable[[sqlite3.Connection], Any]) -> Any:
        def traced(conn: sqlite3.Connection) -> Any:
            # Not the expanded text: the ids in it differ, as they should.
            found = fn(conn)
            done.append((fn.__qualname__, 0 if found is None else 1))
            return found

        return run(readers, traced)

    def looked(tx: Tx, sql: str, *more: Any) -> Any:
        found = one(tx, sql, *more)
        done.append((sql, 0 if found is None else 1))
        return found

    monkeypatch.setattr(Readers, "run_here", read)
    monkeypatch.setattr(Tx, "one", looked)
    secret, _ = await key(world)
    async with seen_by(world, secret) as mine:
        await mine.client.get("/v1/files")
        for method, path, owned in ROWS:
            if not owned:
                continue
            work = {}
            for whose, ids in objects.items():
                done.clear()
                answer = await mine.client.request(method, path.format(**ids))
                assert answer.status_code == 404
                work[whose] = list(done)
            assert work["theirs"] == work["never"], (method, path)
            assert work["never"]
        for path, status in (("/v1/batches", 400), ("/v1/batches/preflight", 404)):
            for whose, ids in objects.items():
                done.clear()
                asked = {"input_file_id": ids["file_id"], "endpoint": "/v1/chat/completions"}
                answer = await mine.client.post(path, json=asked)
                assert answer.status_code == status
                work[whose] = list(done)
            assert work["theirs"] == work["never"], path
            assert work["never"]


async def test_the_same_code_runs_for_both(
    world: World, objects: dict[str, dict[str, str]]
) -> None:
    """Each of our functions is called as often: no clock is needed to see that both take as long,
    and no machine is too busy to show it."""
    secret, _ = await key(world)
    async with seen_by(world, secret) as mine:
        for method, path in (
            ("GET", "/v1/files/{file_id}"),
            ("GET", "/v1/files/{file_id}/content"),
            ("DELETE", "/v1/files/{file_id}"),
            ("GET", "/v1/batches/{batch_id}"),
            ("POST", "/v1/batches/{batch_id}/cancel"),
        ):
            calls: dict[str, Counter[str]] = {}
            for whose, ids in objects.items():
                await mine.client.request(method, path.format(**ids))  # what is made once is there
                with called() as calls[whose]:
                    await mine.client.request(method, path.format(**ids))
            assert calls["theirs"] == calls["never"], (method, path)
            assert calls["never"].total() > 20
