"""The audit trail and what it tells are one commit."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.storage.world import OWNER, Hand, Input, S, begin, fresh, new_batch, upload
from tidemill.errors import TidemillError
from tidemill.storage import SqliteStore, open_store
from tidemill.types import Account, Actor, FileFacts, KeyRecord, Limits, NewFile, Page

pytestmark = pytest.mark.anyio

BY = Actor(id="key_7")
TEAM = Account(kind="team", id="team_1", name="lab")
KEY = KeyRecord(id="key_1", name="k", owner="o", prefix="", digest="d", created_at=1)


async def test_a_deed_that_cannot_be_told_is_not_done(tmp_path: Path) -> None:
    """Where the entry cannot be written, nothing else of the commit is there either."""
    store = open_store(tmp_path, clock=Hand(), tidy=False)
    await store.start()
    try:
        await store.accounts.add(TEAM)
        await store.keys.add(KEY)
        batch = await begin(store, Input(1))
        file = await upload(store, Input(1).pieces)
        await store.facts.put("verdict", "m", b"no")
        with sqlite3.connect(tmp_path / "tidemill.db") as conn:
            conn.execute(
                "CREATE TRIGGER audit_is_full BEFORE INSERT ON audit "
                "BEGIN SELECT RAISE(ABORT, 'full'); END"
            )
        conn.close()
        other = Account(kind="team", id="team_2", name="other")
        key = KeyRecord(id="key_2", name="k", owner="o", prefix="", digest="e", created_at=1)
        running = frozenset({S.IN_PROGRESS})
        deeds: list[Callable[[], Awaitable[object]]] = [
            lambda: _create(store),
            lambda: store.files.delete(file.id, OWNER, BY),
            lambda: store.batches.open(new_batch(file, by=BY)),
            lambda: store.batches.move(batch.seq, running, S.CANCELLING, by=BY),
            lambda: store.accounts.add(other, BY),
            lambda: store.accounts.change("team_1", name="x", by=BY),
            lambda: store.accounts.close("team_1", BY),
            lambda: store.keys.add(key, BY),
            lambda: store.keys.change("key_1", limits=Limits(models=()), by=BY),
            lambda: store.keys.revoke("key_1", BY),
            lambda: store.facts.forget("verdict", "m", BY, "up/m"),
        ]
        for deed in deeds:
            with pytest.raises(TidemillError):
                await deed()
        assert await store.audit.page() == []
        assert await store.accounts.page("team") == [TEAM]
        assert await store.keys.page() == [KEY]
        assert await store.facts.get("verdict", "m") is not None
        assert await fresh(store, batch) == batch
        files, _ = await store.files.page(OWNER, Page(limit=10))
        assert {one.id for one in files} == {file.id, batch.input_file_id}
        assert len(await store.batches.active()) == 1
    finally:
        await store.close()


async def test_an_entry_stays_as_it_was_written(tmp_path: Path) -> None:
    """Whoever has the database open can neither change nor remove it."""
    store = open_store(tmp_path, clock=Hand(), tidy=False)
    await store.start()
    try:
        await store.keys.add(KEY, BY)
        before = await store.audit.page()
        assert len(before) == 1
        with sqlite3.connect(tmp_path / "tidemill.db") as conn:
            for deed in ("DELETE FROM audit", "UPDATE audit SET actor = 'nobody'"):
                with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                    conn.execute(deed)
        conn.close()
        assert await store.audit.page() == before
    finally:
        await store.close()


async def _create(store: SqliteStore) -> None:
    draft = await store.files.draft(NewFile(owner=OWNER, filename="new.jsonl", by=BY))
    await draft.append(b"x")
    try:
        await draft.commit(FileFacts(lines=1))
    finally:
        await draft.discard()
