"""The page about several models: its settings files are read as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tidemill import models, settings

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "models.md"
BLOCKS = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)


@pytest.mark.parametrize("text", BLOCKS)
def test_a_settings_file_of_the_page_is_accepted(text: str, tmp_path: Path) -> None:
    """Every entry is served under the name that the page gives it."""
    file = tmp_path / "tidemill.toml"
    file.write_text(text, encoding="utf-8")
    served = models.wanted(settings.load(env={}, toml=file).settings)
    assert [one.spec.name for one in served] == re.findall(r'^name = "(.*?)"', text, re.M)


def test_every_key_of_an_entry_is_on_the_page() -> None:
    """In the table, or as the general setting of its name."""
    text = PAGE.read_text("utf-8")
    assert all(f"`{field}`" in text for field in models.Model.__struct_fields__)
