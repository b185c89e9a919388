"""Keys, teams and users for tests of the application, and clients that send them."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx

from tests.handlers.world import World
from tidemill import access, clock, ids
from tidemill.types import Account, AccountKind, KeyRecord, Limits

_UNLIMITED = Limits()


async def account(world: World, kind: AccountKind, name: str, limits: Limits) -> Account:
    """A new team or user; its id is its kind and name."""
    made = Account(kind=kind, id=f"{kind}_{name}", name=name, limits=limits, created_at=clock.now())
    await world.services.store.accounts.add(made)
    return made


async def key(
    world: World,
    *,
    team: Account | None = None,
    user: Account | None = None,
    limits: Limits = _UNLIMITED,
    scopes: frozenset[str] = frozenset(),
    expires_at: int | None = None,
) -> tuple[str, KeyRecord]:
    """A new key: its secret and its record."""
    secret, id = ids.key_secret(), ids.key_id()
    team_id = None if team is None else team.id
    user_id = None if user is None else user.id
    record = KeyRecord(
        id=id,
        name=id,
        owner=access.owner(id, team_id, user_id),
        prefix=secret[:6],
        digest=hashlib.sha256(secret.encode()).hexdigest(),
        scopes=scopes,
        created_at=clock.now(),
        expires_at=expires_at,
        team_id=team_id,
        user_id=user_id,
        limits=limits,
    )
    await world.services.store.keys.add(record)
    return secret, record


@asynccontextmanager
async def seen_by(world: World, secret: str) -> AsyncGenerator[World]:
    """The same application with a client that sends another key."""
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(world.app, raise_app_exceptions=False),  # type: ignore[arg-type]
        base_url="http://testserver",
        headers={"Authorization": f"Bearer {secret}"},
    ) as client:
        yield World(world.app, world.services, client, world.engine, secret, world.key)
