"""Every route for every kind of principal, in one table.

The rows are those of ``test_access``, which fails when a route is added without one.
"""

from __future__ import annotations

import httpx
import pytest

from tests.handlers.principals import account, key, seen_by
from tests.handlers.test_access import (
    BATCH_ROWS,
    MIRROR_ROWS,
    NOBODY,
    ROWS,
)
from tests.handlers.test_issued_tokens import AUDIENCES, ISSUER, Issuer
from tests.handlers.world import World
from tidemill import clock, ids
from tidemill.handlers.identity import Identities
from tidemill.handlers.issued import IssuedTokens
from tidemill.settings import Settings
from tidemill.types import Limits

pytestmark = pytest.mark.anyio

ANY_SCOPE = frozenset({"/pool/status", "/usage", "/providers", "/models", "/models/{id}"})
"""Routes that every key may call, below a mirror."""
ADMIN_SCOPE = frozenset({"/providers/{provider}/refusals"})

PLAIN = frozenset({"batch", "inference"})
ALL = PLAIN | {"admin"}
NOT_KNOWN = None

# Kind of principal: whose objects are its own, and the scopes it has.
KINDS: dict[str, tuple[str | None, frozenset[str]]] = {
    "maker": ("team", PLAIN),
    "teammate": ("team", PLAIN),
    "teammate for batches": ("team", frozenset({"batch"})),
    "teammate for inference": ("team", frozenset({"inference"})),
    "token of the team": ("team", PLAIN),
    "other team": ("other team", PLAIN),
    "token of the other team": ("other team", PLAIN),
    "token of an administrator": ("other team", ALL),
    "personal key": ("user and key", PLAIN),
    "other key of the user": ("user and other key", PLAIN),
    "key of nobody": ("key", PLAIN),
    "other key of nobody": ("other key", PLAIN),
    "administrator": ("administrator", frozenset({"admin"})),
    "key of the settings": ("setting", PLAIN),
    "administrator of the settings": ("other setting", frozenset({"admin"})),
    "revoked teammate": (NOT_KNOWN, frozenset()),
    "expired teammate": (NOT_KNOWN, frozenset()),
    "key of a closed team": (NOT_KNOWN, frozenset()),
    "teammate whose user is closed": (NOT_KNOWN, frozenset()),
    "forged token of the team": (NOT_KNOWN, frozenset()),
    "unknown key": (NOT_KNOWN, frozenset()),
}
MAKERS = ("maker", "personal key", "key of nobody", "key of the settings")


@pytest.fixture
async def secrets(world: World, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What each kind sends."""
    name = ids.key_id()
    store = world.services.store
    lab = await account(world, "team", f"lab{name}", Limits())
    other = await account(world, "team", f"other{name}", Limits())
    closed = await account(world, "team", f"closed{name}", Limits())
    ada = await account(world, "user", f"ada{name}", Limits())
    gone = await account(world, "user", f"gone{name}", Limits())
    await store.accounts.close(closed.id)
    await store.accounts.close(gone.id)
    keys = {
        "maker": await key(world, team=lab, user=ada),
        "teammate": await key(world, team=lab),
        "teammate for batches": await key(world, team=lab, scopes=frozenset({"batch"})),
        "teammate for inference": await key(world, team=lab, scopes=frozenset({"inference"})),
        "other team": await key(world, team=other),
        "personal key": await key(world, user=ada),
        "other key of the user": await key(world, user=ada),
        "key of nobody": await key(world),
        "other key of nobody": await key(world),
        "administrator": await key(world, scopes=frozenset({"admin"})),
        "revoked teammate": await key(world, team=lab),
        "expired teammate": await key(world, team=lab, expires_at=clock.now() - 1),
        "key of a closed team": await key(world, team=closed),
        "teammate whose user is closed": await key(world, team=lab, user=gone),
    }
    await store.keys.revoke(keys["revoked teammate"][1].id)
    issuer, forger = Issuer(), Issuer()
    trusted = Settings(
        oidc_issuer=ISSUER,
        oidc_audience=AUDIENCES[1],
        oidc_team_claim="groups",
        oidc_admin_role="Admin",
    )
    tokens = IssuedTokens(trusted, store, httpx.MockTransport(issuer.answer))
    mine, admin = f"setting-{name}", f"other-setting-{name}"
    settings = Settings(api_keys=mine, admin_key=admin)
    identities = Identities(store, settings, tokens)
    # Who is who is asked anew: the shared application knows no issuer.
    monkeypatch.setattr(world.services.identities, "of", identities.of)
    return {
        **{kind: secret for kind, (secret, _) in keys.items()},
        "token of the team": issuer.token(groups=lab.id),
        "token of the other team": issuer.token(groups=other.name),
        "token of an administrator": issuer.token(groups=other.id, roles=["Admin"]),
        "forged token of the team": forger.token(groups=lab.id),
        "key of the settings": mine,
        "administrator of the settings": admin,
        "unknown key": ids.key_secret(),
    }


async def _made(world: World, secret: str) -> dict[str, str]:
    """A finished batch of whoever has the secret, with its files."""
    async with seen_by(world, secret) as mine:
        batch = await mine.create()
        return await mine.finished(batch["id"])


def _scope(path: str) -> str | None:
    if path.startswith("/admin/v1/"):
        return "admin"
    mirror = max((m for m in MIRROR_ROWS if path.startswith(m + "/")), key=len)
    rest = path.removeprefix(mirror)
    if rest in ADMIN_SCOPE:
        return "admin"
    if rest in ANY_SCOPE:
        return None
    return "batch" if any(rest == row for _, row, _ in BATCH_ROWS) else "inference"


@pytest.mark.parametrize("kind", KINDS)
async def test_every_route_for(world: World, secrets: dict[str, str], kind: str) -> None:
    """401 for who is not known, 403 for what a key is not for, 404 for what is not its owner's,
    whoever that is: a team, a user with a key, or a key alone."""
    owner, scopes = KINDS[kind]
    for maker in MAKERS:
        owns = owner is not NOT_KNOWN and owner == KINDS[maker][0]
        batch = await _made(world, secrets[maker])
        theirs = {**NOBODY, "file_id": batch["output_file_id"], "batch_id": batch["id"]}
        # What deletes comes last: the object is needed until then.
        rows = sorted(ROWS, key=lambda row: row[0] == "DELETE")
        deleted = False
        async with seen_by(world, secrets[kind]) as asker:
            for method, path, owned in rows:
                if not owned and maker != MAKERS[0]:
                    continue  # it names no object
                scope = _scope(path)
                answer = await asker.client.request(
                    method, path.format(**theirs), content=b"{broken"
                )
                where = (maker, method, path, answer.status_code)
                if owner is NOT_KNOWN:
                    assert answer.status_code == 401, where
                elif scope is not None and scope not in scopes:
                    assert answer.status_code == 403, where
                elif owned and (not owns or deleted):
                    assert answer.status_code == 404, where
                else:
                    assert answer.status_code not in (401, 403), where
                    if owned:
                        # Cancelling what has ended is a conflict, and so not hidden.
                        assert answer.status_code in (200, 409), where
                        deleted = deleted or method == "DELETE"
        assert deleted == (owns and "batch" in scopes)
    assert {_scope(path) for _, path, _ in ROWS} == {None, "admin", "batch", "inference"}


KNOWN = [kind for kind, (owner, scopes) in KINDS.items() if owner and "batch" in scopes]


@pytest.mark.parametrize("kind", KNOWN)
async def test_lists_and_creates_show_only_ones_own(
    world: World, secrets: dict[str, str], kind: str
) -> None:
    """On every mirror: input and result files, batches and usage; and a foreign file makes no
    batch and is not examined."""
    batch = await _made(world, secrets["maker"])
    files = {batch["input_file_id"], batch["output_file_id"]}
    owns = KINDS[kind][0] == KINDS["maker"][0]
    async with seen_by(world, secrets[kind]) as asker:
        for mirror in (mirror.format(**NOBODY) for mirror in MIRROR_ROWS):
            listed = {
                path: (await asker.client.get(f"{mirror}/{path}")).json()["data"]
                for path in ("files", "batches", "usage")
            }
            assert ({one["id"] for one in listed["files"]} & files) == (files if owns else set())
            assert ([one["id"] for one in listed["batches"]] == [batch["id"]]) is owns
            assert bool(listed["usage"]) is owns
            if owns:
                continue
            for file in (batch["input_file_id"], "file-nobody"):
                asked = {"input_file_id": file, "endpoint": "/v1/chat/completions"}
                answer = await asker.client.post(f"{mirror}/batches", json=asked)
                assert answer.status_code == 400
                assert answer.json()["error"]["message"].startswith(f"Cannot find file {file}")
                answer = await asker.client.post(f"{mirror}/batches/preflight", json=asked)
                assert answer.status_code == 404
            for path, cursor in (("files", batch["output_file_id"]), ("batches", batch["id"])):
                for after in (cursor, cursor[::-1]):
                    answer = await asker.client.get(f"{mirror}/{path}", params={"after": after})
                    assert answer.json()["data"] == []
