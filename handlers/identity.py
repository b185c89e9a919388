"""From a secret to a principal: keys of the settings, keys of the store, signed tokens."""

from __future__ import annotations

import hashlib
import hmac
from functools import lru_cache

import structlog

from tidemill import access, clock
from tidemill.errors import StoreUnavailable, Unauthenticated
from tidemill.ports import Store, Tokens
from tidemill.settings import Settings
from tidemill.types import Grant, Principal

log = structlog.get_logger()

LOCAL = Principal(owner="local", name="local")
"""Everybody, on a server without any key."""

USE_NOTED_EVERY_S = 60


class Identities:
    """Who a secret stands for, on one server."""

    def __init__(self, store: Store, settings: Settings, tokens: Tokens | None = None) -> None:
        self._store = store
        self._configured = _configured(settings.api_keys, settings.admin_key)
        self._tokens = tokens
        self._used: dict[str, int] = {}

    async def of(self, secret: str) -> Principal:
        """Raises ``Unauthenticated``; the secret is never repeated in the answer."""
        if secret:
            digest = hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
            if digest in self._configured:
                return self._configured[digest]
            key = await self._store.keys.find(digest)
            if key is not None and hmac.compare_digest(key.digest, digest):
                belongs = key.team_id is not None or key.user_id is not None
                grant = await self._store.accounts.grant(key.id) if belongs else None
                return await self._granted(grant or Grant(key=key))
            if self._tokens is not None and secret.count(".") == 2:
                return await self._granted(await self._tokens.grant(secret))
        if await self.open_to_all():
            return LOCAL
        if secret:
            raise Unauthenticated("The API key is not valid on this server.")
        raise Unauthenticated(
            "No API key was sent. Send 'Authorization: Bearer <key>' or 'api-key: <key>'."
        )

    async def open_to_all(self) -> bool:
        """True on a server that never had a key: whoever reaches it is one owner.

        Revoked keys count: revoking the last one must not open the server to everybody.
        """
        if self._configured or self._tokens is not None:
            return False
        return not await self._store.keys.page()

    async def _granted(self, grant: Grant) -> Principal:
        now = clock.now()
        trouble = access.trouble(grant, now)
        if trouble is not None:
            raise Unauthenticated(trouble[1])
        await self._note_use(grant.key.id, now)
        return access.principal(grant)

    async def _note_use(self, key_id: str, now: int) -> None:
        """At most one write a minute and key, and never a reason to refuse a request."""
        if now - self._used.get(key_id, 0) < USE_NOTED_EVERY_S:
            return
        self._used[key_id] = now
        try:
            await self._store.keys.touch({key_id: now})
        except StoreUnavailable as exc:
            log.warning("the last use of a key was not noted", key=key_id, error=exc.message)


@lru_cache(maxsize=8)
def _configured(api_keys: str, admin_key: str) -> dict[str, Principal]:
    """The keys of the settings, by digest; each is an owner of its own."""
    table = {}
    for secret in filter(None, (part.strip() for part in api_keys.split(","))):
        owner = "env-" + hashlib.sha256(b"owner:" + secret.encode()).hexdigest()[:24]
        table[_digest(secret)] = Principal(owner=owner, name=owner)
    if admin_key.strip():
        table[_digest(admin_key.strip())] = Principal(
            owner="env-admin", name="env-admin", scopes=frozenset({access.ADMIN})
        )
    return table


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
