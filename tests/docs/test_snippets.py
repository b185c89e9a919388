"""What the pages show runs: Python as it stands, commands as far as they can be parsed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import pytest
from _pytest.mark import ParameterSet

from tests.worlds.server import Server
from tidemill.cli import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHOWN_URL = "http://127.0.0.1:10900"


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Every block of a language, with a name for the test."""
    for page in PAGES:
        found = re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
        for number, text in enumerate(found, 1):
            yield f"{page.relative_to(ROOT)}:{number}", text


def commands() -> Iterator[tuple[str, str]]:
    """Every ``tidemill`` command, in blocks and in running text."""
    for page in PAGES:
        if page.name == "cli.md":
            continue  # usage lines, written from the code
        text = page.read_text("utf-8")
        inline = re.findall(r"`((?:[A-Z_]+=\S+ )*tidemill [^`]+)`", text)
        shown = [
            line.strip()
            for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
            for line in block.splitlines()
            if re.match(r"\s*(?:[A-Z_]+=\S+ )*tidemill ", line)
        ]
        for line in [*inline, *shown]:
            yield f"{page.relative_to(ROOT)}: {line}", line


def params(named: Iterable[tuple[str, str]]) -> list[ParameterSet]:
    """Test parameters with their names."""
    return [pytest.param(text, id=name) for name, text in named]


@pytest.fixture(scope="module")
def live() -> Iterator[Server]:
    """A server that answers at once under the demo model's name."""
    with Server(model_name="smollm2") as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder like the repository's root, as far as the snippets look."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return tmp_path


@pytest.mark.parametrize("code", params(blocks("python")))
def test_python_runs(live: Server, folder: Path, code: str) -> None:
    """Against a live server; only its address is another one."""
    assert SHOWN_URL in code
    code = code.replace(SHOWN_URL, live.base_url).replace("api_key=…", 'api_key="none"')
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_example_runs(live: Server, folder: Path) -> None:
    """All 24 requests are answered, each with its own text."""
    script = folder / "examples" / "sdk.py"
    script.write_text(script.read_text("utf-8").replace(SHOWN_URL, live.base_url), "utf-8")
    done = subprocess.run(
        [sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    content = (ROOT / "examples" / "requests.jsonl").read_bytes()
    asked = [json.loads(line) for line in content.splitlines()]
    assert sorted(done.stdout.splitlines()) == sorted(
        f"{line['custom_id']} → {line['body']['messages'][-1]['content']}" for line in asked
    )


@pytest.mark.parametrize("text", params(blocks("json")))
def test_json_is_json(text: str) -> None:
    """Whatever a page shows as JSON can be read as such."""
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("line", params(commands()))
def test_commands_exist(line: str) -> None:
    """With every option that they are shown with."""
    words = [word for word in shlex.split(line) if not re.match(r"[A-Z_]+=", word)]
    if "…" in words:
        words = words[: words.index("…")]
    command: click.Command = cli
    for word in words[1:]:
        if isinstance(command, click.Group) and word in command.commands:
            command = command.commands[word]
    known = {
        option
        for parameter in (*command.params, *cli.params)
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    if len(words) > 1 and not words[1].startswith("-"):
        assert command is not cli
    assert {word for word in words if word.startswith("-")} <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """To a file, and to a heading in it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, target


def slug(heading: str) -> str:
    """A heading's anchor, as code hosts make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
