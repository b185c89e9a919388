"""What every store does with keys, the ledger and facts."""

from __future__ import annotations

import pytest

from tests.storage.world import OWNER, Hand, Input, begin, finish
from tidemill.errors import InvariantBroken
from tidemill.ports import Store
from tidemill.types import KeyRecord, Usage, UsageRow

pytestmark = pytest.mark.anyio


def _key(id: str, digest: str) -> KeyRecord:
    return KeyRecord(
        id=id,
        name="n",
        owner=OWNER,
        prefix="tm-abc",
        digest=digest,
        scopes=frozenset({"admin", "files"}),
        created_at=5,
        expires_at=9,
    )


async def test_keys_are_found_by_digest(store: Store, clock: Hand) -> None:
    """Expired and revoked ones too; a second revoke says that there was nothing to do."""
    one, two = _key("key_1", "d1"), _key("key_2", "d2")
    await store.keys.add(one)
    await store.keys.add(two)
    assert await store.keys.find("d1") == one
    assert await store.keys.find("d3") is None
    assert await store.keys.page() == [one, two]
    assert await store.keys.revoke("key_1")
    assert not await store.keys.revoke("key_1")
    assert not await store.keys.revoke("key_3")
    found = await store.keys.find("d1")
    assert found is not None
    assert found.revoked_at == int(clock.now)


async def test_a_secret_is_one_key(store: Store) -> None:
    """The same digest, or id, twice is refused."""
    await store.keys.add(_key("key_1", "d1"))
    with pytest.raises(InvariantBroken):
        await store.keys.add(_key("key_2", "d1"))
    with pytest.raises(InvariantBroken):
        await store.keys.add(_key("key_1", "d2"))
    assert len(await store.keys.page()) == 1


def _usage(at: int, owner: str = OWNER, batch_id: str | None = None) -> UsageRow:
    return UsageRow(
        owner=owner,
        key_id=None,
        model="m",
        execution="local",
        tier="standard",
        usage=Usage(input=1, cached=1, output=2, reasoning=1),
        batch_id=batch_id,
        custom_id=None if batch_id is None else "c1",
        at=at,
    )


async def test_usage_is_read_by_owner_and_time(store: Store) -> None:
    """``since`` is included, ``until`` is not; a null owner means all."""
    rows = [_usage(10), _usage(20), _usage(20, "bob"), _usage(30)]
    await store.ledger.book(rows)
    await store.ledger.book([])
    assert await store.ledger.usage(OWNER, 10, 30) == rows[:2]
    assert await store.ledger.usage(None, 20, 31) == rows[1:]
    assert await store.ledger.usage("eve", 0, 100) == []


async def test_a_line_is_booked_once(store: Store) -> None:
    """However often its result is reported, and by whom."""
    batch = await finish(store, await begin(store, Input(1)))
    await store.ledger.book([_usage(10, batch_id=batch.id), _usage(11, batch_id=batch.id)])
    (row,) = await store.ledger.usage(OWNER, 0, 2**40)
    assert (row.batch_id, row.at) == (batch.id, 1_800_000_123)


async def test_facts_are_remembered_for_their_time(store: Store, clock: Hand) -> None:
    """For good or for a while; a new value replaces value and time."""
    await store.facts.put("verdict", "a", b"\x00yes")
    await store.facts.put("verdict", "b", b"no", ttl_s=60)
    now = int(clock.now)
    assert await store.facts.all("verdict") == {"a": (b"\x00yes", now), "b": (b"no", now)}
    clock.now += 60
    assert await store.facts.get("verdict", "b") is None
    assert await store.facts.all("verdict") == {"a": (b"\x00yes", now)}
    await store.facts.put("verdict", "b", b"maybe")
    assert await store.facts.get("verdict", "b") == (b"maybe", now + 60)
    assert await store.facts.get("other", "a") is None


async def test_facts_are_forgotten(store: Store) -> None:
    """One of them, or all of a kind; the number says how many there were."""
    for key in "abc":
        await store.facts.put("k", key, b"v")
    await store.facts.put("other", "a", b"v")
    assert await store.facts.forget("k", "a") == 1
    assert await store.facts.forget("k", "a") == 0
    assert await store.facts.forget("k") == 2
    assert await store.facts.all("k") == {}
    assert await store.facts.get("other", "a") is not None
