"""``tidemill run``: with a server of its own, with a named one, interrupted and resumed."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.conftest import Run
from tests.worlds.requests import chat, jsonl, rows, said
from tests.worlds.server import Server
from tidemill.cli import child
from tidemill.cli.screen import program
from tidemill.client import TidemillClient


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    """Three lines: two are answered, one fails."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(jsonl([chat("b", "two"), chat("bad", "!status 418"), chat("a", "one")]))
    return path


def test_an_embedded_server_answers_a_file(tidemill: Run, requests: Path, tmp_path: Path) -> None:
    """Answers in one file, failures in another beside it, and it is said where everything is."""
    ran = tidemill("run", requests, "-o", "out.jsonl", "--engine", "echo", "--show")
    assert ran.code == 0
    answers = rows((tmp_path / "out.jsonl").read_bytes())
    assert {id: said(row) for id, row in answers.items()} == {"a": "one", "b": "two"}
    assert set(rows((tmp_path / "out.errors.jsonl").read_bytes())) == {"bad"}
    assert [line.split("\t")[:2] for line in ran.out.splitlines()] == [
        ["b", "two"],
        ["bad", "(status_418) The prompt asked for status 418."],
        ["a", "one"],
    ]
    assert "2 of 3 lines answered, 1 failed in " in ran.err
    incremental = re.search(r"incremental file: (\S+)", ran.err)
    assert incremental is not None
    assert Path(incremental[1]).read_bytes() == (tmp_path / "out.jsonl").read_bytes()


def test_an_answer_cannot_steer_the_terminal(tidemill: Run, live: Server, tmp_path: Path) -> None:
    """Escape sequences of a model are shown as what they are not."""
    (tmp_path / "in.jsonl").write_bytes(jsonl([chat("a", "red \x1b[31m\r\x07 two\nlines\tx")]))
    ran = tidemill("run", "in.jsonl", "-o", "out.jsonl", "--url", live.base_url, "--show")
    assert ran.out == "a\tred \ufffd[31m\ufffd\ufffd two lines x\t6\n"
    assert "\x1b[31m" in said(rows((tmp_path / "out.jsonl").read_bytes())["a"])


def test_a_named_server_answers_a_file(
    tidemill: Run, live: Server, requests: Path, tmp_path: Path
) -> None:
    """And the object that a script reads says what was written."""
    ran = tidemill(
        "run", requests, "-o", "out.jsonl", "-e", "bad.jsonl", "--url", live.base_url, "--json"
    )
    assert ran.code == 0
    found = ran.json()
    assert found["batch"]["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert found["written"] == ["out.jsonl", "bad.jsonl"]
    assert set(rows((tmp_path / "bad.jsonl").read_bytes())) == {"bad"}


def test_strict_makes_a_failed_line_an_exit_code(
    tidemill: Run, live: Server, requests: Path, tmp_path: Path
) -> None:
    """The answers are there all the same."""
    ran = tidemill("run", requests, "-o", "out.jsonl", "--url", live.base_url, "--strict")
    assert ran.code == 1
    assert "1 lines of batch" in ran.err
    assert set(rows((tmp_path / "out.jsonl").read_bytes())) == {"a", "b"}


def test_an_old_error_file_does_not_outlive_a_clean_run(
    tidemill: Run, live: Server, tmp_path: Path
) -> None:
    """It would look like this run's."""
    (tmp_path / "in.jsonl").write_bytes(jsonl([chat("a", "one")]))
    (tmp_path / "out.errors.jsonl").write_text("old\n")
    assert tidemill("run", "in.jsonl", "-o", "out.jsonl", "--url", live.base_url).code == 0
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_the_endpoint_is_that_of_the_first_line(
    tidemill: Run, live: Server, tmp_path: Path
) -> None:
    """Blank lines before it do not count, and ``/v1`` may be missing."""
    line = {"custom_id": "e", "method": "POST", "url": "/embeddings"}
    (tmp_path / "in.jsonl").write_bytes(
        b"\n  \n" + jsonl([{**line, "body": {"model": "echo", "input": "tide"}}])
    )
    ran = tidemill("run", "in.jsonl", "-o", "out.jsonl", "--url", live.base_url, "--show")
    assert ran.code == 0
    assert "1 embedding(s) of 8 numbers" in ran.out


@pytest.mark.parametrize(
    "words",
    [
        ("run", "in.jsonl", "-o", "out.jsonl"),
        ("check", "in.jsonl"),
        ("files", "upload", "in.jsonl"),
    ],
)
def test_a_bad_file_is_shown_with_its_lines(
    tidemill: Run, live: Server, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Every problem of it, whichever command meets it; nothing runs and nothing is written."""
    (tmp_path / "in.jsonl").write_bytes(b'[1]\n{"custom_id": "a"}\n')
    ran = tidemill(*words, "--url", live.base_url)
    assert ran.code == 1
    expected = [("1", ""), ("2", "method"), ("2", "url"), ("2", "body")]
    shown = [line.split("\t") for line in ran.out.splitlines()]
    assert [(line, param) for line, _, param, _ in shown] == expected
    assert not (tmp_path / "out.jsonl").exists()
    ran = tidemill(*words, "--url", live.base_url, "--json")
    assert (ran.code, ran.json()["ok"]) == (1, False)
    found = [(str(one["line"]), one["param"] or "") for one in ran.json()["problems"]]
    assert found == expected


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["-o", "o"], "--resume"),
        (["in.jsonl", "-o", "o", "--resume", "batch_1"], "--resume"),
        (["missing.jsonl", "-o", "o"], "missing.jsonl"),
        (["in.jsonl"], "--output"),
        (["in.jsonl", "-o", "o", "--url", "http://127.0.0.1:1", "--slots", "3"], "slots"),
        (["in.jsonl", "-o", "o", "--url", "localhost:1"], "--url"),
        (["in.jsonl", "-o", "o", "--slots", "many"], "slots"),
        (["in.jsonl", "-o", "o", "--engine", "steam"], "one of llama, echo"),
        (["in.jsonl", "-o", "in.jsonl"], "in.jsonl"),
        (["in.jsonl", "-o", "./sub/../in.jsonl"], "in.jsonl"),
        (["in.jsonl", "-o", "o", "-e", "in.jsonl"], "in.jsonl"),
        (["in.jsonl", "-o", "o", "-e", "o"], "o."),
    ],
)
def test_a_wrong_command_line_is_one_sentence(
    tidemill: Run, requests: Path, args: list[str], named: str
) -> None:
    """That names what is wrong; exit code 2."""
    ran = tidemill("run", *args)
    assert ran.code == 2
    assert len(ran.err.splitlines()) == 1
    assert ran.err.startswith("Error: ")
    assert named in ran.err
    assert requests.stat().st_size > 0


def test_a_server_that_cannot_start_is_explained(
    tidemill: Run, requests: Path, tmp_path: Path
) -> None:
    """With the server's own last sentence; here, that its store is taken."""
    with Server(storage_path=tmp_path / "store"):
        ran = tidemill("run", requests, "-o", "o", "--engine", "echo", "--storage-path", "store")
    assert ran.code == 3
    assert "in use by process" in ran.err
    assert "or send the file to that server with --url" in ran.err


def test_a_model_may_take_any_time_to_load(
    tidemill: Run, requests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here an hour passes whenever somebody looks at the clock."""
    hours = itertools.count(0.0, 3600.0)
    fast = SimpleNamespace(monotonic=lambda: next(hours), sleep=time.sleep)
    monkeypatch.setattr(child, "time", fast)
    assert tidemill("run", requests, "-o", "out.jsonl", "--engine", "echo").code == 0


def test_ctrl_c_while_the_server_starts_leaves_none_behind(
    tidemill: Run, requests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no batch yet to say anything about."""
    started: list[child.ServerProcess] = []

    def interrupted(self: child.ServerProcess, deadline: float) -> bool:
        started.append(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(child.ServerProcess, "_healthy", interrupted)
    ran = tidemill("run", requests, "-o", "out.jsonl", "--engine", "echo")
    assert ran.code == 130
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_ctrl_c_says_how_to_go_on_and_resume_does(tmp_path: Path) -> None:
    """Every line is answered once, whichever of the two runs it was."""
    (tmp_path / "in.jsonl").write_bytes(
        jsonl(chat(str(n), f"!sleep 2 {n}" if n else "x", model="my echo") for n in range(20))
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TIDEMILL_", "LOGOS_"))}
    env["TIDEMILL_BATCH_LOCAL_CONCURRENCY"] = "2"
    first = subprocess.Popen(
        [
            *(sys.executable, "-m", "tidemill", "run", "in.jsonl", "-o", "out.jsonl"),
            *("-e", "no good.jsonl", "--engine", "echo", "--model-name", "my echo"),
        ],
        cwd=tmp_path,
        env=env,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    store = tmp_path / "tidemill-data"
    deadline = time.monotonic() + 120
    while not any(path.stat().st_size for path in store.glob("incremental/batch_*.jsonl")):
        assert time.monotonic() < deadline, "no line was finished"
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGINT)
    err = first.communicate(timeout=120)[1]
    assert first.returncode == 130
    assert "Traceback" not in err
    assert not (tmp_path / "out.jsonl").exists()

    advice = re.search(r"go on: +(tidemill run --resume batch_\w+ .+)", err)
    assert advice is not None
    env["TIDEMILL_BATCH_LOCAL_CONCURRENCY"] = "20"
    resumed = subprocess.run(
        [sys.executable, "-m", *shlex.split(advice[1])],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert set(rows((tmp_path / "out.jsonl").read_bytes())) == {str(n) for n in range(20)}


def test_after_kill_9_the_same_command_goes_on(tidemill: Run, tmp_path: Path) -> None:
    """With the batch of the very same file, be another one as long; what had ended is run anew."""
    data = jsonl(chat(str(n), f"!sleep 2 {n}" if n else "x") for n in range(8))
    (tmp_path / "in.jsonl").write_bytes(data)
    store = tmp_path / "store"
    with Server(storage_path=store, batch_local_concurrency=1) as server:
        with TidemillClient(server.base_url) as client:
            mine, other = (
                client.create_batch(client.upload_file(content)["id"])["id"]
                for content in (data, data.replace(b'"x"', b'"y"'))
            )
            assert next(client.results(mine))
        server.kill()
    command = ("run", "in.jsonl", "-o", "out.jsonl", "--storage-path", store, "--engine", "echo")
    ran = tidemill(*command, "--json")
    assert f"Batch {mine} goes on at http" in ran.err
    first = ran.json()["batch"]
    assert first["id"] == mine
    assert first["lines_rerun"] <= 1
    assert set(rows((tmp_path / "out.jsonl").read_bytes())) == {str(n) for n in range(8)}
    assert tidemill(*command, "--json").json()["batch"]["id"] not in (mine, other)


def test_ctrl_c_leaves_a_batch_at_a_server_to_go_on(
    tidemill: Run, live: Server, tmp_path: Path
) -> None:
    """It says how to watch it, how to get its results and how to cancel it, and each of them can
    be pasted."""
    (tmp_path / "in.jsonl").write_bytes(jsonl([chat("a", "!sleep 3 a"), chat("b", "b")]))
    command = (sys.executable, "-m", "tidemill", "run", "in.jsonl", "-o", "the answers.jsonl")
    run = subprocess.Popen(
        [*command, "--url", live.base_url], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    assert run.stderr is not None
    assert run.stderr.readline().startswith("Batch batch_")
    run.send_signal(signal.SIGINT)
    err = run.communicate(timeout=120)[1]
    assert run.returncode == 130
    advice = dict(re.findall(r"^  ([a-z ]+): +tidemill (.+)$", err, re.MULTILINE))
    assert set(advice) == {"watch it", "get its results", "cancel it"}
    assert tidemill(*shlex.split(advice["watch it"])).code == 0
    assert tidemill(*shlex.split(advice["get its results"])).code == 0
    assert set(rows((tmp_path / "the answers.jsonl").read_bytes())) == {"a", "b"}
    late = tidemill(*shlex.split(advice["cancel it"]))
    assert (late.code, "completed" in late.err) == (1, True)


def test_a_batch_that_had_ended_is_only_fetched(
    tidemill: Run, live: Server, requests: Path
) -> None:
    """The work of an earlier run is not the speed of this one."""
    tidemill("run", requests, "-o", "out.jsonl", "--url", live.base_url)
    batch = tidemill("batches", "list", "--url", live.base_url).out.split("\t")[0]
    ran = tidemill("run", "--resume", batch, "-o", "again.jsonl", "--url", live.base_url)
    assert ran.code == 0
    assert "2 of 3 lines answered, 1 failed, all before.\n" in ran.err
    assert "lines/s," not in ran.err
    gone = tidemill("run", "--resume", "batch_none", "-o", "o", "--url", live.base_url)
    assert (gone.code, "No such Batch" in gone.err) == (1, True)


def test_advice_can_be_pasted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the path of the command, where the shell would not find it by its name."""
    monkeypatch.setattr(sys, "argv", [".venv/bin/tidemill", "run"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() == ".venv/bin/tidemill"
    (tmp_path / "tidemill").touch(mode=0o755)
    assert program() == "tidemill"


def test_a_wrong_model_is_told_the_right_ones(tidemill: Run, live: Server, tmp_path: Path) -> None:
    """A script that was written for another server names that server's."""
    (tmp_path / "in.jsonl").write_bytes(jsonl([chat("a", "one", model="gpt-4.1")]))
    for words in (("run", "in.jsonl", "-o", "out.jsonl"), ("check", "in.jsonl")):
        ran = tidemill(*words, "--url", live.base_url)
        assert ran.code == 1
        assert f"Models that {live.base_url} answers with: echo.\n" in ran.err
