"""How long a 404 takes says nothing about whether there is such an object."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

from tests.handlers.principals import key, seen_by
from tests.handlers.test_access import NOBODY, ROWS
from tests.handlers.world import World
from tidemill import clock
from tidemill.storage.readers import Readers
from tidemill.storage.writer import Tx

pytestmark = pytest.mark.anyio

SIMILAR = 2.0
"""Nobody's clock is better over a network, and a look at one row more would cost less than this;
that the work is the same is the other test's to say."""


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
    """On every route of every mirror that names an object: the same statements run, and each finds
    as many rows."""
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


async def test_both_take_as_long(world: World, objects: dict[str, dict[str, str]]) -> None:
    """Asked in turns, so that whatever else the machine does meets both."""
    secret, _ = await key(world)
    async with seen_by(world, secret) as mine:
        for method, path in (
            ("GET", "/v1/files/{file_id}"),
            ("GET", "/v1/files/{file_id}/content"),
            ("DELETE", "/v1/files/{file_id}"),
            ("GET", "/v1/batches/{batch_id}"),
            ("POST", "/v1/batches/{batch_id}/cancel"),
        ):
            took: dict[str, list[float]] = {whose: [] for whose in objects}
            for n in range(60):
                for whose in sorted(objects, reverse=n % 2 == 0):
                    begun = clock.monotonic()
                    await mine.client.request(method, path.format(**objects[whose]))
                    took[whose].append(clock.monotonic() - begun)
            theirs, never = median(took["theirs"]), median(took["never"])
            assert max(theirs, never) / min(theirs, never) < SIMILAR, (method, path)
