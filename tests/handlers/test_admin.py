"""The administrator's API, usage reports and the audit trail."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tests.handlers.principals import account, key, seen_by
from tests.handlers.world import Open, World, line
from tidemill.reports import COLUMNS, GROUPINGS
from tidemill.types import Limits

pytestmark = pytest.mark.anyio

ADMIN = "the-admin-key-of-the-environment"
CHAT = {"model": "echo", "messages": [{"role": "user", "content": "hi there"}]}


@pytest.fixture
async def admin(open_world: Open, tmp_path: Path) -> AsyncGenerator[World]:
    """An application with priced tokens, seen by whoever has the administrator's key."""
    prices = tmp_path / "prices.toml"
    prices.write_text('[models."local/echo"]\ninput = 1\noutput = 1\n', encoding="utf-8")
    async with (
        open_world(admin_key=ADMIN, prices=str(prices)) as world,
        seen_by(world, ADMIN) as it,
    ):
        yield it


async def _ok(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


class TestAccounts:
    async def test_a_team_gets_keys_that_work_at_once(self, admin: World) -> None:
        """Team, user and key are made over HTTP; the secret is shown once."""
        client = admin.client
        team = await _ok(
            await client.post("/admin/v1/teams", json={"name": "lab", "limits": {"lane": "batch"}})
        )
        user = await _ok(await client.post("/admin/v1/users", json={"name": "ada"}))
        made = await _ok(
            await client.post(
                "/admin/v1/keys", json={"name": "k", "team": "lab", "user": user["id"], "days": 2}
            )
        )
        secret = made.pop("secret")
        assert made["owner"] == team["id"]
        assert secret.startswith(made["prefix"])
        async with seen_by(admin, secret) as mine:
            file = await mine.upload()
        listed = await _ok(await client.get("/admin/v1/keys"))
        assert [one["id"] for one in listed["data"]] == [made["id"]]
        assert secret not in str(listed)
        entries = (await _ok(await client.get("/admin/v1/audit")))["data"]
        assert [(e["actor"], e["action"], e["object"]) for e in entries] == [
            ("env-admin", "team.created", team["id"]),
            ("env-admin", "user.created", user["id"]),
            ("env-admin", "key.created", made["id"]),
            (made["id"], "file.created", file["id"]),
        ]
        assert all(e["request_id"] for e in entries)

    async def test_limits_are_written_as_they_are_read(self, admin: World) -> None:
        """What GET shows can be sent again; null takes a limit away."""
        wanted = {
            "models": ["echo"],
            "providers": {"local": ["*"]},
            "lane": "job",
            "requests_per_minute": 3,
            "monthly_budget": "12.50",
        }
        client = admin.client
        team = await _ok(
            await client.post("/admin/v1/teams", json={"name": "lab", "limits": wanted})
        )
        assert team["limits"] == wanted
        path = f"/admin/v1/teams/{team['id']}"
        changed = await _ok(await client.patch(path, json={"limits": {"models": None}}))
        assert changed["limits"] == {}
        closed = await _ok(await client.delete(path))
        assert closed["closed_at"]
        assert (await _ok(await client.delete(path)))["closed_at"] == closed["closed_at"]

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("teams", {}, "name"),
            ("teams", {"name": ""}, "name"),
            ("teams", {"name": "x\n"}, "name"),
            ("teams", {"name": "x", "limits": {"modles": []}}, "limits"),
            ("teams", {"name": "x", "limits": {"models": "gpt"}}, "limits"),
            ("teams", {"name": "x", "limits": {"lane": "fast"}}, "limits"),
            ("teams", {"name": "x", "limits": {"monthly_budget": -1}}, "limits"),
            ("teams", {"name": "x", "limits": {"requests_per_minute": -1}}, "limits"),
            ("keys", {"name": "x", "scopes": ["root"]}, "scopes"),
            ("keys", {"name": "x", "days": -1}, "days"),
            ("keys", {"name": "x", "owner": "somebody"}, None),
            ("keys", [], None),
        ],
    )
    async def test_what_is_wrong_is_named(
        self, admin: World, path: str, body: object, param: str | None
    ) -> None:
        """400 with the field, and nothing is made."""
        answer = await admin.client.post(f"/admin/v1/{path}", json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert (await _ok(await admin.client.get(f"/admin/v1/{path}")))["data"] == []

    async def test_the_end_of_a_key_can_be_taken_away(self, admin: World) -> None:
        """A field that is not sent changes nothing, null is no end, and a wrong one is named."""
        client = admin.client
        made = await _ok(await client.post("/admin/v1/keys", json={"name": "k", "days": 2}))
        path = f"/admin/v1/keys/{made['id']}"
        kept = await _ok(await client.patch(path, json={"limits": {"models": ["a"]}}))
        assert kept["expires_at"] == made["expires_at"]
        answer = await client.patch(path, json={"days": -1})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "days")
        freed = await _ok(await client.patch(path, json={"days": None}))
        assert (freed["expires_at"], freed["limits"]) == (None, {"models": ["a"]})
        entries = (await _ok(await client.get("/admin/v1/audit")))["data"]
        assert [e["action"] for e in entries] == ["key.created", "key.changed", "key.changed"]

    @pytest.mark.parametrize("field", ["scopes", "team", "user", "owner", "secret"])
    async def test_what_cannot_be_changed_is_refused(self, admin: World, field: str) -> None:
        """400, rather than 200 and no change: nobody shall believe that a key was narrowed."""
        _, record = await key(admin)
        path = f"/admin/v1/keys/{record.id}"
        value = ["batch"] if field == "scopes" else "x"
        answer = await admin.client.patch(path, json={field: value, "name": "new"})
        assert answer.status_code == 400
        assert field in answer.json()["error"]["message"]
        account = await admin.client.post("/admin/v1/teams", json={"name": "t", field: value})
        assert account.status_code == 400
        [listed] = (await _ok(await admin.client.get("/admin/v1/keys")))["data"]
        assert (listed["id"], listed["name"]) == (record.id, record.name)

    async def test_what_is_not_there_is_404(self, admin: World) -> None:
        """Teams, users, keys and batches alike; a name that is taken is 409."""
        client = admin.client
        for answer in (
            await client.patch("/admin/v1/teams/team_9", json={}),
            await client.delete("/admin/v1/users/user_9"),
            await client.delete("/admin/v1/keys/key_9"),
            await client.patch("/admin/v1/keys/key_9", json={"name": "x"}),
            await client.post("/admin/v1/batches/batch_9/cancel"),
            await client.post("/admin/v1/keys", json={"name": "x", "team": "team_9"}),
            await client.get("/admin/v1/robots"),
        ):
            assert answer.status_code == 404, answer.text
        await client.post("/admin/v1/teams", json={"name": "lab"})
        assert (await client.post("/admin/v1/teams", json={"name": "lab"})).status_code == 409


class TestActions:
    async def test_an_administrators_action_leaves_the_owner(self, admin: World) -> None:
        """A cancelled batch is still its owner's, and the trail has both names."""
        secret, record = await key(admin)
        async with seen_by(admin, secret) as mine:
            batch = await mine.create(b"".join(line(f"c{n}") for n in range(2000)))
            answer = await admin.client.post(f"/admin/v1/batches/{batch['id']}/cancel")
            assert (await _ok(answer))["owner"] == record.owner
            ended = await mine.finished(batch["id"])
            assert ended["status"] == "cancelled"
        assert (await admin.client.get(f"/v1/batches/{batch['id']}")).status_code == 403
        trail = await _ok(await admin.client.get("/admin/v1/audit", params={"object": batch["id"]}))
        assert [(e["actor"], e["action"], e["owner"]) for e in trail["data"]] == [
            (record.id, "batch.created", record.owner),
            ("env-admin", "batch.cancelled", record.owner),
        ]

    async def test_a_repeated_create_is_one_entry(self, admin: World) -> None:
        """A client whose answer was lost made one batch, whoever says how often."""
        secret, record = await key(admin)
        async with seen_by(admin, secret) as mine:
            file = await mine.upload()
            for _ in range(3):
                batch = await _ok(
                    await mine.client.post(
                        "/v1/batches",
                        json={
                            "input_file_id": file["id"],
                            "endpoint": "/v1/chat/completions",
                            "completion_window": "24h",
                        },
                        headers={"Idempotency-Key": "once"},
                    )
                )
        trail = await _ok(await admin.client.get("/admin/v1/audit", params={"object": batch["id"]}))
        assert [(e["actor"], e["action"]) for e in trail["data"]] == [(record.id, "batch.created")]

    async def test_a_revoked_key_is_out_and_stays_listed(self, admin: World) -> None:
        """Revoking twice is one entry in the trail."""
        secret, record = await key(admin)
        path = f"/admin/v1/keys/{record.id}"
        first = await _ok(await admin.client.delete(path))
        assert await _ok(await admin.client.delete(path)) == first
        async with seen_by(admin, secret) as mine:
            assert (await mine.client.get("/v1/files")).status_code == 401
        trail = await _ok(await admin.client.get("/admin/v1/audit", params={"object": record.id}))
        assert [e["action"] for e in trail["data"]] == ["key.revoked"]


class TestUsage:
    async def test_a_batch_is_booked_once_however_often_it_is_polled(self, admin: World) -> None:
        """Ten polls of a finished batch add nothing; sums agree with what the lines report."""
        secret, record = await key(admin)
        async with seen_by(admin, secret) as mine:
            batch = await mine.create(b"".join(line(f"c{n}") for n in range(5)))
            ended = await mine.finished(batch["id"])
            for _ in range(10):
                await mine.client.get(f"/v1/batches/{batch['id']}")
            await mine.client.post("/v1/chat/completions", json=CHAT)
            found = await _ok(await mine.client.get("/v1/usage", params={"group_by": "batch"}))
            interactive, one = found["data"]
            assert (interactive["batch"], interactive["requests"]) == (None, 1)
            assert (one["batch"], one["requests"]) == (batch["id"], 5)
            assert one["input_tokens"] == ended["usage"]["input_tokens"]
            assert one["output_tokens"] == ended["usage"]["output_tokens"]
            assert one["cost"] == ended["tidemill_cost"]["amount"]
        everybody = await _ok(
            await admin.client.get("/admin/v1/usage", params={"group_by": "key,model"})
        )
        assert [(row["key"], row["model"], row["requests"]) for row in everybody["data"]] == [
            (record.id, "echo", 6)
        ]
        assert everybody["currency"] == "USD"

    async def test_only_ones_own_usage_is_shown(self, admin: World) -> None:
        """Another owner's tokens are neither listed nor added."""
        secret, _ = await key(admin)
        other, _ = await key(admin)
        async with seen_by(admin, secret) as mine:
            await mine.client.post("/v1/chat/completions", json=CHAT)
        async with seen_by(admin, other) as mine:
            assert (await _ok(await mine.client.get("/v1/usage")))["data"] == []

    @pytest.mark.parametrize("by", [*GROUPINGS, "day,model,team,batch", ",".join(GROUPINGS)])
    async def test_every_grouping_comes_in_both_formats(self, admin: World, by: str) -> None:
        """The owner's own and everybody's; the sums are those of the requests."""
        team = await account(admin, "team", "lab", Limits())
        user = await account(admin, "user", "ada", Limits())
        secret, record = await key(admin, team=team, user=user)
        async with seen_by(admin, secret) as mine:
            batch = await mine.create(line("a", "one two") + line("b", "three"))
            await mine.finished(batch["id"])
            for client, path in ((mine.client, "/v1/usage"), (admin.client, "/admin/v1/usage")):
                asked = {"group_by": by}
                [row] = (await _ok(await client.get(path, params=asked)))["data"]
                sheet = await client.get(path, params={**asked, "format": "csv"})
                [read] = csv.DictReader(io.StringIO(sheet.text))
                assert list(read) == list(row)
                assert read == {name: "" if v is None else str(v) for name, v in row.items()}
                assert (row["requests"], row["input_tokens"], row["cost"]) == (2, 3, "0.000006")
                known = {
                    "model": "echo",
                    "team": team.id,
                    "user": user.id,
                    "key": record.id,
                    "batch": batch["id"],
                    "provider": None,
                    "execution": "local",
                    "tier": "standard",
                }
                for name in by.split(","):
                    assert row[name] == known.get(name, row[name])
                assert len(row) == len(by.split(",")) + len(COLUMNS)

    async def test_usage_comes_as_csv(self, admin: World) -> None:
        """The same rows, for a spreadsheet."""
        secret, _ = await key(admin)
        async with seen_by(admin, secret) as mine:
            await mine.client.post("/v1/chat/completions", json=CHAT)
            answer = await mine.client.get("/v1/usage", params={"format": "csv"})
            rows = (await _ok(await mine.client.get("/v1/usage")))["data"]
        assert answer.headers["content-type"].startswith("text/csv")
        read = list(csv.DictReader(io.StringIO(answer.text)))
        assert read == [{name: str(value) for name, value in row.items()} for row in rows]

    @pytest.mark.parametrize(
        "query",
        [
            {"since": "yesterday"},
            {"until": "9999-12-31"},
            {"group_by": "colour"},
            {"format": "xml"},
        ],
    )
    async def test_a_wrong_query_is_said(self, admin: World, query: dict[str, str]) -> None:
        """400, and one sentence that names the parameter."""
        answer = await admin.client.get("/admin/v1/usage", params=query)
        [name] = query
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
