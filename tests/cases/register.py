"""Which cases there are, and where those are tested that have no test of their own here."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]

Elsewhere = dict[str, tuple[str, ...]]
"""From a case (``C17``) to ``path::test_name``."""


def untested(module: ModuleType, cases: range | tuple[int, ...], elsewhere: Elsewhere) -> set[str]:
    """Cases with neither a test ``test_cNN_…`` in the module nor an entry."""
    here = {name.split("_")[1].upper() for name in vars(module) if name.startswith("test_c")}
    return {f"C{number:02}" for number in cases} - here - set(elsewhere)


def missing(elsewhere: Elsewhere) -> list[str]:
    """Entries whose test is not there."""
    return [name for names in elsewhere.values() for name in names if not _is_there(name)]


def _is_there(name: str) -> bool:
    path, _, test = name.partition("::")
    if not (ROOT / path).is_file():
        return False
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == test
        for node in ast.walk(tree)
    )
