"""Every other command: what it prints, for people and for scripts, and its exit code."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import httpx
import pytest

from tests.cli.conftest import Run
from tests.worlds.requests import chat, jsonl, rows, said
from tests.worlds.server import Server
from tidemill import __version__
from tidemill.cli import cli


def test_files_and_batches_from_upload_to_delete(
    tidemill: Run, live: Server, tmp_path: Path
) -> None:
    """Each command's plain output is what the next one takes."""
    (tmp_path / "in.jsonl").write_bytes(jsonl([chat("a", "one"), chat("b", "!status 418")]))
    at = ("--url", live.base_url)
    file = tidemill("files", "upload", "in.jsonl", "--expires-after", 3600, *at).out.strip()
    shown = tidemill("files", "show", file, "--json", *at).json()
    assert shown["expires_at"] == shown["created_at"] + 3600
    batch = tidemill(
        "batches", "create", file, "--metadata", "k=v=w", "--temperature", 0.5, *at
    ).out.strip()

    watched = tidemill("batches", "watch", batch, "--poll-interval", 0.02, *at)
    assert watched.code == 0
    output = dict(line.split("\t") for line in watched.out.splitlines())["output_file_id"]
    assert tidemill("batches", "watch", batch, "--strict", *at).code == 1
    assert tidemill("batches", "show", batch, "--json", *at).json()["metadata"] == {"k": "v=w"}
    assert f"{batch}\tcompleted\t1\t1\t2" in tidemill("batches", "list", *at).out
    assert batch in [b["id"] for b in tidemill("batches", "list", "--json", *at).json()["data"]]

    tidemill("files", "content", output, "-o", "out.jsonl", *at)
    assert said(rows((tmp_path / "out.jsonl").read_bytes())["a"]) == "one"
    tidemill("batches", "results", batch, "--follow", "-o", "all.jsonl", *at)
    assert set(rows((tmp_path / "all.jsonl").read_bytes())) == {"a", "b"}

    refused = tidemill("batches", "cancel", batch, *at)
    assert refused.code == 1
    assert "completed" in refused.err
    assert tidemill("files", "delete", file, *at).code == 0
    assert tidemill("files", "show", file, *at).code == 1
    assert file not in tidemill("files", "list", *at).out


def test_content_goes_to_standard_output_byte_for_byte(live: Server, tmp_path: Path) -> None:
    """So that it can be piped."""
    content = jsonl([chat("a", "größe 🌊\u2028x")]).rstrip(b"\n")
    (tmp_path / "in.jsonl").write_bytes(content)
    command = [sys.executable, "-m", "tidemill", "files"]
    at = ["--url", live.base_url]
    done = subprocess.run(
        [*command, "upload", tmp_path / "in.jsonl", *at], capture_output=True, text=True, check=True
    )
    printed = subprocess.run(
        [*command, "content", done.stdout.strip(), *at], capture_output=True, check=True
    )
    assert printed.stdout == content


def test_results_follow_a_batch_that_runs(tidemill: Run, live: Server, tmp_path: Path) -> None:
    """And end with it."""
    lines = [chat(str(n), f"!sleep 0.{n} x") for n in range(1, 5)]
    (tmp_path / "in.jsonl").write_bytes(jsonl(lines))
    at = ("--url", live.base_url)
    batch = tidemill(
        "batches", "create", tidemill("files", "upload", "in.jsonl", *at).out.strip(), *at
    ).out.strip()
    tidemill("batches", "results", batch, "--follow", "-o", "all.jsonl", *at)
    assert set(rows((tmp_path / "all.jsonl").read_bytes())) == {"1", "2", "3", "4"}


def test_models_are_listed(tidemill: Run, live: Server) -> None:
    """By name, and as the API's objects."""
    assert tidemill("models", "--url", live.base_url).out.startswith("echo\t")
    assert tidemill("models", "--url", live.base_url, "--json").json()[0]["id"] == "echo"


@pytest.mark.parametrize(
    "args", [["files", "list"], ["batches", "list"], ["batches", "watch", "b"], ["models"]]
)
def test_a_server_that_is_not_there_has_an_exit_code_of_its_own(
    tidemill: Run, args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """3, and one sentence that says what to do."""
    monkeypatch.setenv("TIDEMILL_URL", "http://127.0.0.1:1")
    ran = tidemill(*args)
    assert ran.code == 3
    assert len(ran.err.splitlines()) == 1
    assert "tidemill serve" in ran.err


def test_check_finds_every_problem_without_a_server(tidemill: Run, tmp_path: Path) -> None:
    """With line numbers; exit code 1."""
    (tmp_path / "in.jsonl").write_bytes(
        b"not json\n" + jsonl([chat("a", "x"), chat("a", "y"), chat("b", "x", stream=True)])
    )
    found = tidemill("check", "in.jsonl", "--json")
    assert found.code == 1
    assert {(p["line"], p["code"]) for p in found.json()["problems"]} == {
        (1, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "streaming_unsupported"),
    }
    assert len(tidemill("check", "in.jsonl").out.splitlines()) == 3


def test_check_sums_up_a_good_file(tidemill: Run, tmp_path: Path) -> None:
    """Lines, models, endpoint; tokens are called an estimate."""
    content = jsonl([chat("a", "x"), chat("b", "y", model="other")])
    (tmp_path / "in.jsonl").write_bytes(content)
    found = tidemill("check", "in.jsonl", "--json").json()
    assert found["ok"]
    assert (found["lines"], found["models"]) == (2, ["echo", "other"])
    assert found["endpoint"] == "/v1/chat/completions"
    assert found["estimated_prompt_tokens"] == len(content) // 4
    assert "estimate" in tidemill("check", "in.jsonl").out
    limited = tidemill("check", "in.jsonl", "--max-batch-requests", 1)
    assert limited.code == 1
    assert "too_many_tasks" in limited.out
    unknown = tidemill("check", "in.jsonl", "--model", "echo")
    assert unknown.code == 1
    assert "model_not_found" in unknown.out


def test_check_of_a_file_that_is_too_large_or_missing(tidemill: Run, tmp_path: Path) -> None:
    """A sentence in both cases."""
    (tmp_path / "in.jsonl").write_bytes(jsonl([chat("a", "x")]))
    assert "batch_file_too_large" in tidemill("check", "in.jsonl", "--max-batch-file-bytes", 9).out
    missing = tidemill("check", "none.jsonl")
    assert missing.code == 1
    assert "none.jsonl" in missing.err


def test_settings_say_where_each_value_comes_from(
    tidemill: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environment over file over default; a secret shows only that it is there."""
    (tmp_path / "tidemill.toml").write_text("slots = 5\nthreads = 2\n")
    monkeypatch.setenv("TIDEMILL_THREADS", "3")
    monkeypatch.setenv("LOGOS_MAX_BATCH_REQUESTS", "7")
    monkeypatch.setenv("TIDEMILL_API_KEYS", "tm-very-secret")
    shown = tidemill("settings", "--json")
    assert "tm-very-secret" not in shown.out
    found = {name: (item["value"], item["source"]) for name, item in shown.json().items()}
    assert found["slots"] == (5, "tidemill.toml")
    assert found["threads"] == (3, "$TIDEMILL_THREADS")
    assert found["max_batch_requests"] == (7, "$LOGOS_MAX_BATCH_REQUESTS")
    assert found["engine"] == ("llama", "default")
    assert found["api_keys"] == ("********", "$TIDEMILL_API_KEYS")
    assert "tm-very-secret" not in tidemill("settings").out


@pytest.mark.parametrize(
    ("args", "env", "named"),
    [
        (["serve", "--max-pool-size", "0"], {}, "max_pool_size"),
        (["serve", "--validation", "never"], {}, "validation"),
        (["serve", "--engine", "magic"], {}, "Expected one of llama, echo"),
        (["serve", "--no-such-thing"], {}, "--no-such-thing"),
        (["settings"], {"TIDEMILL_SLOTS": "many"}, "TIDEMILL_SLOTS"),
        (["settings"], {"TIDEMILL_TYPO": "1"}, "TIDEMILL_TYPO"),
        (["settings"], {"TIDEMILL_DRAIN_SECONDS": "inf"}, "drain_seconds"),
        (["serve", "--config", "none.toml"], {}, "none.toml"),
        (["serve", "--engine", "echo", "--storage-path", "/dev/null/x"], {}, "storage_path"),
        (["migrate", "--storage-path", "/dev/null/x"], {}, "storage_path"),
        (["serve", "--host", "0.0.0.0", "--engine", "echo", "--port", "0"], {}, "--insecure"),
        (["nonsense"], {}, "nonsense"),
        (["batches", "create", "file-1", "--metadata", "x"], {}, "--metadata"),
        (["files", "list", "--url", "nowhere"], {}, "--url"),
    ],
)
def test_a_bad_setting_stops_with_one_sentence(
    args: list[str], env: dict[str, str], named: str, tmp_path: Path
) -> None:
    """That names it; exit code 2, and never a traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "tidemill", *args],
        env={"PATH": "/usr/bin:/bin", **env},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 2, done.stderr
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if "Error: " in line]) == 1


@pytest.mark.parametrize("name", ["TIDEMILL_API_KEYS", "TIDEMILL_ADMIN_KEY"])
@pytest.mark.parametrize("value", [",", " ", " , ,"])
def test_keys_that_are_none_open_no_server(tmp_path: Path, name: str, value: str) -> None:
    """As "$A,$B" gives with neither set: that must not pass for a key, nor for none."""
    done = subprocess.run(
        [sys.executable, "-m", "tidemill", "serve", "--host", "0.0.0.0", "--engine", "echo"],
        env={"PATH": "/usr/bin:/bin", name: value},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 2, done.stderr
    assert name in done.stderr
    assert "no key" in done.stderr


def test_a_bad_secret_is_not_shown(tmp_path: Path) -> None:
    """The sentence about a wrong type names the setting and keeps its value."""
    (tmp_path / "tidemill.toml").write_text('api_keys = ["tm-very-secret"]\n')
    done = subprocess.run(
        [sys.executable, "-m", "tidemill", "settings"],
        env={"PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert (done.returncode, "api_keys" in done.stderr) == (2, True)
    assert "very-secret" not in done.stdout + done.stderr


def test_a_key_that_is_added_beside_a_running_server_works_at_once(
    tidemill: Run, tmp_path: Path
) -> None:
    """And closes the server to everybody without one; revoked, it works no more."""
    store = tmp_path / "store"
    with Server(storage_path=store) as server:
        url = f"{server.base_url}/v1/files"
        assert httpx.get(url).status_code == 200
        added = tidemill("keys", "add", "alice", "--json", "--storage-path", store).json()
        headers = {"Authorization": f"Bearer {added['secret']}"}
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers=headers).status_code == 200
        listed = tidemill("keys", "list", "--storage-path", store).out
        assert added["id"] in listed
        assert added["secret"] not in listed
        gone = tidemill("keys", "revoke", added["id"], "--storage-path", store, "--json").json()
        assert (gone["id"], gone["revoked_at"] is not None) == (added["id"], True)
        assert httpx.get(url, headers=headers).status_code == 401
    assert tidemill("keys", "revoke", added["id"], "--storage-path", store).code == 1


def test_a_key_can_share_an_owner_and_expire(tidemill: Run) -> None:
    """Without ``--owner`` it is an owner of its own."""
    first = tidemill("keys", "add", "one", "--json").json()
    second = tidemill("keys", "add", "two", "--owner", first["owner"], "--days", 2, "--json").json()
    assert first["owner"] == first["id"] == second["owner"]
    assert second["expires_at"] == second["created_at"] + 2 * 86_400
    assert re.fullmatch(r"tm-\w{40}", second["secret"])
    found = {key["id"]: key for key in tidemill("keys", "list", "--json").json()}
    assert "secret" not in found[first["id"]]
    assert found[second["id"]]["expires_at"] == second["expires_at"]


def test_migrate_makes_a_store_and_then_has_nothing_to_do(tidemill: Run, tmp_path: Path) -> None:
    """A release step may run as often as it likes."""
    assert tidemill("migrate", "--storage-path", "deep/store").code == 0
    assert (tmp_path / "deep" / "store" / "tidemill.db").is_file()
    again = tidemill("migrate", "--storage-path", "deep/store")
    assert again.code == 0
    assert "nothing to do" in again.err
    assert tidemill("migrate", "--storage-path", "deep/store", "--json").json() == {
        "storage_path": "deep/store",
        "applied": [],
    }
    assert tidemill("migrate", "--storage-path", "new", "--json").json()["applied"]


NO_OBJECT = {"serve", "files content", "batches results", "completion"}
"""Commands that print no object: a log, a file's bytes, rows that are JSON already, a script."""


def _leaves(group: click.Group, name: str = "") -> Iterator[tuple[str, click.Command]]:
    for word, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _leaves(command, f"{name}{word} ")
        else:
            yield name + word, command


def test_every_command_has_json_for_scripts() -> None:
    """But for those whose output is no object."""
    without = {
        name
        for name, command in _leaves(cli)
        if not any("--json" in option.opts for option in command.params)
    }
    assert without == NO_OBJECT


def test_providers_are_listed_where_no_command_is_named(tidemill: Run, live: Server) -> None:
    """With the options of ``list``; help is the group's own."""
    at = ("--url", live.base_url)
    assert tidemill("providers", *at, "--json").json() == []
    assert tidemill("providers", "list", *at, "--json").json() == []
    assert "forget" in tidemill("providers", "--help").out
    assert "'tidemill providers list --help'" in tidemill("providers", "--none").err


def test_a_second_server_on_a_store_is_refused(tidemill: Run, tmp_path: Path) -> None:
    """With a sentence that names the path."""
    store = tmp_path / "store"
    with Server(storage_path=store):
        ran = tidemill("serve", "--engine", "echo", "--port", 0, "--storage-path", store)
        assert ran.code == 1
        assert str(store) in ran.err
        assert tidemill("migrate", "--storage-path", store).code == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_call_back(tidemill: Run, shell: str) -> None:
    """Each names the variable by which the shell asks."""
    ran = tidemill("completion", shell)
    assert ran.code == 0
    assert "_TIDEMILL_COMPLETE" in ran.out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("tidemill ba", {"batches"}),
        ("tidemill providers ", {"forget", "list"}),
        ("tidemill serve --engine ", {"echo", "llama"}),
        ("tidemill serve --engine e", {"echo"}),
    ],
)
def test_completion_completes(shell: str, words: str, completed: set[str]) -> None:
    """Each shell's own question is answered: commands, and the values of a setting that has few."""
    begun = words.rpartition(" ")[2]
    done = subprocess.run(
        [sys.executable, "-c", "from tidemill.cli import main; main()"],
        env={
            "_TIDEMILL_COMPLETE": f"{shell}_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": begun if shell == "fish" else str(len(words.split(" ")) - 1),
            "PATH": "/usr/bin:/bin",
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    answers = set(re.split(r"[\n\t,]", done.stdout))
    assert answers & {"batches", "serve", "forget", "list", "echo", "llama"} == completed


def test_version_and_help(tidemill: Run) -> None:
    """The version is the package's; help is there for everybody who asks for nothing."""
    assert tidemill("--version").out == f"tidemill {__version__}\n"
    assert tidemill("--help").code == 0
    bare = tidemill()
    assert bare.code == 2
    assert "Commands:" in bare.err
