"""Who owns what a key makes, and what a key may do: pure rules over grants and limits.

An owner is a text that access checks compare and nothing else. It names the team, or else the user
together with the key, or else the key alone; two keys that have no team are therefore never equal
because of what both lack.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidemill.types import Account, Grant, Lane, Limits, Principal

ADMIN = "admin"
INFERENCE = "inference"
BATCH = "batch"
SCOPES = frozenset({ADMIN, INFERENCE, BATCH})
"""What a key may be for. A key without any scope is for ``inference`` and ``batch``."""

LOCAL = "local"
"""What runs here counts as a provider of this name."""


def owner(key_id: str, team_id: str | None = None, user_id: str | None = None) -> str:
    """The owner of what a key makes.

    >>> owner("key_1", team_id="team_a", user_id="user_b"), owner("key_1", user_id="user_b")
    ('team_a', 'user_b/key_1')
    """
    if team_id is not None:
        return team_id
    return key_id if user_id is None else f"{user_id}/{key_id}"


def trouble(grant: Grant, now: int) -> tuple[str, str] | None:
    """Why a key may do nothing any more, as a code and a sentence; None when it may."""
    key = grant.key
    if key.revoked_at is not None:
        return "key_revoked", "The API key was revoked."
    if key.expires_at is not None and key.expires_at <= now:
        return "key_expired", "The API key has expired."
    for account in accounts(grant):
        if account.closed_at is not None:
            return f"{account.kind}_closed", f"The {account.kind} of the API key was closed."
    return None


def accounts(grant: Grant) -> tuple[Account, ...]:
    """The team and the user of a key, as far as it has them."""
    return tuple(account for account in (grant.team, grant.user) if account is not None)


def principal(grant: Grant) -> Principal:
    """The principal that a key stands for."""
    key = grant.key
    return Principal(
        owner=key.owner,
        name=key.name,
        key_id=key.id,
        scopes=key.scopes,
        team_id=key.team_id,
        user_id=key.user_id,
        limits=limits(grant),
    )


def limits(grant: Grant) -> tuple[Limits, ...]:
    """The limits of a key, its team and its user."""
    return (grant.key.limits, *(account.limits for account in accounts(grant)))


def may(principal: Principal, scope: str) -> bool:
    """True when a principal's scopes cover ``scope``. Administration is never implied."""
    if not principal.scopes:
        return scope != ADMIN
    return scope in principal.scopes


def permits(limits: Iterable[Limits], model: str, provider: str | None = None) -> bool:
    """True when every one of ``limits`` allows a model at a provider.

    Without a provider: allowed somewhere, which is all that is known before a placement.

    >>> only = Limits(models=("gpt-*",), providers={"azure": ("gpt-5",), "local": ("*",)})
    >>> [
    ...     permits([only], m, p)
    ...     for m, p in [("gpt-5", "azure"), ("gpt-4", "azure"), ("llama", None)]
    ... ]
    [True, False, False]
    """
    return all(_permits(one, model, provider) for one in limits)


def _permits(limits: Limits, model: str, provider: str | None) -> bool:
    if limits.models is not None and not _named(model, limits.models):
        return False
    if limits.providers is None:
        return True
    if provider is not None:
        return _named(model, limits.providers.get(provider, ()))
    return any(_named(model, names) for names in limits.providers.values())


def _named(model: str, names: Iterable[str]) -> bool:
    return any(
        model.startswith(name[:-1]) if name.endswith("*") else model == name for name in names
    )


def uses(limits: Iterable[Limits], provider: str) -> bool:
    """True when every one of ``limits`` allows a provider for at least one model."""
    return all(one.providers is None or bool(one.providers.get(provider)) for one in limits)


def lane(limits: Iterable[Limits], wanted: Lane) -> Lane:
    """The lane that a request gets: never better than the ceiling of any limit."""
    return max([wanted, *(one.lane for one in limits)])


def least(values: Iterable[int | None]) -> int | None:
    """The smallest limit that is set; None when none is."""
    return min((value for value in values if value is not None), default=None)
