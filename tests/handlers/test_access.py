"""Who may call what: every route, with no key, a wrong key, and somebody else's."""

from __future__ import annotations

import httpx
import pytest

from tests.handlers.world import ALICE, BOB, Open, World
from tidemill import clock
from tidemill.handlers import MIRRORS
from tidemill.types import KeyRecord

pytestmark = pytest.mark.anyio

# Below every mirror that has batches: method, path, and whether it names an object of somebody.
BATCH_ROWS = (
    ("POST", "/files", False),
    ("GET", "/files", False),
    ("GET", "/files/{file_id}", True),
    ("DELETE", "/files/{file_id}", True),
    ("GET", "/files/{file_id}/content", True),
    ("HEAD", "/files/{file_id}/content", True),
    ("POST", "/batches", False),
    ("GET", "/batches", False),
    ("POST", "/batches/preflight", False),
    ("GET", "/batches/{batch_id}", True),
    ("POST", "/batches/{batch_id}/cancel", True),
    ("GET", "/batches/{batch_id}/results", True),
    ("GET", "/pool/status", False),
    ("GET", "/usage", False),
    ("GET", "/providers", False),
    ("DELETE", "/providers/{provider}/refusals", False),
)
INTERACTIVE_ROWS = (
    ("POST", "/chat/completions", False),
    ("POST", "/completions", False),
    ("POST", "/embeddings", False),
    ("POST", "/responses", False),
    ("GET", "/models", False),
    ("GET", "/models/{id}", False),
)
AZURE_ROWS = tuple(
    ("POST", "/deployments/{deployment}" + path, False) for _, path, _ in INTERACTIVE_ROWS[:4]
)
ADMIN_ROWS = (
    ("GET", "/keys", False),
    ("POST", "/keys", False),
    ("PATCH", "/keys/{id}", False),
    ("DELETE", "/keys/{id}", False),
    ("GET", "/usage", False),
    ("GET", "/audit", False),
    ("POST", "/batches/{batch_id}/cancel", False),
    ("GET", "/{kind}", False),
    ("POST", "/{kind}", False),
    ("PATCH", "/{kind}/{id}", False),
    ("DELETE", "/{kind}/{id}", False),
)
PUBLIC_ROWS = (("GET", "/health"), ("HEAD", "/health"), ("GET", "/metrics"))
MIRROR_ROWS = {
    "/v1": BATCH_ROWS + INTERACTIVE_ROWS,
    "/openai/v1": BATCH_ROWS + INTERACTIVE_ROWS + AZURE_ROWS,
    "/openai": BATCH_ROWS + INTERACTIVE_ROWS + AZURE_ROWS,
    "/jobs/v1": BATCH_ROWS,
    "/jobs/openai": BATCH_ROWS,
    "/openai/deployments/{deployment}": BATCH_ROWS,
    "/openai/v1/deployments/{deployment}": BATCH_ROWS,
}
ROWS = [
    (method, mirror + path, owned)
    for mirror, rows in MIRROR_ROWS.items()
    for method, path, owned in rows
] + [(method, "/admin/v1" + path, owned) for method, path, owned in ADMIN_ROWS]
NOBODY = {
    "file_id": "file-nobody",
    "batch_id": "batch_nobody",
    "id": "m",
    "deployment": "d",
    "kind": "teams",
    "provider": "nobody",
}


async def test_every_route_has_a_row(world: World) -> None:
    """A route that is added without saying who may call it fails here."""
    served = {
        (method, route.path_format)
        for route in world.app.routes
        for method in route.methods - {"OPTIONS"}  # type: ignore[attr-defined]
    }
    rows = {(method, path) for method, path, _ in ROWS} | set(PUBLIC_ROWS)
    assert served == rows
    assert {prefix.replace(":str", "") for prefix, _ in MIRRORS} == set(MIRROR_ROWS)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong-key-123"},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic " + ALICE},
        {"api-key": "wrong-key-123"},
        {"api-key": ""},
    ],
)
async def test_no_route_answers_without_a_key(world: World, headers: dict[str, str]) -> None:
    """Statements 16 to 24, 36, 225, 226: 401 in the envelope before body and id are looked at, and
    the key is not repeated."""
    transport = world.client._transport
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as anybody:
        for method, path, _ in ROWS:
            answer = await anybody.request(
                method, path.format(**NOBODY), headers=headers, content=b"{broken"
            )
            assert answer.status_code == 401, (method, path)
            assert answer.headers["x-request-id"]
            if method != "HEAD":
                error = answer.json()["error"]
                assert error["code"] == "invalid_api_key"
                assert set(error) == {"message", "type", "param", "code"}
            assert "wrong-key-123" not in answer.text
            assert ALICE not in answer.text


async def test_public_routes(world: World) -> None:
    """Health and metrics need no key."""
    transport = world.client._transport
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as anybody:
        for method, path in PUBLIC_ROWS:
            assert (await anybody.request(method, path)).status_code == 200


async def test_a_foreign_object_looks_like_none(world: World) -> None:
    """Statement 26, C81: the answer to somebody else's id is that to an id that never was."""
    batch = await world.create()
    await world.finished(batch["id"])
    theirs = {**NOBODY, "file_id": batch["input_file_id"], "batch_id": batch["id"]}
    for method, path, owned in ROWS:
        if not owned:
            continue
        foreign = await world.client.request(method, path.format(**theirs), headers=world.as_bob())
        unknown = await world.client.request(method, path.format(**NOBODY), headers=world.as_bob())
        assert foreign.status_code == unknown.status_code == 404, (method, path)
        for name in ("file_id", "batch_id"):
            theirs_hidden = foreign.text.replace(theirs[name], NOBODY[name])
            if name in path:
                assert theirs_hidden == unknown.text
    for path in ("/v1/files", "/v1/batches"):
        listed = await world.client.get(path, headers=world.as_bob())
        assert listed.json()["data"] == []
    created = await world.client.post(
        "/v1/batches",
        json={"input_file_id": theirs["file_id"], "endpoint": "/v1/chat/completions"},
        headers=world.as_bob(),
    )
    assert created.status_code == 400
    assert (await world.client.get(f"/v1/files/{theirs['file_id']}")).status_code == 200


async def test_both_headers_carry_the_same_key(world: World) -> None:
    """Statements 25, 215, 222, 229, 236: bearer in any case and ``api-key`` are one owner, on every
    surface, and one store is behind all."""
    file = await world.upload()
    transport = world.client._transport
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
        for headers in (
            {"authorization": f"bearer {world.key}"},
            {"Authorization": f"BEARER  {world.key}"},
            {"api-key": world.key},
        ):
            for mirror in MIRROR_ROWS:
                path = mirror.format(**NOBODY) + f"/files/{file['id']}"
                answer = await client.get(path, headers=headers, params={"api-version": "x"})
                assert answer.json() == file


async def test_stored_keys(world: World) -> None:
    """A key of the store is looked up by its digest; revoked and expired ones are refused."""
    import hashlib

    def record(secret: str, **more: int) -> KeyRecord:
        return KeyRecord(
            id="key_" + secret,
            name=secret,
            owner="carol",
            prefix=secret[:3],
            digest=hashlib.sha256(secret.encode()).hexdigest(),
            created_at=clock.now(),
            **more,
        )

    keys = world.services.store.keys
    await keys.add(record("good", expires_at=clock.now() + 1000))
    await keys.add(record("old", expires_at=clock.now() - 1))
    await keys.add(record("gone"))
    await keys.revoke("key_gone")

    async def status(secret: str) -> int:
        answer = await world.client.get("/v1/files", headers={"Authorization": f"Bearer {secret}"})
        return answer.status_code

    assert [await status(s) for s in ("good", "old", "gone", "none")] == [200, 401, 401, 401]


async def test_without_any_key_everybody_is_one_owner(open_world: Open) -> None:
    """No key configured: whatever a client sends, it is the owner ``local``."""
    async with open_world(api_keys="") as world:
        file = await world.upload()
        for headers in ({"Authorization": "Bearer x"}, {"api-key": "y"}, {"Authorization": ""}):
            answer = await world.client.get(f"/v1/files/{file['id']}", headers=headers)
            assert answer.status_code == 200


async def test_a_revoked_last_key_does_not_open_the_server(open_world: Open) -> None:
    """Revoking the only key shuts its holder out, not everybody in."""
    async with open_world(api_keys="") as world:
        await world.services.store.keys.add(
            KeyRecord(id="key_a", name="a", owner="a", prefix="a", digest="0", created_at=1)
        )
        await world.services.store.keys.revoke("key_a")
        assert (await world.client.get("/v1/files")).status_code == 401


async def test_owners_do_not_tell_their_key(world: World) -> None:
    """The owner of a key from the settings is not the key, and two keys are two owners."""
    from tidemill.handlers.identity import _configured

    owners = {who.owner for who in _configured(f"{ALICE}, {BOB},", "").values()}
    assert len(owners) == 2
    assert not any(ALICE in owner or BOB in owner for owner in owners)
