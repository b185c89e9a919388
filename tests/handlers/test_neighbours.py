"""A server without keys, and the browser on the same machine."""

from __future__ import annotations

import hashlib

import pytest
from structlog.testing import capture_logs

from tests.handlers.world import Open, World
from tidemill import clock, ids
from tidemill.types import KeyRecord

pytestmark = pytest.mark.anyio

HERE = [
    "localhost",
    "localhost:10900",
    "127.0.0.1:10900",
    "127.1.2.3",
    "[::1]:10900",
    "a.localhost",
]
ELSEWHERE = ["evil.example", "evil.example:10900", "localhost.evil.example", "192.168.1.2", "[::2]"]


async def status(world: World, **headers: str) -> int:
    sent = await world.client.get("/v1/files", headers={"Authorization": "", **headers})
    if sent.status_code == 403:
        assert sent.json()["error"]["code"] == "untrusted_origin"
        assert "TIDEMILL_API_KEYS" in sent.json()["error"]["message"]
    return sent.status_code


async def test_only_this_machine_s_names_are_answered(open_world: Open) -> None:
    """A page whose name was pointed at this machine asks for that name."""
    async with open_world(api_keys="") as world:
        for host in HERE:
            assert await status(world, host=host) == 200, host
        for host in ELSEWHERE:
            assert await status(world, host=host) == 403, host


async def test_only_this_machine_s_pages_are_answered(open_world: Open) -> None:
    """A form that a page elsewhere sends here runs nothing; pages of this machine may."""
    async with open_world(api_keys="") as world:
        for host in HERE:
            assert await status(world, origin=f"http://{host}") == 200, host
        for origin in ("null", *(f"https://{host}" for host in ELSEWHERE), "http://[broken"):
            assert await status(world, origin=origin) == 403, origin
        assert await status(world, origin="app://chat") == 200
        answer = await world.client.post(
            "/v1/files",
            data={"purpose": "batch"},
            files={"file": ("in.jsonl", b"{}")},
            headers={"Authorization": "", "Origin": "https://evil.example"},
        )
        assert answer.status_code == 403


async def test_a_key_or_the_owner_s_word_lifts_it(world: World, open_world: Open) -> None:
    """A page cannot know a key; and ``--insecure`` says that everybody may come in."""
    answer = await world.client.get(
        "/v1/files", headers={"Host": "tides.example", "Origin": "https://tides.example"}
    )
    assert answer.status_code == 200
    async with open_world(api_keys="", insecure=True) as open_to_all:
        assert await status(open_to_all, host="tides.example") == 200


@pytest.mark.parametrize(
    ("settings", "reach"),
    [
        ({}, "this machine only"),
        ({"listen_ip": "::1"}, "this machine only"),
        ({"listen_ip": "0.0.0.0", "insecure": True}, "everybody"),
    ],
)
async def test_a_server_without_keys_says_who_can_reach_it(
    open_world: Open, settings: dict[str, object], reach: str
) -> None:
    """By default this machine alone; elsewhere only by the owner's word."""
    with capture_logs() as logs:
        async with open_world(api_keys="", **settings):
            pass
    assert [log["event"] for log in logs if "API key" in log["event"]] == [
        f"no API key is configured: the server answers {reach}, all as one owner"
    ]


async def test_a_server_says_whom_it_lets_in(open_world: Open) -> None:
    """Everybody while it never had a key; nobody once the last one is revoked. What was made before
    the first key is there for a key of the owner ``local``."""
    secret = ids.key_secret()
    key = KeyRecord(
        id=ids.key_id(),
        name="me",
        owner="local",
        prefix=secret[:6],
        digest=hashlib.sha256(secret.encode()).hexdigest(),
        created_at=clock.now(),
    )
    with capture_logs() as logs:
        async with open_world(api_keys="") as world:
            batch = await world.create()
            keys = world.services.store.keys
            await keys.add(key)
            path, mine = f"/v1/batches/{batch['id']}", {"Authorization": f"Bearer {secret}"}
            assert (await world.client.get(path)).status_code == 401
            assert (await world.client.get(path, headers=mine)).status_code == 200
            assert await keys.revoke(key.id)
    assert [log["event"] for log in logs if "API key" in log["event"]] == [
        "no API key is configured: the server answers this machine only, all as one owner"
    ]
    with capture_logs() as logs:
        async with open_world(api_keys="") as world:
            assert (await world.client.get(path)).status_code == 401
            assert (await world.client.get(path, headers=mine)).status_code == 401
    assert [log["event"] for log in logs if "API key" in log["event"]] == [
        "every API key is revoked: nobody is let in until one is added"
    ]
