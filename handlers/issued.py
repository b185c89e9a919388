"""Signed tokens (OpenID Connect, e.g. Entra ID) as keys.

A token is right when its signature is one of the issuer's, and issuer, audience and times fit. Its
subject becomes a key of the store when it is first seen, so that limits, budgets, revocation and
the ledger treat it as any other key. The key has no secret: only tokens lead to it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import anyio
import httpx
import msgspec
import structlog

from tidemill import access, clock
from tidemill.errors import Forbidden, InvariantBroken, SettingsError, Unauthenticated
from tidemill.ports import Store
from tidemill.settings import Settings
from tidemill.types import Actor, Grant, KeyRecord

log = structlog.get_logger()

ALGORITHMS = (
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    "ES256",
    "ES384",
    "ES512",
    "EdDSA",
)
"""Only those whose verifying key cannot sign."""
KEYS_LAST_S = 3600.0
LOOK_AGAIN_S = 30.0
"""A token may name a key that is newer than our copy; nobody can make us ask more often."""
LEEWAY_S = 60
TIMEOUT_S = 10.0


class IssuedTokens:
    """``ports.Tokens`` for the issuer of the settings."""

    def __init__(
        self, settings: Settings, store: Store, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """Raises ``SettingsError`` where the library is missing or no audience is set."""
        try:
            import jwt
        except ImportError as exc:
            raise SettingsError(
                "The setting 'oidc_issuer' needs a package that is not installed; install "
                "tidemill[oidc]."
            ) from exc
        self._jwt = jwt
        self._settings = settings
        self._store = store
        self._transport = transport
        self._audiences = [
            part.strip() for part in settings.oidc_audience.split(",") if part.strip()
        ]
        if not self._audiences:
            raise SettingsError("The setting 'oidc_issuer' needs 'oidc_audience' beside it.")
        self._keys: dict[str, Any] = {}
        self._read_at = -KEYS_LAST_S
        self._reading = anyio.Lock()

    async def grant(self, token: str) -> Grant:
        """What a token grants. Raises ``Unauthenticated`` and ``Forbidden``."""
        claims = await self._claims(token)
        team = await self._team(claims)
        subject = claims.get("sub")
        if not isinstance(subject, str) or not subject:
            raise Unauthenticated("The token names no subject.")
        grant = await self._key(subject, team)
        roles = claims.get(self._settings.oidc_roles_claim)
        roles = [roles] if isinstance(roles, str) else roles
        admin = self._settings.oidc_admin_role
        if admin and isinstance(roles, list) and admin in roles:
            # What a token says holds for the token, not for the key that it leads to.
            key = msgspec.structs.replace(grant.key, scopes=access.SCOPES)
            return msgspec.structs.replace(grant, key=key)
        return grant

    async def _claims(self, token: str) -> dict[str, Any]:
        jwt = self._jwt
        try:
            key = await self._signer(jwt.get_unverified_header(token).get("kid"))
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=list(ALGORITHMS),
                audience=self._audiences,
                issuer=self._settings.oidc_issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except jwt.ExpiredSignatureError:
            raise Unauthenticated("The token has expired.") from None
        except jwt.PyJWTError:
            # The library's words can repeat parts of the token.
            raise Unauthenticated("The token is not valid on this server.") from None
        return claims

    async def _signer(self, kid: Any) -> Any:
        """The issuer's key of this id; read anew when it is unknown or our copy is old."""
        async with self._reading:
            age = clock.monotonic() - self._read_at
            if age >= KEYS_LAST_S or (kid not in self._keys and age >= LOOK_AGAIN_S):
                await self._read()
        if kid not in self._keys:
            raise Unauthenticated("The token is not valid on this server.")
        return self._keys[kid]

    async def _read(self) -> None:
        url = self._settings.oidc_jwks_url
        try:
            async with httpx.AsyncClient(timeout=TIMEOUT_S, transport=self._transport) as client:
                if not url:
                    root = self._settings.oidc_issuer.rstrip("/")
                    found = await client.get(f"{root}/.well-known/openid-configuration")
                    url = found.raise_for_status().json()["jwks_uri"]
                answer = (await client.get(url)).raise_for_status().json()
            keys = self._jwt.PyJWKSet.from_dict(answer).keys
            self._keys = {key.key_id: key for key in keys if key.key_id}
        except (httpx.HTTPError, self._jwt.PyJWTError, ValueError, KeyError, TypeError) as exc:
            # Those that we have go on; without any, every token is refused until they can be read.
            log.warning("the issuer's keys cannot be read", error=type(exc).__name__)
        self._read_at = clock.monotonic()

    async def _team(self, claims: dict[str, Any]) -> str | None:
        claim = self._settings.oidc_team_claim
        if not claim:
            return None
        named = claims.get(claim)
        names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
        for name in names:
            team = await self._store.accounts.get("team", name) if isinstance(name, str) else None
            if team is not None and team.closed_at is None:
                return team.id
        raise Forbidden("The token names no team that this server knows.")

    async def _key(self, subject: str, team_id: str | None) -> Grant:
        parts = msgspec.json.encode([self._settings.oidc_issuer, subject, team_id])
        id = "oidc_" + hashlib.sha256(parts).hexdigest()[:24]
        grant = await self._store.accounts.grant(id)
        if grant is not None:
            return grant
        key = KeyRecord(
            id=id,
            name=subject[:100],
            owner=access.owner(id, team_id),
            prefix="",
            # No secret has this digest: a digest is hexadecimal.
            digest=f"token:{id}",
            created_at=clock.now(),
            team_id=team_id,
        )
        try:
            await self._store.keys.add(key, Actor(id=id))
        except InvariantBroken:
            log.debug("a token's subject came twice at once", key=id)
        return await self._store.accounts.grant(id) or Grant(key=key)
