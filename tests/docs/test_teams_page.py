"""What the page about teams, limits and prices shows can be used as it stands."""

from __future__ import annotations

import re
import tomllib
from decimal import Decimal
from pathlib import Path

from tidemill import limits, prices
from tidemill.prices import Rate
from tidemill.settings import rows
from tidemill.types import Limits, Usage

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "teams.md").read_text("utf-8")
BLOCKS = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


def test_the_price_file_is_one() -> None:
    """And says what its comments say."""
    catalogue = prices.parse(tomllib.loads(BLOCKS[0], parse_float=Decimal))
    assert catalogue.currency == "EUR"
    assert catalogue.models["gpt-5"].standard == Rate(
        input=1_250_000, cached=125_000, output=10_000_000
    )
    million = Usage(output=1_000_000)
    assert catalogue.cost(million, "gpt-5", execution="x", tier="batch") == 5_000_000
    assert catalogue.cost(million, "smollm2") == 20_000


def test_the_settings_are_settings() -> None:
    """Each name in the other block is one."""
    assert set(tomllib.loads(BLOCKS[1])) <= {row.name for row in rows()}


def test_every_limit_is_explained() -> None:
    """The table has each limit that can be set, and no other."""
    table = re.search(r"\| limit \|.*?\n\n", PAGE, re.DOTALL)
    assert table is not None
    firsts = [line.split("|")[1] for line in table[0].strip().splitlines()[2:]]
    named = {name for cell in firsts for name in re.findall(r"`([a-z_]+)`", cell)}
    assert named == set(Limits.__struct_fields__)
    assert set(limits.LANES) == {"interactive", "job", "batch"}
