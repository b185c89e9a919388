"""The rules that keep the house in order."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import tidemill

ROOT = Path(__file__).parents[2]
ROOMS = ("tidemill", "handlers", "backends", "storage", "scheduler", "native")
DRAWERS = {"utils", "util", "common", "helpers", "helper", "misc"}
MOST_LINES = 400
ONE_PAGE = {
    "tidemill/types.py": "every record of the system, read side by side",
    "tidemill/ports.py": "every seam of the system, on one page",
}
"""Files that may be longer, and why."""

# Every file under the package, reached once: links are followed from the other side.
SOURCES = sorted(
    path
    for room in ROOMS
    for path in (ROOT / room).rglob("*.py")
    if not any(part.is_symlink() for part in path.relative_to(ROOT).parents if part.name)
    and "__pycache__" not in path.parts
    and not any((ROOT / parent).is_symlink() for parent in path.relative_to(ROOT).parents)
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def tracked() -> list[str]:
    """Paths that git knows, relative to the root."""
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for path in done.stdout.split("\0") if path]


def named(path: Path) -> str:
    """A path as the reader of a failure wants it."""
    return str(path.relative_to(ROOT))


def test_imports_point_down() -> None:
    """The floors of docs/architecture.md."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as m; m()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_no_drawers() -> None:
    """A file says by its name what is in it."""
    found = [
        path for path in tracked() if {part.split(".")[0] for part in Path(path).parts} & DRAWERS
    ]
    assert found == []


def test_every_link_leads_somewhere_inside() -> None:
    """The rooms are links inside the package; none is broken, none leaves the repository."""
    links = [ROOT / path for path in tracked() if (ROOT / path).is_symlink()]
    assert {link.name for link in links} >= set(ROOMS) - {"tidemill"}
    for link in links:
        assert link.exists(), named(link)
        assert link.resolve().is_relative_to(ROOT.resolve()), named(link)
        assert not link.readlink().is_absolute(), named(link)


def test_there_is_one_version() -> None:
    """In the package, in the project file, and first in the changelog."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["version"] == tidemill.__version__ == version("tidemill")
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert first is not None
    assert first[1] == tidemill.__version__


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_a_file_is_small_enough_to_read(path: Path) -> None:
    """One that is larger wants to be two. Blank lines do not count."""
    lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    assert len(lines) <= MOST_LINES or named(path) in ONE_PAGE


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_what_is_public_says_what_it_is(path: Path) -> None:
    """Modules, classes, and functions that others call."""
    tree = ast.parse(path.read_text("utf-8"))
    missing = [] if ast.get_docstring(tree) or not tree.body else [f"{path.name} itself"]
    missing += [f"{path.name}:{node.lineno} {node.name}" for node in undocumented(tree)]
    assert missing == []


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def undocumented(tree: ast.Module) -> list[Definition]:
    """Public definitions at module and class level without a docstring.

    A function of a single statement, a method of a Protocol and a record that is only fields may
    speak by names and types alone.
    """
    found: list[Definition] = []
    for node in tree.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            found.append(node)
            if isinstance(node, ast.ClassDef) and not _is_protocol(node):
                found += [item for item in node.body if isinstance(item, Definition)]
    return [node for node in found if not (_speaks(node) or node.name.startswith("_"))]


def _speaks(node: Definition) -> bool:
    if isinstance(node, ast.ClassDef):
        plain = all(isinstance(item, ast.AnnAssign | ast.Pass) for item in node.body)
    else:
        plain = len(node.body) == 1
    return plain or ast.get_docstring(node) is not None


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=named)
def test_nothing_is_left_open(path: Path) -> None:
    """No marker of unfinished work, and no test that looks away."""
    tree = ast.parse(path.read_text("utf-8"))
    raised = {
        node.exc.func.id if isinstance(node.exc, ast.Call) else getattr(node.exc, "id", "")
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        and node.exc is not None
        and not (isinstance(node.exc, ast.Call) and not isinstance(node.exc.func, ast.Name))
    }
    assert "NotImplementedError" not in raised
    words = {"TO" + "DO", "FIX" + "ME", "X" * 3}
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        comment = line.partition("#")[2]
        assert not words & set(re.findall(r"\w+", comment)), f"line {number}"
    if path in TESTS:
        looked_away = [
            ast.unparse(node.func)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and re.fullmatch(
                r"pytest\.(mark\.)?(skip|skipif|xfail|importorskip)", ast.unparse(node.func)
            )
        ]
        assert looked_away == []


@pytest.mark.parametrize("path", TESTS, ids=named)
def test_every_test_says_what_it_shows(path: Path) -> None:
    """In a sentence, below its name."""
    tree = ast.parse(path.read_text("utf-8"))
    silent = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]
    assert silent == []
