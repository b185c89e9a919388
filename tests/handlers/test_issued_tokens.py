"""Signed tokens of an identity provider in the place of keys."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from tidemill import access
from tidemill.errors import Forbidden, SettingsError, Unauthenticated
from tidemill.handlers import issued
from tidemill.handlers.identity import Identities
from tidemill.handlers.issued import IssuedTokens
from tidemill.ports import Store
from tidemill.settings import Settings
from tidemill.storage import open_store
from tidemill.types import Account, Limits

pytestmark = pytest.mark.anyio

ISSUER = "https://login.example/tenant/v2.0"
AUDIENCES = ("https://cognitiveservices.azure.com", "https://ai.azure.com")


class Issuer:
    """Publishes keys and signs tokens; counts who asks."""

    def __init__(self) -> None:
        self.keys: dict[str, rsa.RSAPrivateKey] = {}
        self.asked: list[str] = []
        self.down = False
        self.rotate("first")

    def rotate(self, kid: str) -> None:
        self.keys = {kid: rsa.generate_private_key(65537, 2048)}

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.path)
        if self.down:
            return httpx.Response(503)
        if request.url.path.endswith("openid-configuration"):
            return httpx.Response(200, json={"jwks_uri": "https://login.example/keys"})
        keys = [
            {**jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": kid}
            for kid, key in self.keys.items()
        ]
        return httpx.Response(200, json={"keys": keys})

    def token(self, kid: str | None = None, **changes: Any) -> str:
        now = int(time.time())
        claims = {"iss": ISSUER, "aud": AUDIENCES[1], "sub": "ada", "exp": now + 300, "iat": now}
        [(known, key)] = self.keys.items()
        content = {name: value for name, value in (claims | changes).items() if value is not None}
        return jwt.encode(content, key, algorithm="RS256", headers={"kid": kid or known})


@pytest.fixture
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture
async def store(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Store]:
    store = open_store(tmp_path / "store")
    await store.start()
    limits = Limits(models=("m",))
    await store.accounts.add(Account(kind="team", id="team_1", name="lab", limits=limits))
    yield store
    await store.close()


def _tokens(store: Store, issuer: Issuer, **changes: Any) -> IssuedTokens:
    settings = Settings(**{"oidc_issuer": ISSUER, "oidc_audience": ", ".join(AUDIENCES), **changes})
    return IssuedTokens(settings, store, httpx.MockTransport(issuer.answer))


async def test_a_subject_is_one_owner(store: Store, issuer: Issuer) -> None:
    """Token after token, for either audience; another subject is somebody else."""
    tokens = _tokens(store, issuer)
    one = await tokens.grant(issuer.token())
    again = await tokens.grant(issuer.token(aud=AUDIENCES[0], iat=1))
    other = await tokens.grant(issuer.token(sub="bob"))
    assert one.key.owner == again.key.owner != other.key.owner
    assert not one.key.scopes
    assert len(await store.keys.page()) == 2
    assert issuer.asked == ["/tenant/v2.0/.well-known/openid-configuration", "/keys"]


async def test_a_claim_names_the_team(store: Store, issuer: Issuer) -> None:
    """By name or id, alone or among others; the team owns, and its limits hold."""
    tokens = _tokens(store, issuer, oidc_team_claim="groups")
    for named in ("lab", "team_1", ["nobody", "lab"]):
        grant = await tokens.grant(issuer.token(groups=named))
        who = access.principal(grant)
        assert who.owner == "team_1"
        assert not access.permits(who.limits, "other")
    for named in (None, "nobody", [], [3], {"a": 1}):
        with pytest.raises(Forbidden):
            await tokens.grant(issuer.token(groups=named))
    await store.accounts.close("team_1")
    with pytest.raises(Forbidden):
        await tokens.grant(issuer.token(groups="lab"))


async def test_a_role_administers_only_while_the_token_says_so(
    store: Store, issuer: Issuer
) -> None:
    """The key that the token leads to has no scope of its own."""
    tokens = _tokens(store, issuer, oidc_admin_role="Tidemill.Admin")
    admin = await tokens.grant(issuer.token(roles=["Other", "Tidemill.Admin"]))
    assert access.may(access.principal(admin), access.ADMIN)
    plain = await tokens.grant(issuer.token(roles=["Other"]))
    assert plain.key.id == admin.key.id
    assert not access.may(access.principal(plain), access.ADMIN)


@pytest.mark.parametrize(
    "changes",
    [
        {"exp": 1},
        {"exp": None},
        {"nbf": 2**33},
        {"iss": "https://login.example/other"},
        {"iss": None},
        {"aud": "https://graph.microsoft.com"},
        {"aud": None},
        {"sub": None},
        {"sub": ""},
        {"kid": "second"},
    ],
    ids=str,
)
async def test_a_wrong_token_is_refused(
    store: Store, issuer: Issuer, changes: dict[str, Any]
) -> None:
    """Times, issuer, audience, subject and signing key must all be right."""
    tokens = _tokens(store, issuer)
    with pytest.raises(Unauthenticated):
        await tokens.grant(issuer.token(**changes))
    assert await store.keys.page() == []


async def test_a_token_that_anybody_can_sign_is_refused(store: Store, issuer: Issuer) -> None:
    """No algorithm, or the public key as a shared secret."""
    tokens = _tokens(store, issuer)
    claims = jwt.decode(issuer.token(), options={"verify_signature": False})
    unsigned = jwt.encode(claims, None, algorithm="none", headers={"kid": "first"})
    shared = jwt.encode(claims, "s" * 64, algorithm="HS256", headers={"kid": "first"})
    for token in (unsigned, shared, issuer.token()[:-8] + "AAAAAAAA", "a.b.c", ".."):
        with pytest.raises(Unauthenticated) as caught:
            await tokens.grant(token)
        assert token not in caught.value.message or len(token) < 6


async def test_new_signing_keys_are_found_but_not_asked_for_each_time(
    store: Store, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a rotation the keys are read again, at most once in a while."""
    now = [1000.0]
    monkeypatch.setattr(issued.clock, "monotonic", lambda: now[0])
    tokens = _tokens(store, issuer, oidc_jwks_url="https://login.example/keys")
    await tokens.grant(issuer.token())
    issuer.rotate("second")
    for _ in range(3):
        with pytest.raises(Unauthenticated):
            await tokens.grant(issuer.token())
    assert issuer.asked == ["/keys"]
    now[0] += issued.LOOK_AGAIN_S
    await tokens.grant(issuer.token())
    assert issuer.asked == ["/keys", "/keys"]


async def test_an_issuer_that_is_away_stops_nobody_it_has_signed_for(
    store: Store, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys that are known go on; without any, the answer is 401 and no 500."""
    now = [1000.0]
    monkeypatch.setattr(issued.clock, "monotonic", lambda: now[0])
    tokens = _tokens(store, issuer)
    await tokens.grant(issuer.token())
    issuer.down = True
    now[0] += issued.KEYS_LAST_S
    await tokens.grant(issuer.token())
    with pytest.raises(Unauthenticated):
        await _tokens(store, issuer).grant(issuer.token())


async def test_keys_and_tokens_stand_side_by_side(store: Store, issuer: Issuer) -> None:
    """A revoked subject is out; a server with an issuer has no anonymous owner."""
    settings = Settings(api_keys="a-key-of-the-settings")
    identities = Identities(store, settings, _tokens(store, issuer))
    who = await identities.of(issuer.token())
    assert who.key_id is not None
    assert (await identities.of("a-key-of-the-settings")).owner != who.owner
    assert await store.keys.revoke(who.key_id)
    with pytest.raises(Unauthenticated, match="revoked"):
        await identities.of(issuer.token())
    alone = Identities(store, Settings(), _tokens(store, issuer))
    with pytest.raises(Unauthenticated):
        await alone.of("")


def test_an_issuer_needs_an_audience(issuer: Issuer) -> None:
    """A token for some other service must not open this one."""
    with pytest.raises(SettingsError, match="oidc_audience"):
        _tokens(None, issuer, oidc_audience=" ,")  # type: ignore[arg-type]
