"""What the page about providers shows is what the settings take."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tidemill import providers
from tidemill.providers import parse

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "providers.md").read_text("utf-8")
BLOCKS = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
TABLES = [block for block in BLOCKS if "[[providers]]" in block]


@pytest.mark.parametrize("block", TABLES)
def test_each_table_is_a_provider(block: str) -> None:
    """With a credential and at least one model."""
    [provider] = parse(tomllib.loads(block)["providers"])
    assert provider.models
    assert provider.api_key_env


def test_each_way_to_name_models_is_one() -> None:
    """Both, batches only, ordinary requests only, and with a price of its own."""
    [block] = (block for block in BLOCKS if block.startswith("[providers.models]"))
    [provider] = parse(
        tomllib.loads('[[providers]]\nname = "a"\nkind = "openai"\napi_key_env = "K"\n' + block)[
            "providers"
        ]
    )
    ways = {
        name: (m.batch is not None, m.standard is not None) for name, m in provider.models.items()
    }
    assert ways == {
        "writer": (True, True),
        "nightly": (True, False),
        "fast": (False, True),
        "priced": (True, False),
    }
    assert provider.models["priced"].price is not None


def test_each_credential_is_one() -> None:
    """One of them is chosen; Azure takes each."""
    [block] = (block for block in BLOCKS if block.startswith("credential"))
    base = '[[providers]]\nname = "a"\nkind = "azure"\nbase_url = "https://a.openai.azure.com"\n'
    lines = block.strip().splitlines()
    assert len(lines) == 4
    for line in lines:
        [provider] = parse(tomllib.loads(f'{base}{line}\nmodels = ["m"]\n')["providers"])
        assert f'"{provider.credential}"' in line


def test_every_key_of_a_table_is_explained() -> None:
    """And no other."""
    table = PAGE[PAGE.index("| key |") :].split("\n\n")[0]
    firsts = [line.split("|")[1] for line in table.splitlines()[2:]]
    named = {name for cell in firsts for name in re.findall(r"`(\w+)`", cell)}
    assert named == set(providers._Table.__struct_fields__)
