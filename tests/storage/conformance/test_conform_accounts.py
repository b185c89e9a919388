"""What every store does with teams, users, and what keys grant with them."""

from __future__ import annotations

import msgspec
import pytest

from tests.storage.world import Hand
from tidemill.errors import Conflict, InvariantBroken
from tidemill.ports import Store
from tidemill.types import Account, Grant, KeyRecord, Lane, Limits

pytestmark = pytest.mark.anyio

LIMITS = Limits(
    models=("gpt-*",),
    providers={"local": ("*",), "azure": ()},
    lane=Lane.BATCH,
    monthly_budget=5_000_000,
    storage_bytes=0,
)
TEAM = Account(kind="team", id="team_1", name="research", limits=LIMITS, created_at=5)
USER = Account(kind="user", id="user_1", name="ada", created_at=6)


def _key(id: str, **changes: object) -> KeyRecord:
    key = KeyRecord(id=id, name="n", owner=id, prefix="tm-abc", digest=id, created_at=5)
    return msgspec.structs.replace(key, **changes)


async def test_an_account_is_found_by_id_or_name(store: Store) -> None:
    """A team and a user do not stand in for each other."""
    await store.accounts.add(TEAM)
    await store.accounts.add(USER)
    assert await store.accounts.get("team", "team_1") == TEAM
    assert await store.accounts.get("team", "research") == TEAM
    assert await store.accounts.get("user", "research") is None
    assert await store.accounts.get("user", "team_1") is None
    assert await store.accounts.page("team") == [TEAM]
    assert await store.accounts.page("user") == [USER]


async def test_a_name_is_taken_while_its_account_is_open(store: Store, clock: Hand) -> None:
    """A closed team leaves its name to the next one, and keeps its row."""
    await store.accounts.add(TEAM)
    again = msgspec.structs.replace(TEAM, id="team_2")
    with pytest.raises(Conflict, match="research"):
        await store.accounts.add(again)
    assert await store.accounts.close("team_1")
    assert not await store.accounts.close("team_1")
    await store.accounts.add(again)
    assert await store.accounts.get("team", "research") == again
    first = await store.accounts.get("team", "team_1")
    assert first is not None
    assert first.closed_at == int(clock.now)


async def test_an_account_changes_in_place(store: Store) -> None:
    """What is not given stays; a name that is taken is refused."""
    await store.accounts.add(TEAM)
    await store.accounts.add(msgspec.structs.replace(TEAM, id="team_2", name="sales"))
    changed = await store.accounts.change("team_1", limits=Limits(monthly_budget=1))
    assert changed == msgspec.structs.replace(TEAM, limits=Limits(monthly_budget=1))
    with pytest.raises(Conflict):
        await store.accounts.change("team_1", name="sales")
    assert await store.accounts.change("team_3", name="x") is None
    renamed = await store.accounts.change("team_1", name="lab")
    assert renamed == await store.accounts.get("team", "lab")


async def test_a_grant_is_a_key_with_its_team_and_user(store: Store) -> None:
    """All three are read together, as they are now."""
    await store.accounts.add(TEAM)
    await store.accounts.add(USER)
    key = _key("key_1", team_id="team_1", user_id="user_1", limits=Limits(models=("m",)))
    await store.keys.add(key)
    await store.keys.add(_key("key_2"))
    assert await store.accounts.grant("key_1") == Grant(key=key, team=TEAM, user=USER)
    assert await store.accounts.grant("key_2") == Grant(key=_key("key_2"))
    assert await store.accounts.grant("key_3") is None


async def test_a_key_belongs_to_an_account_that_exists(store: Store) -> None:
    """A key of a team that nobody has made is refused."""
    with pytest.raises(InvariantBroken):
        await store.keys.add(_key("key_1", team_id="team_9"))


async def test_a_key_changes_and_is_still_the_same_owner(store: Store) -> None:
    """Narrowing a key does not move what it owns."""
    await store.keys.add(_key("key_1"))
    changed = await store.keys.change("key_1", limits=LIMITS, expires_at=77)
    assert changed == _key("key_1", limits=LIMITS, expires_at=77)
    assert await store.keys.find("key_1") == changed
    for given, expires_at in (({}, 77), ({"expires_at": None}, None)):
        changed = await store.keys.change("key_1", **given)
        assert changed is not None
        assert (changed.expires_at, changed.limits) == (expires_at, LIMITS)
    assert await store.keys.change("key_9", name="x") is None


async def test_last_use_only_goes_forward(store: Store) -> None:
    """Times arrive late and in any order; a key that is gone is no error."""
    await store.keys.add(_key("key_1"))
    await store.keys.add(_key("key_2"))
    await store.keys.touch({"key_1": 50, "key_9": 1})
    await store.keys.touch({"key_1": 40})
    await store.keys.touch({})
    assert [key.last_used_at for key in await store.keys.page()] == [50, None]
