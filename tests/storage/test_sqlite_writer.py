"""The write thread: shared commits, single errors, full disks."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.storage.world import Hand, Input, S, begin, fresh, lease, new_batch, settlement, upload
from tidemill.errors import InvariantBroken, StoreUnavailable, TidemillError
from tidemill.storage import SqliteStore, migrate, open_store
from tidemill.storage.connections import open_reader
from tidemill.storage.writer import Change, Merge, Tx, Writer
from tidemill.types import FileFacts, NewFile

pytestmark = pytest.mark.anyio

_PUT = "INSERT INTO facts (kind, key, value, set_at) VALUES ('k', ?, x'00', 0)"


@pytest.fixture
async def writer(tmp_path: Path) -> AsyncIterator[Writer]:
    migrate(tmp_path)
    writer = Writer(tmp_path, Hand(), lambda changes: None)
    writer.start()
    yield writer
    await asyncio.to_thread(writer.stop)


def _keys(path: Path) -> set[str]:
    conn = open_reader(path)
    keys = {row["key"] for row in conn.execute("SELECT key FROM facts WHERE kind = 'k'")}
    conn.close()
    return keys


class Held:
    """Holds the write thread inside a transaction, so that others have to wait for the next."""

    def __init__(self, writer: Writer) -> None:
        self._free = threading.Event()
        self._inside = threading.Event()
        self._task = asyncio.create_task(writer.run(self._hold))

    def _hold(self, tx: Tx) -> None:
        self._inside.set()
        assert self._free.wait(120)

    async def inside(self) -> None:
        await asyncio.to_thread(self._inside.wait, 120)

    async def let_go(self) -> None:
        self._free.set()
        await self._task


async def test_one_callers_error_hurts_nobody_else(writer: Writer, tmp_path: Path) -> None:
    """Of callers that share a transaction, one that fails gets its error and leaves no trace."""
    held = Held(writer)
    await held.inside()

    def put(key: str) -> asyncio.Task[int]:
        return asyncio.create_task(writer.run(lambda tx: tx.run(_PUT, (key,)).rowcount))

    def refuse(tx: Tx) -> None:
        tx.run(_PUT, ("undone",))
        raise LookupError("mine")

    good = [put(f"a{i}") for i in range(5)]
    bad = asyncio.create_task(writer.run(refuse))
    twice = put("a0")
    good += [put(f"b{i}") for i in range(5)]
    await asyncio.sleep(0)
    await held.let_go()
    assert await asyncio.gather(*good) == [1] * 10
    with pytest.raises(LookupError, match="mine"):
        await bad
    with pytest.raises(InvariantBroken):
        await twice
    assert _keys(tmp_path) == {f"{c}{i}" for c in "ab" for i in range(5)}


async def test_waiting_callers_are_merged(writer: Writer) -> None:
    """Joined callers become one call with everybody's arguments, answered one by one."""
    calls: list[list[int]] = []

    def double(tx: Tx, numbers: list[int]) -> list[int]:
        calls.append(numbers)
        return [2 * n for n in numbers]

    held = Held(writer)
    await held.inside()
    merge = Merge(double)
    tasks = [asyncio.create_task(writer.join(merge, n)) for n in range(20)]
    await asyncio.sleep(0)
    await held.let_go()
    assert await asyncio.gather(*tasks) == [2 * n for n in range(20)]
    assert calls == [list(range(20))]


async def test_a_merged_caller_at_fault_fails_alone(writer: Writer, tmp_path: Path) -> None:
    """When the joint call fails each is tried by itself."""

    def put(tx: Tx, keys: list[str]) -> list[str]:
        for key in keys:
            tx.run(_PUT, (key,))
        return keys

    held = Held(writer)
    await held.inside()
    merge = Merge(put)
    keys = ["a", "b", "a", "c"]
    tasks = [asyncio.create_task(writer.join(merge, key)) for key in keys]
    await asyncio.sleep(0)
    await held.let_go()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert answers[:2] == ["a", "b"]
    assert isinstance(answers[2], InvariantBroken)
    assert answers[3] == "c"
    assert _keys(tmp_path) == {"a", "b", "c"}


async def test_success_is_heard_after_the_commit(writer: Writer, tmp_path: Path) -> None:
    """Whoever was answered can read what was written, on another connection."""
    for i in range(20):
        key = f"k{i}"
        await writer.run(lambda tx, key=key: tx.run(_PUT, (key,)).rowcount)  # type: ignore[misc]
        assert key in _keys(tmp_path)


async def test_a_write_outlives_its_caller(writer: Writer, tmp_path: Path) -> None:
    """A caller that is cancelled while it waits does not undo what it asked for."""
    held = Held(writer)
    await held.inside()
    task = asyncio.create_task(writer.run(lambda tx: tx.run(_PUT, ("kept",)).rowcount))
    await asyncio.sleep(0)
    task.cancel()
    await held.let_go()
    with pytest.raises(asyncio.CancelledError):
        await task
    await writer.run(lambda tx: None)
    assert _keys(tmp_path) == {"kept"}


async def test_a_lone_caller_waits_for_what_follows_earlier_commits(tmp_path: Path) -> None:
    """``alone`` begins after the commits before it were followed, never together with them."""
    migrate(tmp_path)
    order: list[str] = []

    def committed(changes: list[Change]) -> None:
        order.append("followed")

    writer = Writer(tmp_path, Hand(), committed)
    writer.start()
    held = Held(writer)
    await held.inside()

    def change(tx: Tx) -> None:
        tx.changes.append(None)  # type: ignore[arg-type]

    first = asyncio.create_task(writer.run(change))
    second = asyncio.create_task(writer.run(lambda tx: order.append("alone"), alone=True))
    await asyncio.sleep(0)
    await held.let_go()
    await asyncio.gather(first, second)
    assert order == ["followed", "alone"]
    await asyncio.to_thread(writer.stop)


async def test_a_closed_store_says_so(tmp_path: Path) -> None:
    """Writes after ``close`` are refused with one clear error."""
    store = open_store(tmp_path)
    await store.start()
    await store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.facts.put("k", "a", b"v")
    assert store.healthy() is not None


async def test_closing_finishes_what_is_queued(tmp_path: Path) -> None:
    """A write that was accepted is written, though nobody may be left to hear of it."""
    migrate(tmp_path)
    writer = Writer(tmp_path, Hand(), lambda changes: None)
    writer.start()
    tasks = [
        asyncio.create_task(writer.run(lambda tx, i=i: tx.run(_PUT, (f"{i}",)).rowcount))  # type: ignore[misc]
        for i in range(50)
    ]
    await asyncio.sleep(0)
    await asyncio.to_thread(writer.stop)
    assert await asyncio.gather(*tasks) == [1] * 50
    assert len(_keys(tmp_path)) == 50


async def _limit(store: SqliteStore, pages: int) -> None:
    def set_limit(tx: Tx) -> None:
        used = tx.value("PRAGMA page_count")
        tx.run(f"PRAGMA max_page_count = {used + pages}")

    await store._writer.run(set_limit)


async def test_a_full_disk_fails_callers_and_not_the_store(tmp_path: Path) -> None:
    """Each caller gets the error, what was committed stays, and room brings everything back."""
    store = open_store(tmp_path, clock=Hand(), tidy=False)
    await store.start()
    batch = await begin(store, Input(30))
    leases = await lease(store, batch)
    await store.lines.settle([settlement(leases[0])])
    await _limit(store, 20)

    draft = await store.files.draft(NewFile(owner="o", filename="big"))

    async def fill() -> None:
        for _ in range(100):
            await draft.append(b"x" * 65_536)
        await draft.commit(FileFacts(lines=1))

    with pytest.raises(StoreUnavailable, match="full"):
        await fill()
    await draft.discard()
    with pytest.raises(StoreUnavailable):
        await store.lines.settle([settlement(one, pad=20_000) for one in leases[1:]])
    assert "full" in (store.healthy() or "")
    now = await fresh(store, batch)
    assert (now.completed, await store.lines.running(batch.seq)) == (1, 29)

    await _limit(store, 100_000)
    (report,) = await store.lines.settle([settlement(one) for one in leases[1:]])
    assert (report.accepted, report.drained) == (29, True)
    assert store.healthy() is None
    await store.close()


async def test_an_idle_store_notices_that_there_is_room_again(tmp_path: Path) -> None:
    """Asking for its health is enough: a store that nobody writes tries by itself."""
    store = open_store(tmp_path, clock=Hand(), tidy=False)
    await store.start()
    writer = store._writer

    def fail(tx: Tx) -> None:
        tx.conn.execute("ROLLBACK")
        raise sqlite3.OperationalError("disk I/O error")

    with pytest.raises(StoreUnavailable, match="disk I/O error"):
        await writer.run(fail)
    assert "disk I/O error" in (store.healthy() or "")
    await writer.run(lambda tx: None, alone=True)
    assert store.healthy() is None
    await store.close()


async def test_a_group_that_is_undone_fails_as_a_whole(writer: Writer, tmp_path: Path) -> None:
    """When SQLite takes back the transaction, nobody in it has succeeded; the next one works."""
    held = Held(writer)
    await held.inside()

    def broken(tx: Tx) -> None:
        tx.conn.execute("ROLLBACK")
        raise sqlite3.OperationalError("disk I/O error")

    tasks = [
        asyncio.create_task(writer.run(lambda tx: tx.run(_PUT, ("a",)).rowcount)),
        asyncio.create_task(writer.run(broken)),
        asyncio.create_task(writer.run(lambda tx: tx.run(_PUT, ("b",)).rowcount)),
    ]
    await asyncio.sleep(0)
    await held.let_go()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(answer, StoreUnavailable) for answer in answers)
    assert _keys(tmp_path) == set()
    assert await writer.run(lambda tx: tx.run(_PUT, ("c",)).rowcount) == 1


async def test_store_errors_are_one_family(tmp_path: Path) -> None:
    """A handler sees ``TidemillError`` only, never the database's own."""
    store = open_store(tmp_path, clock=Hand(), tidy=False)
    await store.start()
    source = Input(2)
    batch = await store.batches.open(new_batch(await upload(store, source.pieces)))
    with pytest.raises(TidemillError) as refused:
        await store.lines.add(batch.seq, [source.lines[0], source.lines[0].__replace__(no=9)])
    assert isinstance(refused.value.__cause__, sqlite3.IntegrityError)
    assert (await fresh(store, batch)).status == S.VALIDATING
    await store.close()
