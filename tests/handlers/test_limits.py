"""What keys, teams and users may do, seen from outside."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import httpx
import pytest

from tests.handlers.principals import account, key, seen_by
from tests.handlers.world import HungUp, Open, World, line
from tidemill.backends import guard
from tidemill.storage.drafts import SqliteDraft
from tidemill.types import Account, Embedded, Embedding, Generation, Lane, Limits, Piece

pytestmark = pytest.mark.anyio

CHAT = {"model": "echo", "messages": [{"role": "user", "content": "hi there"}]}


@pytest.fixture
def priced(tmp_path: Path) -> dict[str, str]:
    """Settings under which the echo model costs one micro-unit a token."""
    path = tmp_path / "prices.toml"
    path.write_text('[models."local/echo"]\ninput = 1\noutput = 1\n', encoding="utf-8")
    return {"prices": str(path)}


def _code(answer: object) -> tuple[int, str | None]:
    return answer.status_code, answer.json()["error"]["code"]  # type: ignore[attr-defined]


async def test_an_owner_creates_so_many_batches_in_an_hour(open_world: Open) -> None:
    """The next one is told when to come again, and leaves nothing; others have an hour of their
    own."""
    async with open_world(batches_per_hour=2) as world:
        secret, _ = await key(world)
        other, _ = await key(world)
        async with seen_by(world, secret) as mine, seen_by(world, other) as theirs:
            made = {(await mine.create(line(f"x{n}")))["id"] for n in range(2)}
            file = await mine.upload(line("y"))
            asked = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
            late = await mine.client.post(
                "/v1/batches", json={"input_file_id": file["id"], **asked}
            )
            assert _code(late) == (429, "rate_limit_exceeded")
            assert 1 <= int(late.headers["retry-after"]) <= 1_800
            listed = (await mine.client.get("/v1/batches")).json()["data"]
            assert {batch["id"] for batch in listed} == made
            await theirs.create(line("z"))


class TestModels:
    async def test_a_line_of_a_model_that_is_not_permitted_fails_the_upload(
        self, world: World
    ) -> None:
        """403 with the line, and nothing is kept."""
        secret, _ = await key(world, limits=Limits(models=("other",)))
        async with seen_by(world, secret) as mine:
            answer = await mine.client.post(
                "/v1/files",
                data={"purpose": "batch"},
                files={"file": ("in.jsonl", b"\n" + line("b"))},
            )
            assert _code(answer) == (403, "model_not_permitted")
            [problem] = [p for p in answer.json()["error"]["errors"]["data"] if p["line"] == 2]
            assert problem["code"] == "model_not_permitted"
            assert (await mine.client.get("/v1/files")).json()["data"] == []

    async def test_a_key_narrowed_after_the_upload_cannot_create(self, world: World) -> None:
        """The permission is asked again, as it is now."""
        secret, record = await key(world)
        async with seen_by(world, secret) as mine:
            file = await mine.upload()
            await world.services.store.keys.change(record.id, limits=Limits(models=()))
            answer = await mine.client.post(
                "/v1/batches",
                json={
                    "input_file_id": file["id"],
                    "endpoint": "/v1/chat/completions",
                    "completion_window": "24h",
                },
            )
            assert _code(answer) == (403, "model_not_permitted")

    async def test_a_batch_that_checks_its_file_names_the_line(self, world: World) -> None:
        """As the upload would have, had it been asked to check."""
        secret, _ = await key(world, limits=Limits(models=("other",)))
        async with seen_by(world, secret) as mine:
            file = await mine.upload(b"\n" + line("b"), headers={"X-Tidemill-Validation": "batch"})
            answer = await mine.client.post(
                "/v1/batches",
                json={"input_file_id": file["id"], "endpoint": "/v1/chat/completions"},
            )
            ended = await mine.finished(answer.json()["id"])
            assert ended["status"] == "failed"
            [problem] = ended["errors"]["data"]
            assert (problem["code"], problem["line"]) == ("model_not_permitted", 2)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_an_interactive_request_needs_the_model_too(
        self, world: World, stream: bool
    ) -> None:
        """In the body or in the URL, streamed or not."""
        secret, _ = await key(world, limits=Limits(models=("other",)))
        async with seen_by(world, secret) as mine:
            body = {**CHAT, "stream": stream}
            for path in ("/v1", "/openai/deployments/echo"):
                answer = await mine.client.post(f"{path}/chat/completions", json=body)
                assert _code(answer) == (403, "model_not_permitted")

    async def test_only_models_that_may_be_used_are_shown(self, world: World) -> None:
        """Neither listed nor found by name."""
        for models, shown, status in ((("ec*",), ["echo"], 200), (("other",), [], 404)):
            secret, _ = await key(world, limits=Limits(models=models))
            async with seen_by(world, secret) as mine:
                listed = (await mine.client.get("/v1/models")).json()["data"]
                assert [card["id"] for card in listed] == shown
                assert (await mine.client.get("/v1/models/echo")).status_code == status


class TestScopes:
    async def test_a_key_does_only_what_it_is_for(self, world: World) -> None:
        """A batch key does not chat, an inference key makes no batch."""
        for scope, chat, files in (("batch", 403, 200), ("inference", 200, 403)):
            secret, _ = await key(world, scopes=frozenset({scope}))
            async with seen_by(world, secret) as mine:
                assert (
                    await mine.client.post("/v1/chat/completions", json=CHAT)
                ).status_code == chat
                assert (await mine.client.get("/v1/files")).status_code == files
                assert (await mine.client.get("/v1/models")).status_code == 200


class TestAccounts:
    async def test_a_closed_team_ends_its_keys(self, world: World) -> None:
        """At once, with a 401 that says so."""
        team = await account(world, "team", "closing", Limits())
        secret, _ = await key(world, team=team)
        async with seen_by(world, secret) as mine:
            assert (await mine.client.get("/v1/files")).status_code == 200
            await world.services.store.accounts.close(team.id)
            answer = await mine.client.get("/v1/files")
            assert answer.status_code == 401
            assert "team" in answer.json()["error"]["message"]

    async def test_keys_of_a_team_share_and_personal_keys_do_not(self, world: World) -> None:
        """One user's two keys are two owners; two keys of a team are one."""
        team = await account(world, "team", "sharing", Limits())
        user: Account = await account(world, "user", "one", Limits())
        made = [await key(world, team=team), await key(world, team=team, user=user)]
        personal = [await key(world, user=user), await key(world, user=user), await key(world)]
        async with seen_by(world, made[0][0]) as mine:
            file = await mine.upload()
        for (secret, _), status in zip(made + personal, [200, 200, 404, 404, 404], strict=True):
            async with seen_by(world, secret) as other:
                assert (await other.client.get(f"/v1/files/{file['id']}")).status_code == status

    async def test_last_use_is_noted(self, world: World) -> None:
        """Once for many requests."""
        secret, record = await key(world)
        async with seen_by(world, secret) as mine:
            for _ in range(3):
                await mine.client.get("/v1/files")
        grant = await world.services.store.accounts.grant(record.id)
        assert grant is not None
        assert grant.key.last_used_at is not None

    async def test_a_key_revoked_in_mid_run_stops_the_rest(
        self, open_world: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What runs ends, what ran stays, and each other line says why it did not."""
        monkeypatch.setattr(guard, "GRANT_TTL_S", -1.0)
        async with open_world(batch_local_concurrency=1) as world:
            team = await account(world, "team", "t", Limits())
            secret, record = await key(world, team=team)
            mate, _ = await key(world, team=team)
            async with seen_by(world, secret) as mine, seen_by(world, mate) as watcher:
                data = line("first", "!wait revoked one") + line("b") + line("c")
                batch = await mine.create(data)
                while not world.engine.status().active:
                    await anyio.lowlevel.checkpoint()
                await world.services.store.keys.revoke(record.id)
                world.engine.gate("revoked").set()
                ended = await watcher.finished(batch["id"])
                assert ended["status"] == "completed"
                assert ended["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
                answer = await watcher.client.get(f"/v1/files/{ended['error_file_id']}/content")
                rows = [json.loads(row) for row in answer.text.splitlines()]
                assert {row["custom_id"] for row in rows} == {"b", "c"}
                for row in rows:
                    assert row["response"] is None
                    assert row["error"]["code"] == "key_revoked"


class TestPace:
    async def test_interactive_requests_are_counted_and_batch_lines_are_not(
        self, world: World
    ) -> None:
        """A batch of many lines leaves the minute's requests untouched."""
        secret, _ = await key(world, limits=Limits(requests_per_minute=2))
        async with seen_by(world, secret) as mine:
            batch = await mine.create(b"".join(line(f"c{n}") for n in range(20)))
            assert (await mine.finished(batch["id"]))["request_counts"]["completed"] == 20
            answers = [await mine.client.post("/v1/chat/completions", json=CHAT) for _ in range(3)]
            assert [answer.status_code for answer in answers] == [200, 200, 429]
            assert _code(answers[2]) == (429, "rate_limit_exceeded")
            assert 1 <= int(answers[2].headers["retry-after"]) <= 60

    async def test_a_team_shares_its_tokens(self, world: World) -> None:
        """What one key used the other one waits for."""
        team = await account(world, "team", "pacing", Limits(tokens_per_minute=1))
        first, second = await key(world, team=team), await key(world, team=team)
        async with seen_by(world, first[0]) as mine:
            assert (await mine.client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        async with seen_by(world, second[0]) as other:
            answer = await other.client.post("/v1/chat/completions", json=CHAT)
            assert _code(answer) == (429, "rate_limit_exceeded")


class TestLane:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_the_ceiling_reaches_the_engine(
        self, world: World, monkeypatch: pytest.MonkeyPatch, stream: bool
    ) -> None:
        """Of key, team and user the lowest counts, on every interactive route."""
        lanes: list[Lane] = []
        generate, embed = world.engine.generate, world.engine.embed

        def generated(asked: Generation) -> AsyncIterator[Piece]:
            lanes.append(asked.lane)
            return generate(asked)

        async def embedded(asked: Embedding, told: Callable[[int], None]) -> Embedded:
            lanes.append(asked.lane)
            return await embed(asked, told)

        monkeypatch.setattr(world.engine, "generate", generated)
        monkeypatch.setattr(world.engine, "embed", embedded)
        name = "streamed" if stream else "whole"
        team = await account(world, "team", name, Limits(lane=Lane.JOB))
        user = await account(world, "user", name, Limits(lane=Lane.BATCH))
        routes = {
            "/v1/chat/completions": {"messages": CHAT["messages"]},
            "/openai/deployments/echo/chat/completions": {"messages": CHAT["messages"]},
            "/v1/completions": {"prompt": "hi"},
            "/v1/responses": {"input": "hi"},
            "/v1/embeddings": {"input": "hi"},
        }
        for secret, lane in (
            ((await key(world))[0], Lane.INTERACTIVE),
            ((await key(world, limits=Limits(lane=Lane.JOB)))[0], Lane.JOB),
            ((await key(world, team=team))[0], Lane.JOB),
            ((await key(world, team=team, user=user))[0], Lane.BATCH),
            ((await key(world, team=team, limits=Limits(lane=Lane.BATCH)))[0], Lane.BATCH),
        ):
            async with seen_by(world, secret) as mine:
                for path, body in routes.items():
                    more = {"stream": True} if stream and "embeddings" not in path else {}
                    answer = await mine.client.post(path, json={"model": "echo", **body, **more})
                    assert answer.status_code == 200, answer.text
            assert lanes == [lane] * len(routes)
            lanes.clear()


class TestStorage:
    async def test_a_file_that_passes_the_quota_is_not_kept(self, world: World) -> None:
        """Until something is deleted; several keys of one owner share what it keeps."""
        limits = Limits(storage_bytes=2 * len(line()))
        team = await account(world, "team", "keeping", limits)
        (secret, _), (other, _) = await key(world, team=team), await key(world, team=team)
        async with seen_by(world, secret) as mine, seen_by(world, other) as mate:
            file = await mine.upload()
            for data in (line() + line("b"), line() + b"\n"):
                assert _code(await _sent(mate, data)) == (403, "storage_quota_exceeded")
            await mate.upload()
            assert _code(await _sent(mine, line())) == (403, "storage_quota_exceeded")
            assert len((await mine.client.get("/v1/files")).json()["data"]) == 2
            await mine.client.delete(f"/v1/files/{file['id']}")
            await mate.upload()

    async def test_nothing_past_the_quota_is_written(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is counted while the file comes in, not once all of it is there."""
        secret, _ = await key(world, limits=Limits(storage_bytes=200_000))
        written, append = 0, SqliteDraft.append

        async def counted(draft: SqliteDraft, chunk: bytes) -> None:
            nonlocal written
            written += len(chunk)
            await append(draft, chunk)

        async def form() -> AsyncIterator[bytes]:
            yield (
                b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
                b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
            )
            for n in range(1_000):
                yield line(f"c{n}", "x" * 1000)
            yield b"\r\n--b--\r\n"

        monkeypatch.setattr(SqliteDraft, "append", counted)
        async with seen_by(world, secret) as mine:
            answer = await mine.client.post(
                "/v1/files",
                content=form(),
                headers={"Content-Type": "multipart/form-data; boundary=b"},
            )
            assert _code(answer) == (403, "storage_quota_exceeded")
            assert answer.headers["x-should-retry"] == "false"
            assert (await mine.client.get("/v1/files")).json()["data"] == []
        assert 0 < written <= 200_000

    async def test_uploads_at_once_do_not_pass_the_quota_together(self, world: World) -> None:
        """Each alone would fit."""
        size = len(line())
        secret, record = await key(world, limits=Limits(storage_bytes=2 * size + 1))
        async with seen_by(world, secret) as mine:
            codes: list[int] = []

            async def send() -> None:
                codes.append((await _sent(mine, line())).status_code)

            async with anyio.create_task_group() as tasks:
                for _ in range(6):
                    tasks.start_soon(send)
            assert sorted(codes) == [200, 200, 403, 403, 403, 403]
        assert await world.services.store.budgets.stored(record.owner) == 2 * size


async def _sent(world: World, data: bytes) -> httpx.Response:
    return await world.client.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)}
    )


class TestMoney:
    @pytest.mark.parametrize("whose", ["key", "team", "user"])
    async def test_who_is_over_budget_gets_402(
        self, open_world: Open, priced: dict[str, str], whose: str
    ) -> None:
        """Create and interactive requests alike, whose budget it is; the SDK is told not to
        repeat."""
        async with open_world(**priced) as world:
            budget = {whose: Limits(monthly_budget=1)}
            team = await account(world, "team", "t", budget.get("team", Limits()))
            user = await account(world, "user", "u", budget.get("user", Limits()))
            secret, _ = await key(world, team=team, user=user, limits=budget.get("key", Limits()))
            async with seen_by(world, secret) as mine:
                file = await mine.upload()
                first = await mine.client.post("/v1/chat/completions", json=CHAT)
                assert first.status_code == 200
                for answer in (
                    await mine.client.post("/v1/chat/completions", json=CHAT),
                    await mine.client.post(
                        "/v1/batches",
                        json={
                            "input_file_id": file["id"],
                            "endpoint": "/v1/chat/completions",
                            "completion_window": "24h",
                        },
                    ),
                ):
                    assert _code(answer) == (402, "budget_exceeded")
                    assert f"budget of this {whose} is used up" in answer.text
                    assert answer.headers["x-should-retry"] == "false"
                assert (await mine.client.get("/v1/batches")).json()["data"] == []

    async def test_a_burst_passes_a_budget_by_one_request_at_most(
        self, open_world: Open, priced: dict[str, str]
    ) -> None:
        """What runs holds what it may cost; the others wait until it is known what it did cost."""
        async with open_world(**priced) as world:
            secret, record = await key(world, limits=Limits(monthly_budget=40))
            body = {**CHAT, "messages": [{"role": "user", "content": "!wait go"}], "max_tokens": 9}
            async with seen_by(world, secret) as mine:
                answers: list[httpx.Response] = []

                async def ask(stream: bool) -> None:
                    answers.append(
                        await mine.client.post(
                            "/v1/chat/completions", json={**body, "stream": stream}
                        )
                    )

                async with anyio.create_task_group() as tasks:
                    for n in range(10):
                        tasks.start_soon(ask, n % 2 == 0)
                    # A request of 93 bytes may cost 24 tokens and 9 more: two fill the budget.
                    while world.engine.status().active < 2:
                        await anyio.lowlevel.checkpoint()
                    [purse] = await world.services.store.budgets.purses(record.id)
                    assert world.engine.status().active == 2
                    assert 40 <= purse.committed < 80
                    world.engine.gate("go").set()
                assert {a.status_code for a in answers} <= {200, 402}
                rows = await world.services.store.ledger.usage(None, 0, 2**40)
                assert len(rows) == sum(a.status_code == 200 for a in answers)
                [purse] = await world.services.store.budgets.purses(record.id)
                assert purse.committed == 0
                assert purse.spent == sum(row.cost for row in rows)

    async def test_who_waits_for_a_budget_may_leave(
        self, open_world: Open, priced: dict[str, str]
    ) -> None:
        """It then takes nothing, and a request that fails gives back what it held."""
        async with open_world(**priced) as world:
            secret, record = await key(world, limits=Limits(monthly_budget=1))
            held = await world.services.store.budgets.begin(record.id, 1)
            assert held is not None
            waiting = HungUp(world, CHAT, secret)
            waiting.leave.set()
            await waiting.run()
            assert (await waiting.got.get())["status"] == 499
            await world.services.store.budgets.release(held)
            async with seen_by(world, secret) as mine:
                failing = {**CHAT, "messages": [{"role": "user", "content": "!status 400"}]}
                for stream in (False, True):
                    answer = await mine.client.post(
                        "/v1/chat/completions", json={**failing, "stream": stream}
                    )
                    assert answer.status_code == 400
            [purse] = await world.services.store.budgets.purses(record.id)
            assert (purse.spent, purse.committed) == (0, 0)

    async def test_a_batch_stops_at_its_cap(self, open_world: Open, priced: dict[str, str]) -> None:
        """Every line has its row: those that ran, and those that could have crossed."""
        async with open_world(**priced) as world:
            secret, _ = await key(world)
            async with seen_by(world, secret) as mine:
                data = b"".join(line(f"c{n}") for n in range(6))
                batch = await mine.create(data, max_cost="0.000529", hold="estimate")
                assert batch["tidemill_cost"]["max_cost"] == "0.000529"
                assert batch["tidemill_cost"]["held"] == "0.000529"
                ended = await mine.finished(batch["id"])
                counts = ended["request_counts"]
                assert counts["completed"] + counts["failed"] == counts["total"] == 6
                # A line without a limit may cost 512 tokens and its prompt; it costs two.
                assert counts["completed"] == 1
                assert ended["tidemill_cost"]["held"] == "0.00"
                assert float(ended["tidemill_cost"]["amount"]) <= 0.000529
                errors = await mine.client.get(f"/v1/files/{ended['error_file_id']}/content")
                assert errors.text.count('"budget_exceeded"') == counts["failed"]
                used = ended["usage"]["total_tokens"]
                assert round(float(ended["tidemill_cost"]["amount"]) * 10**6) == used

    @pytest.mark.parametrize("most", [2, 600])
    async def test_the_servers_limit_of_an_answer_is_what_it_may_cost(
        self, open_world: Open, priced: dict[str, str], most: int
    ) -> None:
        """Where neither request nor batch has one: in a preflight, a reservation, a line's hold
        and that of an interactive request."""
        async with open_world(**priced, max_decoding_length=most) as world:
            secret, record = await key(world, limits=Limits(monthly_budget=10**6))
            async with seen_by(world, secret) as mine:
                data = line("a", "!wait go")
                told = await mine.client.post(
                    "/v1/batches/preflight",
                    data={"purpose": "batch"},
                    files={"file": ("in.jsonl", data)},
                )
                assert told.json()["models"][0]["output_tokens_at_most"] == most
                prompt = -(-len(json.dumps(json.loads(data)["body"])) // 4)
                batch = await mine.create(data, hold="estimate")
                held = float(batch["tidemill_cost"]["held"])
                assert round(held * 10**6) == prompt + most + 1
                await mine.client.post(f"/v1/batches/{batch['id']}/cancel")
                world.engine.gate("go").set()
                await mine.finished(batch["id"])
                for cap, completed in ((prompt + most, 1), (prompt + most - 1, 0)):
                    made = await mine.create(data, max_cost=f"{cap / 10**6:.6f}")
                    counts = (await mine.finished(made["id"]))["request_counts"]
                    assert counts["completed"] == completed
                async with anyio.create_task_group() as tasks:
                    raw = json.dumps(json.loads(line("a", "!wait more"))["body"]).encode()
                    tasks.start_soon(lambda: mine.client.post("/v1/chat/completions", content=raw))
                    while not world.engine.status().active:
                        await anyio.lowlevel.checkpoint()
                    [purse] = await world.services.store.budgets.purses(record.id)
                    assert purse.committed == most + -(-len(raw) // 4)
                    world.engine.gate("more").set()

    @pytest.mark.parametrize(
        ("field", "value"),
        [("max_cost", -1), ("max_cost", "much"), ("max_cost", True), ("hold", "all"), ("hold", 1)],
    )
    async def test_a_wrong_amount_is_named(self, world: World, field: str, value: object) -> None:
        """400 with the field."""
        file = await world.upload()
        answer = await world.client.post(
            "/v1/batches",
            json={
                "input_file_id": file["id"],
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
                field: value,
            },
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
