"""Every route for every kind of principal, in one table.

The rows are those of ``test_access``, which fails when a route is added without one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from tests.handlers.principals import account, key, seen_by
from tests.handlers.test_access import (
    BATCH_ROWS,
    MIRROR_ROWS,
    NOBODY,
    ROWS,
)
from tests.handlers.world import World
from tidemill import clock, ids
from tidemill.types import Limits

pytestmark = pytest.mark.anyio

ANY_SCOPE = frozenset({"/pool/status", "/usage", "/providers", "/models", "/models/{id}"})
"""Routes that every key may call, below a mirror."""
ADMIN_SCOPE = frozenset({"/providers/{provider}/refusals"})

Table = dict[str, World]

# Kind of principal: whether it is known, whether it owns what the team made, the scopes it has.
KINDS: dict[str, tuple[bool, bool, frozenset[str]]] = {
    "maker": (True, True, frozenset({"batch", "inference"})),
    "teammate": (True, True, frozenset({"batch", "inference"})),
    "same user outside the team": (True, False, frozenset({"batch", "inference"})),
    "other team": (True, False, frozenset({"batch", "inference"})),
    "key without a team": (True, False, frozenset({"batch", "inference"})),
    "teammate for batches": (True, True, frozenset({"batch"})),
    "teammate for inference": (True, True, frozenset({"inference"})),
    "administrator": (True, False, frozenset({"admin"})),
    "revoked teammate": (False, False, frozenset()),
    "expired teammate": (False, False, frozenset()),
    "closed team": (False, False, frozenset()),
    "unknown key": (False, False, frozenset()),
}


@pytest.fixture
async def secrets(world: World) -> dict[str, str]:
    """A key of each kind."""
    name = ids.key_id()
    store = world.services.store
    lab = await account(world, "team", f"lab{name}", Limits())
    other = await account(world, "team", f"other{name}", Limits())
    closed = await account(world, "team", f"closed{name}", Limits())
    ada = await account(world, "user", f"ada{name}", Limits())
    await store.accounts.close(closed.id)
    made = {
        "maker": await key(world, team=lab, user=ada),
        "teammate": await key(world, team=lab),
        "same user outside the team": await key(world, user=ada),
        "other team": await key(world, team=other),
        "key without a team": await key(world),
        "teammate for batches": await key(world, team=lab, scopes=frozenset({"batch"})),
        "teammate for inference": await key(world, team=lab, scopes=frozenset({"inference"})),
        "administrator": await key(world, scopes=frozenset({"admin"})),
        "revoked teammate": await key(world, team=lab),
        "expired teammate": await key(world, team=lab, expires_at=clock.now() - 1),
        "closed team": await key(world, team=closed),
    }
    await store.keys.revoke(made["revoked teammate"][1].id)
    return {**{kind: secret for kind, (secret, _) in made.items()}, "unknown key": ids.key_secret()}


@pytest.fixture
async def batch(world: World, secrets: dict[str, str]) -> AsyncGenerator[dict[str, str]]:
    """What the maker made: a finished batch and its files."""
    async with seen_by(world, secrets["maker"]) as mine:
        made = await mine.create()
        yield await mine.finished(made["id"])


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
async def test_every_route_for(
    world: World, secrets: dict[str, str], batch: dict[str, str], kind: str
) -> None:
    """401 for who is not known, 403 for what a key is not for, 404 for what is not its owner's."""
    known, owns, scopes = KINDS[kind]
    theirs = {**NOBODY, "file_id": batch["output_file_id"], "batch_id": batch["id"]}
    # What deletes comes last: the object is needed until then.
    rows = sorted(ROWS, key=lambda row: row[0] == "DELETE")
    deleted = False
    async with seen_by(world, secrets[kind]) as asker:
        for method, path, owned in rows:
            scope = _scope(path)
            answer = await asker.client.request(method, path.format(**theirs), content=b"{broken")
            where = (method, path, answer.status_code)
            if not known:
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
    assert {_scope(path) for _, path, _ in ROWS} == {None, "admin", "batch", "inference"}


@pytest.mark.parametrize("kind", ["same user outside the team", "other team", "key without a team"])
async def test_lists_and_creates_show_only_ones_own(
    world: World, secrets: dict[str, str], batch: dict[str, str], kind: str
) -> None:
    """Input and result files, batches and usage; and a foreign file makes no batch."""
    async with seen_by(world, secrets[kind]) as asker:
        for path in ("files", "batches", "usage"):
            assert (await asker.client.get(f"/v1/{path}")).json()["data"] == [], path
        for file in (batch["input_file_id"], "file-nobody"):
            answer = await asker.client.post(
                "/v1/batches",
                json={
                    "input_file_id": file,
                    "endpoint": "/v1/chat/completions",
                    "completion_window": "24h",
                },
            )
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(f"Cannot find file {file}")
    async with seen_by(world, secrets["teammate"]) as mate:
        listed = (await mate.client.get("/v1/files")).json()["data"]
        assert {one["id"] for one in listed} == {batch["input_file_id"], batch["output_file_id"]}
