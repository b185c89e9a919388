"""The page that explains where a batch runs shows the table that the tests check."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tidemill import providers

DOCS = Path(__file__).parents[2] / "docs"


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("explain", DOCS / "explain" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_decision_table_is_the_tests_own() -> None:
    """``make docs`` writes it anew."""
    generator = _generator()
    text = generator.PAGE.read_text("utf-8")
    assert text == generator.render(text)
    assert text.count("\n| ") > 25


TABLES = re.findall(
    r"^```toml\n(\[\[providers\]\].*?)^```$",
    (DOCS / "howto" / "providers.md").read_text("utf-8"),
    re.DOTALL | re.MULTILINE,
)


@pytest.mark.parametrize("table", TABLES)
def test_every_provider_of_the_how_to_is_accepted(table: str) -> None:
    """What the page shows can be copied."""
    import tomllib

    assert providers.parse(tomllib.loads(table)["providers"])
