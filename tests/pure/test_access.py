"""Owners, and what a key may do."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill import access
from tidemill.types import Account, Grant, KeyRecord, Lane, Limits, Principal

names = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=4)
maybe = st.none() | names


def _grant(**changes: object) -> Grant:
    team = changes.pop("team", None)
    user = changes.pop("user", None)
    key = KeyRecord(id="key_1", name="k", owner="o", prefix="tm-", digest="d", created_at=0)
    return Grant(key=msgspec.structs.replace(key, **changes), team=team, user=user)


class TestOwner:
    @given(names, names, maybe, maybe, maybe, maybe)
    def test_two_keys_share_an_owner_only_through_a_team(
        self,
        key: str,
        other: str,
        team: str | None,
        other_team: str | None,
        user: str | None,
        other_user: str | None,
    ) -> None:
        """Keys that both lack a team, or a user, have nothing in common because of it."""
        ids = [None if x is None else f"team_{x}" for x in (team, other_team)]
        users = [None if x is None else f"user_{x}" for x in (user, other_user)]
        one = access.owner(f"key_{key}", ids[0], users[0])
        two = access.owner(f"key_{other}", ids[1], users[1])
        same_team = ids[0] is not None and ids[0] == ids[1]
        same_key = ids == [None, None] and users[0] == users[1] and key == other
        assert (one == two) == (same_team or same_key)


class TestTrouble:
    @pytest.mark.parametrize(
        ("changes", "code"),
        [
            ({}, None),
            ({"expires_at": 101}, None),
            ({"expires_at": 100}, "key_expired"),
            ({"revoked_at": 1}, "key_revoked"),
            ({"team": Account(kind="team", id="t", name="t", closed_at=1)}, "team_closed"),
            ({"user": Account(kind="user", id="u", name="u", closed_at=1)}, "user_closed"),
            ({"team": Account(kind="team", id="t", name="t")}, None),
        ],
    )
    def test_a_key_ends_in_four_ways(self, changes: dict[str, object], code: str | None) -> None:
        """Revoked, expired, or its team or user closed: each has a code of its own."""
        found = access.trouble(_grant(**changes), now=100)
        assert (found[0] if found else None) == code


class TestScopes:
    @pytest.mark.parametrize(
        ("scopes", "allowed"),
        [
            (set(), {"inference", "batch"}),
            ({"batch"}, {"batch"}),
            ({"admin"}, {"admin"}),
            ({"admin", "batch"}, {"admin", "batch"}),
        ],
    )
    def test_administration_is_never_implied(self, scopes: set[str], allowed: set[str]) -> None:
        """A key without scopes does all ordinary work; only the scope itself administers."""
        who = Principal(owner="o", name="n", scopes=frozenset(scopes))
        assert {scope for scope in access.SCOPES if access.may(who, scope)} == allowed


class TestPermits:
    def test_no_limit_permits_everything(self) -> None:
        """A key without limits may use every model anywhere."""
        assert access.permits([], "m", "p")
        assert access.permits([Limits()], "m", "p")

    def test_every_limit_must_agree(self) -> None:
        """Neither the key nor its team can give what the other one withholds."""
        team, key = Limits(models=("a", "b")), Limits(models=("b", "c"))
        assert [access.permits([team, key], m) for m in "abc"] == [False, True, False]

    def test_a_provider_that_is_not_named_is_closed(self) -> None:
        """Models per provider say also which providers there are."""
        only = Limits(providers={"local": ("*",), "azure": ()})
        assert access.permits([only], "m", "local")
        assert not access.permits([only], "m", "azure")
        assert not access.permits([only], "m", "openai")
        assert access.permits([only], "m")
        assert access.uses([only], "local")
        assert not access.uses([only], "azure")
        assert not access.uses([only], "openai")

    def test_no_models_at_all_means_none(self) -> None:
        """An empty list is a limit, not the absence of one."""
        assert not access.permits([Limits(models=())], "m")

    @given(names, names)
    def test_a_star_matches_only_what_it_ends(self, prefix: str, rest: str) -> None:
        """``gpt-*`` allows what begins with ``gpt-``, and the name without a star only itself."""
        assert access.permits([Limits(models=(f"{prefix}*",))], prefix + rest)
        assert not access.permits([Limits(models=(prefix,))], prefix + rest)


class TestLane:
    def test_a_ceiling_lowers_and_never_lifts(self) -> None:
        """A key held to the batch lane gets no better one; a batch line stays a batch line."""
        capped, free = [Limits(lane=Lane.BATCH)], [Limits()]
        assert access.lane(capped, Lane.INTERACTIVE) is Lane.BATCH
        assert access.lane(free, Lane.BATCH) is Lane.BATCH
        assert access.lane(free, Lane.INTERACTIVE) is Lane.INTERACTIVE

    def test_the_least_of_what_is_set(self) -> None:
        """Zero is a limit; None is none."""
        assert access.least([None, 3, 0]) == 0
        assert access.least([None]) is None
