"""Teams, users, keys, usage and the audit trail from the command line."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from openai import OpenAI, PermissionDeniedError

from tests.cli.conftest import Run
from tests.worlds.requests import chat, jsonl
from tests.worlds.server import Server


@pytest.fixture
def store(tmp_path: Path) -> tuple[str, Path]:
    return ("--storage-path", tmp_path / "store")


def test_teams_and_users_come_change_and_close(tidemill: Run, store: tuple[str, Path]) -> None:
    """Each by name or id; limits are set one by one and taken away with 'none'."""
    team = tidemill("teams", "add", "lab", "--models", "echo,gpt-*", "--lane", "job", *store).out
    tidemill("users", "add", "ada", *store)
    changed = tidemill(
        "teams", "change", "lab", "--monthly-budget", "12.5", "--lane", "none", "--json", *store
    ).json()
    assert changed["id"] == team.strip()
    assert changed["limits"] == {"models": ["echo", "gpt-*"], "monthly_budget": "12.50"}
    assert "models=echo,gpt-* monthly_budget=12.50" in tidemill("teams", "list", *store).out
    closed = tidemill("teams", "close", "lab", "--json", *store).json()
    assert (closed["id"], closed["closed_at"] is not None) == (team.strip(), True)
    assert tidemill("teams", "close", team.strip(), *store).code == 1
    assert [u["name"] for u in tidemill("users", "list", "--json", *store).json()] == ["ada"]
    actions = [e["action"] for e in tidemill("audit", "--json", *store).json()]
    assert actions == ["team.created", "user.created", "team.changed", "team.closed"]


def test_a_key_belongs_to_a_team_and_a_user(tidemill: Run, store: tuple[str, Path]) -> None:
    """The team owns what it makes; later it can be narrowed."""
    team = tidemill("teams", "add", "lab", *store).out.strip()
    user = tidemill("users", "add", "ada", *store).out.strip()
    made = tidemill(
        *("keys", "add", "k", "--team", "lab", "--user", user, "--scope", "batch"),
        *("--at", "local=echo", "--at", "azure=a,b", "--json", *store),
    ).json()
    assert made["owner"] == made["team"] == team
    assert made["scopes"] == ["batch"]
    assert made["limits"] == {"providers": {"local": ["echo"], "azure": ["a", "b"]}}
    changed = tidemill(
        "keys", "change", made["id"], "--at", "none", "--storage-bytes", 5, "--json", *store
    ).json()
    assert changed["limits"] == {"storage_bytes": 5}
    assert made["secret"] not in tidemill("keys", "list", "--json", *store).out


def test_a_key_is_given_another_end(tidemill: Run, store: tuple[str, Path]) -> None:
    """Later, sooner or none, without touching its limits; the trail says that it was changed."""
    limits = ("--lane", "batch", "--models", "a")
    made = tidemill("keys", "add", "k", "--days", 1, *limits, "--json", *store).json()
    for words, day in (
        (("--days", 3), 3),
        (("--requests-per-minute", 7, "--models", "b,c*"), 3),
        (("--days", "none"), None),
        (("--lane", "job"), None),
        (("--days", 0), 0),
    ):
        changed = tidemill("keys", "change", made["id"], *words, "--json", *store).json()
        left = None if day is None else (changed["expires_at"] - made["created_at"]) // 86_400
        assert left == day
    assert changed["limits"] == {"models": ["b", "c*"], "lane": "job", "requests_per_minute": 7}
    actions = [e["action"] for e in tidemill("audit", "--json", *store).json()]
    assert actions == ["key.created", *["key.changed"] * 5]


@pytest.mark.parametrize(
    "arguments",
    [
        ("keys", "add", "k", "--team", "nobody"),
        ("keys", "add", "k", "--team", "t", "--owner", "o"),
        ("keys", "add", "k", "--requests-per-minute", "-1"),
        ("keys", "add", "k", "--monthly-budget", "lots"),
        ("keys", "add", "k", "--lane", "fast"),
        ("keys", "add", "k", "--at", "azure"),
        ("keys", "change", "key_9", "--name", "x"),
        ("keys", "change", "key_9", "--days", "soon"),
        ("keys", "change", "key_9", "--days", "36501"),
        ("teams", "change", "nobody", "--name", "x"),
        ("usage", "--by", "colour"),
        ("usage", "--since", "yesterday"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    tidemill: Run, store: tuple[str, Path], arguments: tuple[str, ...]
) -> None:
    """On standard error, with an exit code."""
    assert tidemill("migrate", *store).code == 0
    done = tidemill(*arguments, *store)
    assert done.code in (1, 2)
    assert done.err.startswith("Error: ")
    assert "Traceback" not in done.err
    assert "There is no store" not in done.err


@pytest.mark.parametrize(
    "words", [("usage",), ("audit",), ("keys", "list"), ("teams", "list"), ("keys", "revoke", "k")]
)
def test_a_mistyped_path_is_no_empty_store(
    tidemill: Run, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """It would look as if nothing had been used; only adding makes a store."""
    ran = tidemill(*words, "--storage-path", "nowhere")
    assert ran.code == 1
    assert "There is no store in nowhere" in ran.err
    assert not (tmp_path / "nowhere").exists()


def test_usage_is_there_while_the_server_runs(tidemill: Run, tmp_path: Path) -> None:
    """A key made beside the running server works, and what it used is told by every format."""
    prices = tmp_path / "prices.json"
    prices.write_text('{"models": {"local/echo": {"input": 1, "output": 2}}}', encoding="utf-8")
    with Server(storage_path=tmp_path / "store", api_keys="a-first-key", prices=prices) as server:
        store = ("--storage-path", tmp_path / "store")
        secret = tidemill("keys", "add", "k", "--models", "echo", *store).out.strip()
        with OpenAI(base_url=f"{server.base_url}/v1", api_key=secret, max_retries=0) as client:
            answer = client.chat.completions.create(
                model="echo", messages=[{"role": "user", "content": "one two three"}]
            )
            with pytest.raises(PermissionDeniedError):
                client.chat.completions.create(
                    model="other", messages=[{"role": "user", "content": "x"}]
                )
        [row] = tidemill("usage", "--by", "model", "--json", *store).json()
        assert answer.usage is not None
        cost = answer.usage.prompt_tokens + 2 * answer.usage.completion_tokens
        assert (row["model"], row["requests"]) == ("echo", 1)
        assert row["cost"] == f"{cost / 1e6:.6f}"
        plain = tidemill("usage", "--by", "model", *store).out
        assert plain.split("\t")[:2] == ["echo", "1"]
        [read] = csv.DictReader(
            io.StringIO(tidemill("usage", "--by", "model", "--csv", *store).out)
        )
        assert read == {name: str(value) for name, value in row.items()}
        keys = json.loads(tidemill("keys", "list", "--json", *store).out)
        assert keys[0]["last_used_at"] is not None


def test_check_says_what_a_file_costs_and_that_there_is_no_money(
    tidemill: Run, tmp_path: Path
) -> None:
    """All of the report is shown, the verdict in it, and the exit code is 1."""
    prices = tmp_path / "prices.json"
    prices.write_text('{"models": {"local/echo": {"input": 1, "output": 2}}}', encoding="utf-8")
    (tmp_path / "good.jsonl").write_bytes(jsonl([chat("a", "one two", max_tokens=10)]))
    with Server(storage_path=tmp_path / "store", api_keys="a-first-key", prices=prices) as server:
        store = ("--storage-path", tmp_path / "store")
        secret = tidemill("keys", "add", "k", "--monthly-budget", "0.00001", *store).out.strip()
        ran = tidemill("check", "good.jsonl", "--url", server.base_url, "--api-key", secret)
    assert ran.code == 1
    assert "echo\t1\t2\ttokenised\t10\t0.000023\t0.000023" in ran.out
    assert "budget\tThe estimated cost of 0.000023 is more than what is left" in ran.out
    assert "more than what is left of the monthly budget of this key" in ran.err


def test_check_asks_the_server_that_it_is_for(tidemill: Run, live: Server, tmp_path: Path) -> None:
    """Placement and tokens of a good file; every problem of a bad one; nothing is kept."""
    at = ("--url", live.base_url)
    before = tidemill("files", "list", *at).out
    (tmp_path / "good.jsonl").write_bytes(jsonl([chat("a", "one two"), chat("b", "one")]))
    good = tidemill("check", "good.jsonl", *at)
    assert good.code == 0
    assert "echo\t2\t3\ttokenised" in good.out
    assert "would run\there: " in good.out
    for told in ("cost\tabout 0.00 USD", "at batch rate\t0.00", "budget\tenough", "done by\t"):
        assert told in good.out
    assert (
        tidemill("check", "good.jsonl", "--json", *at).json()["placement"]["execution"] == "local"
    )
    (tmp_path / "bad.jsonl").write_bytes(jsonl([chat("a", "x"), chat("a", "x")]))
    bad = tidemill("check", "bad.jsonl", *at)
    assert bad.code == 1
    assert "duplicate_custom_id" in bad.out
    assert tidemill("files", "list", *at).out == before
