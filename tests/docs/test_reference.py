"""The reference pages say what the code says: no more, no less."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pytest
from msgspec import structs

from tidemill import access, reports
from tidemill.backends import eligibility, settlement
from tidemill.backends.inference import chat, completions, embeddings, local, plan, responses
from tidemill.handlers import ADMIN, MIRRORS, ROUTES, admin
from tidemill.jsonl import ERROR_CODES
from tidemill.scheduler import lifecycle
from tidemill.settings import rows
from tidemill.types import Account, Grant, KeyRecord

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"


def load_generator() -> ModuleType:
    """The page generator, which is a script and no module of the package."""
    spec = importlib.util.spec_from_file_location("generate", REFERENCE / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_generator()


@pytest.mark.parametrize("page", generate.PAGES)
def test_the_tables_are_what_the_code_gives(page: str) -> None:
    """``make docs`` writes them anew."""
    text = (REFERENCE / page).read_text("utf-8")
    assert text == generate.render(page_text := text), f"run 'make docs': {page} is old"
    assert page_text.count("<!-- begin") == page_text.count("<!-- end") > 0


def test_every_setting_is_in_the_reference_and_the_reverse() -> None:
    """By name, flag and environment variable."""
    text = (REFERENCE / "settings.md").read_text("utf-8")
    for row in rows():
        assert f"| `{row.name}` |" in text
        assert f"`{row.env}`" in text
        assert all(f"`{flag}`" in text for flag in row.flags)
    named = set(re.findall(r"^\| `([a-z_]+)` \|", text, re.MULTILINE))
    assert named == {row.name for row in rows()}


def test_every_error_class_is_in_the_reference_and_the_reverse() -> None:
    """With its code."""
    text = (REFERENCE / "errors.md").read_text("utf-8")
    named = set(re.findall(r"^\| `([A-Z]\w+)` \|", text, re.MULTILINE))
    assert named == {item.__name__ for item in generate.error_classes()}


def test_every_code_of_a_bad_file_is_in_the_reference() -> None:
    """Those of the answer, and those of the single problems."""
    text = (REFERENCE / "errors.md").read_text("utf-8")
    sources = [ROOT / "tidemill" / name for name in ("jsonl.py", "complaints.py")]
    source = "".join(path.read_text("utf-8") for path in sources)
    problems = set(re.findall(r'(?:code=|_note\()"(\w+)"', source))
    assert problems >= {"invalid_json_line", "duplicate_custom_id", "empty_file"}
    for code in problems | set(ERROR_CODES.values()):
        assert f"| `{code}` |" in text


def test_every_code_of_a_line_that_never_ran_is_in_the_reference() -> None:
    """Whether its batch was ended, its key was, or its money."""
    text = (REFERENCE / "errors.md").read_text("utf-8").partition("## Failed lines")[2]
    named = set(re.findall(r"`([a-z_]+)`", "".join(re.findall(r"(?m)^\| (`.*?) \|", text))))
    team, user = (Account(kind=kind, id=kind, name="n", closed_at=1) for kind in ("team", "user"))
    key = KeyRecord(id="k", name="k", owner="k", prefix="", digest="", created_at=1)
    ended = [
        Grant(key=structs.replace(key, revoked_at=1)),
        Grant(key=structs.replace(key, expires_at=1)),
        Grant(key=key, team=team),
        Grant(key=key, user=user),
    ]
    codes = {trouble[0] for grant in ended if (trouble := access.trouble(grant, 2))}
    for path in [*(ROOT / "backends").rglob("*.py"), *(ROOT / "scheduler").rglob("*.py")]:
        codes |= _codes_without_a_status(ast.parse(path.read_text("utf-8")))
    codes |= {code for _, code, _ in (*lifecycle._CLOSINGS.values(), *settlement.CLOSINGS.values())}
    assert named == codes | {"context_length_exceeded", "batch_failed"}


def _codes_without_a_status(tree: ast.AST) -> set[str]:
    """Of refusals that end a line."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "Refusal":
            given = {one.arg: one.value for one in node.keywords}
            code = given.get("code")
            if isinstance(code, ast.Constant) and not given.keys() & {"status_code", "retry"}:
                found.add(str(code.value))
    return found


def test_every_deed_of_the_audit_trail_is_in_the_reference() -> None:
    """What is noted in the store is named, and nothing else."""
    text = (REFERENCE / "api.md").read_text("utf-8").partition("## M.")[2]
    told = set(re.findall(r"`([a-z]+\.[a-z]+)`", text))
    source = "".join(path.read_text("utf-8") for path in (ROOT / "storage").glob("*.py"))
    noted = set(re.findall(r'note\(\s*tx,\s*[\w.]+,\s*f?"([^"]+)"', source))
    assert "batch.created" in noted
    accounts = ("team", "user")
    gaps = {"{account.kind}": accounts, "{row['kind']}": accounts, "{kind}": (eligibility.KIND,)}
    filled = {
        deed.replace(gap, kind)
        for deed in noted
        for gap, kinds in gaps.items()
        for kind in kinds
        if gap in deed
    }
    assert told == {deed for deed in noted if "{" not in deed} | filled


def test_everything_of_a_usage_report_is_in_the_reference() -> None:
    """What sums are grouped by, and what is summed."""
    text = (REFERENCE / "api.md").read_text("utf-8").partition("## M.")[2]
    for name in (*reports.GROUPINGS, *reports.COLUMNS):
        assert f"`{name}`" in text


def test_every_command_is_in_the_reference_and_the_reverse() -> None:
    """Groups are named by their commands."""
    text = (REFERENCE / "cli.md").read_text("utf-8")
    named = set(re.findall(r"^### `([a-z ]+)`$", text, re.MULTILINE))
    assert named == {
        name for name, command in generate.commands() if not hasattr(command, "commands")
    }


def test_settings_in_prose_exist() -> None:
    """A variable that a page names is one that the server, a command or the build takes."""
    known = {row.env for row in rows()} | {alias for row in rows() for alias in row.aliases}
    known |= {"TIDEMILL_URL", "TIDEMILL_API_KEY", "TIDEMILL_CONFIG"}
    known |= set(re.findall(r"^set\((TIDEMILL_\w+)", (ROOT / "CMakeLists.txt").read_text(), re.M))
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        named = set(re.findall(r"\b(?:TIDEMILL|LOGOS)_[A-Z_]+\b", page.read_text("utf-8")))
        assert named <= known, f"{page.name} names {sorted(named - known)}"


def test_every_route_is_in_the_reference_and_the_reverse() -> None:
    """Method and path, below every mirror that the page names."""
    text = (REFERENCE / "api.md").read_text("utf-8")
    served = {
        (str(method), plain(path))
        for handlers in (*(handlers for _, handlers in MIRRORS), ROUTES)
        for handler in handlers
        for path in handler.paths
        for method in handler.http_methods
    } | {
        (str(method), plain(ADMIN + path))
        for handler in admin.ROUTES
        for path in handler.paths
        for method in handler.http_methods
    }
    named = set(re.findall(r"^\| `([A-Z]+)` \| `(/[^`]*)` \|", text, re.MULTILINE))
    assert named == served
    mirrors = re.search(r"\| mirror \| serves \|\n(.*?)\n\n", text, re.DOTALL)
    assert mirrors is not None
    shown = {
        path
        for line in mirrors[1].splitlines()
        for path in re.findall(r"`(/[^`]*)`", line.split("|")[1])
    }
    assert shown == {plain(prefix) for prefix, _ in MIRRORS}


def test_what_is_accepted_without_effect_is_in_the_reference_and_the_reverse() -> None:
    """Nothing else is passed over in silence: a parameter that no code reads has one value, which
    is what happens anyway, or is named there."""
    text = (REFERENCE / "api.md").read_text("utf-8")
    told = re.search(r"Accepted without effect are .*?\n\n(.*?)\n\n", text, re.DOTALL)
    assert told is not None
    shared = inspect.getsource(plan) + inspect.getsource(local)
    silent = {"stream_options.include_obfuscation"}
    for module in (chat, completions, embeddings, responses):
        source = inspect.getsource(module) + shared
        for name, hint in get_type_hints(module.Body).items():
            read = re.search(rf"\b(?:body|ask)\.{name}\b", source)
            if read is None and hint is not type(None) and "Literal[" not in str(hint):
                silent.add(name)
    assert set(re.findall(r"`([a-z_.]+)`", told[1])) == silent


def plain(path: str) -> str:
    """A route template without the types of its parameters."""
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", path)


def test_every_header_of_our_own_is_in_the_reference_and_the_reverse() -> None:
    """Those that handlers read and write; no page names another one."""
    pattern = r"\bX-(?:Tidemill|Logos)-[A-Za-z-]*[a-z]"
    sources = [path.read_text("utf-8") for path in (ROOT / "handlers").glob("*.py")]
    known = {name for source in sources for name in re.findall(pattern, source)}
    text = (REFERENCE / "api.md").read_text("utf-8")
    table = "".join(re.findall(r"^\| `X-.*$", text, re.MULTILINE))
    assert set(re.findall(pattern, table)) == known
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        assert set(re.findall(pattern, page.read_text("utf-8"))) <= known, page.name
