"""What every store writes into the audit trail, and when it does not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tests.storage.conformance.conftest import Factory
from tests.storage.world import OWNER, Hand, Input, S, begin, finish, new_batch, upload
from tidemill.errors import (
    BudgetExceeded,
    Conflict,
    DuplicateActiveBatch,
    FileInUse,
    InvariantBroken,
    StorageQuotaExceeded,
    TidemillError,
)
from tidemill.ports import Store
from tidemill.types import Account, Actor, FileFacts, FileRecord, KeyRecord, Limits, NewFile

pytestmark = pytest.mark.anyio

BY = Actor(id="key_7", request_id="req_7")
TEAM = Account(kind="team", id="team_1", name="lab")
KEY = KeyRecord(id="key_1", name="k", owner="team_1", prefix="tm-", digest="d", created_at=1)


async def _file(store: Store, *, quota: int | None = None) -> FileRecord:
    new = NewFile(owner=OWNER, filename="in.jsonl", by=BY, quota=quota)
    draft = await store.files.draft(new)
    await draft.append(b"0123456789")
    return await draft.commit(FileFacts(lines=1))


async def _told(store: Store) -> list[tuple[str, str, str | None]]:
    entries = await store.audit.page()
    assert all((e.actor, e.request_id, e.at) == ("key_7", "req_7", 1_800_000_000) for e in entries)
    return [(entry.action, entry.object, entry.owner) for entry in entries]


async def test_what_an_actor_does_is_told_once(store: Store) -> None:
    """Every kind of deed, in its order, with the owner of the object; deeds that change nothing
    are none."""
    for _ in range(2):
        file = await _file(store)
    assert await store.files.delete(file.id, OWNER, BY)
    assert not await store.files.delete(file.id, OWNER, BY)
    source = Input(2)
    batch = await begin(store, source, by=BY)
    cancellable = frozenset({S.IN_PROGRESS})
    assert await store.batches.move(batch.seq, cancellable, S.CANCELLING, by=BY)
    assert await store.batches.move(batch.seq, cancellable, S.CANCELLING, by=BY) is None
    await store.accounts.add(TEAM, BY)
    await store.accounts.change("team_1", name="labs", by=BY)
    assert await store.accounts.change("team_9", name="x", by=BY) is None
    await store.keys.add(KEY, BY)
    await store.keys.change("key_1", name="l", by=BY)
    assert await store.keys.change("key_9", name="x", by=BY) is None
    await store.facts.put("verdict", "up\nm", b"no")
    for _ in range(2):
        await store.facts.forget("verdict", "up\nm", BY, "up/m")
        await store.keys.revoke("key_1", BY)
        await store.accounts.close("team_1", BY)
        await store.keys.revoke("key_9", BY)
        await store.accounts.close("team_9", BY)
    first, second, *rest = await _told(store)
    assert first[0] == second[0] == "file.created"
    assert second[1] == file.id
    assert rest == [
        ("file.deleted", file.id, OWNER),
        ("batch.created", batch.id, OWNER),
        ("batch.cancelled", batch.id, OWNER),
        ("team.created", "team_1", None),
        ("team.changed", "team_1", None),
        ("key.created", "key_1", "team_1"),
        ("key.changed", "key_1", "team_1"),
        ("verdict.forgotten", "up/m", None),
        ("key.revoked", "key_1", "team_1"),
        ("team.closed", "team_1", None),
    ]


async def test_what_the_server_does_of_itself_is_no_deed(store: Store) -> None:
    """A batch that runs to its end, and a file that goes with its time."""
    await finish(store, await begin(store, Input(1)))
    await store.files.sweep(2**40)
    assert await store.audit.page() == []


async def test_a_repeated_create_is_told_once(store: Store) -> None:
    """The second answer is the first batch: it was not made again."""
    file = await upload(store, Input(1).pieces)
    wanted = new_batch(file, idempotency_key="k", by=BY)
    for _ in range(3):
        batch = await store.batches.open(wanted)
    assert await _told(store) == [("batch.created", batch.id, OWNER)]


async def test_what_is_refused_is_not_told(store: Store) -> None:
    """Neither by a rule of the store nor by a limit."""
    await store.accounts.add(TEAM)
    await store.keys.add(KEY)
    batch = await begin(store, Input(1))
    file = await store.files.get(batch.input_file_id, OWNER)
    assert file is not None
    await store.keys.change("key_1", limits=Limits(monthly_budget=0))
    other = await upload(store, Input(1).pieces)
    same_name = Account(kind="team", id="team_2", name=TEAM.name)
    refused: list[tuple[type[TidemillError], Callable[[], Awaitable[object]]]] = [
        (DuplicateActiveBatch, lambda: store.batches.open(new_batch(file, by=BY))),
        (BudgetExceeded, lambda: store.batches.open(new_batch(other, by=BY))),
        (FileInUse, lambda: store.files.delete(batch.input_file_id, OWNER, BY)),
        (StorageQuotaExceeded, lambda: _file(store, quota=9)),
        (Conflict, lambda: store.accounts.add(same_name, BY)),
        (InvariantBroken, lambda: store.keys.add(KEY, BY)),
    ]
    for error, deed in refused:
        with pytest.raises(error):
            await deed()
    assert await store.audit.page() == []


async def test_the_trail_is_read_in_order(store: Store) -> None:
    """From a place on, or about one object only."""
    for id in ("key_a", "key_b"):
        await store.keys.add(
            KeyRecord(id=id, name="k", owner=id, prefix="", digest=id, created_at=1), BY
        )
    await store.keys.revoke("key_a", BY)
    first = await store.audit.page(limit=2)
    rest = await store.audit.page(after=first[-1].seq)
    assert [entry.object for entry in first + rest] == ["key_a", "key_b", "key_a"]
    about = await store.audit.page(object="key_a")
    assert [entry.action for entry in about] == ["key.created", "key.revoked"]


async def test_the_quota_is_counted_in_the_commit(
    factory: Factory, clock: Hand, store: Store
) -> None:
    """However many uploads began while there was room: what an owner keeps never passes it."""
    drafts = []
    for _ in range(3):
        draft = await store.files.draft(NewFile(owner=OWNER, filename="a.jsonl", quota=25))
        await draft.append(b"0123456789")
        drafts.append(draft)
    await drafts[0].commit(FileFacts(lines=1))
    await drafts[1].commit(FileFacts(lines=1))
    with pytest.raises(StorageQuotaExceeded):
        await drafts[2].commit(FileFacts(lines=1))
    await drafts[2].discard()
    assert await store.budgets.stored(OWNER) == 20
