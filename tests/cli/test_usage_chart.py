"""The chart of ``tidemill usage``: bars that can be compared, on any terminal."""

from __future__ import annotations

import pytest

from tests.cli.test_screen import Terminal
from tidemill.cli.usage import BAR, BAR_CELLS, BAR_CELLS_LEAST, show
from tidemill.types import Usage, UsageSum

COSTS = (1_000_000, 500_000, 1, 0)


def _sums(key: str = "day") -> list[UsageSum]:
    return [
        UsageSum(group={key: f"2026-11-0{n}"}, rows=n, usage=Usage(input=cost), cost=cost)
        for n, cost in enumerate(COSTS)
    ]


def _shown(monkeypatch: pytest.MonkeyPatch, columns: int, sums: list[UsageSum]) -> list[str]:
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout", terminal)
    show(tuple(sums[0].group), sums)
    return terminal.getvalue().splitlines()


@pytest.mark.parametrize("columns", [70, 80, 100, 300])
def test_a_bar_is_the_share_of_the_largest(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """In one line, however wide the terminal is; the least that cost anything is seen."""
    header, *lines = _shown(monkeypatch, columns, _sums())
    assert "share" in header
    assert len(lines) == len(COSTS)
    bars = [sum(line.count(cell) for cell in BAR) for line in lines]
    assert bars[0] == pytest.approx(2 * bars[1], abs=1)
    assert BAR_CELLS_LEAST <= bars[0] <= BAR_CELLS
    assert bars[2:] == [1, 0]


def test_without_room_there_is_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than one that is cut."""
    lines = _shown(monkeypatch, 50, _sums())
    assert not any(cell in line for line in lines for cell in BAR)


def test_what_costs_nothing_is_compared_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local models are free, and their work is seen all the same."""
    free = [
        UsageSum(group={"model": name}, rows=1, usage=Usage(input=n, output=n), cost=0)
        for name, n in (("a", 10), ("b", 5))
    ]
    _, first, second = _shown(monkeypatch, 100, free)
    assert first.count("█") == BAR_CELLS == 2 * second.count("█")
