"""Which models are in memory: the decision, as a table and over hours of made-up time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from tidemill.scheduler.residency import Moves, Resident, decide
from tidemill.types import ModelState

NOW, TURN_S = 10_000.0, 60.0


def one(key: str, state: ModelState = "loaded", size: int = 6, **more: Any) -> Resident:
    """A model of six bytes, of which a budget of ten holds one."""
    return Resident(key=key, size=size, state=state, **more)


LINES: dict[str, Any] = {"lines_at": NOW - 5}
WORK: dict[str, Any] = {"busy": 3, "lines_at": NOW - 50}


@pytest.mark.parametrize(
    ("residents", "moves"),
    [
        pytest.param([one("a"), one("b", "unloaded")], Moves(), id="nobody asks"),
        pytest.param(
            [one("a", size=4, **WORK), one("b", "unloaded", asked_at=NOW)],
            Moves(load=("b",)),
            id="it fits beside",
        ),
        pytest.param([one("a", "unloaded", 99, **LINES)], Moves(load=("a",)), id="alone always"),
        pytest.param(
            [
                one("a", used_at=2, size=5),
                one("b", used_at=1, size=5),
                one("c", "unloaded", 5, **LINES),
            ],
            Moves(unload=("b",)),
            id="the least recently used goes",
        ),
        pytest.param(
            [
                one("a", used_at=2, size=5),
                one("b", used_at=1, size=5),
                one("c", "unloaded", 8, **LINES),
            ],
            Moves(unload=("b", "a")),
            id="as many go as must",
        ),
        pytest.param(
            [one("a", turn_at=NOW - 20, **WORK), one("b", "unloaded", **LINES)],
            Moves(look_at=NOW + 40),
            id="lines wait for the end of a turn",
        ),
        pytest.param(
            [one("a", turn_at=NOW - 60, **WORK), one("b", "unloaded", **LINES)],
            Moves(hold=frozenset("a")),
            id="at its end what runs is finished",
        ),
        pytest.param(
            [one("a", turn_at=NOW - 60, lines_at=NOW - 60), one("b", "unloaded", **LINES)],
            Moves(unload=("a",)),
            id="and then it goes, although lines wait for it",
        ),
        pytest.param(
            [one("a", turn_at=NOW - 1, busy=2), one("b", "unloaded", **LINES)],
            Moves(hold=frozenset("a")),
            id="a turn ends with its last line",
        ),
        pytest.param(
            [one("a", kept_until=NOW + 9), one("b", "unloaded", **LINES)],
            Moves(look_at=NOW + 9),
            id="lines wait for somebody who may come back",
        ),
        pytest.param(
            [one("a", kept_until=NOW + 9), one("b", "unloaded", deadline=NOW + 99, **LINES)],
            Moves(unload=("a",)),
            id="not near their deadline",
        ),
        pytest.param(
            [one("a", kept_until=NOW + 9), one("b", "unloaded", asked_at=NOW)],
            Moves(unload=("a",)),
            id="and somebody who is there does not",
        ),
        pytest.param(
            [one("a", turn_at=NOW - 1, **WORK), one("b", "unloaded", asked_at=NOW)],
            Moves(hold=frozenset("a")),
            id="a person waits for no turn",
        ),
        pytest.param(
            [
                one("a", "unloading"),
                one("b", "unloaded", asked_at=NOW),
                one("c", size=4, turn_at=NOW, **WORK),
            ],
            Moves(),
            id="what is being unloaded is enough",
        ),
        pytest.param(
            [one("a", "loading"), one("b", "unloaded", asked_at=NOW)],
            Moves(),
            id="nothing is stopped while it is loaded",
        ),
        pytest.param(
            [
                one("a", size=3, used_at=1),
                one("b", size=5, turn_at=NOW - 20, **WORK),
                one("c", "unloaded", 9, **LINES),
            ],
            Moves(look_at=NOW + 40),
            id="none goes in vain",
        ),
        pytest.param(
            [
                one("a", turn_at=NOW, **WORK),
                one("b", "unloaded", 9, asked_at=NOW - 9),
                one("c", "unloaded", 3, asked_at=NOW - 8),
            ],
            Moves(hold=frozenset("a")),
            id="nobody later takes what the first waits for",
        ),
        pytest.param(
            [
                one("a", "unloaded", lines_at=NOW - 9),
                one("b", "unloaded", lines_at=NOW - 8),
                one("c", "unloaded", asked_at=NOW - 1),
            ],
            Moves(load=("c",)),
            id="a person first",
        ),
        pytest.param(
            [
                one("a", "unloaded", lines_at=NOW - 9),
                one("b", "unloaded", lines_at=NOW - 8, deadline=NOW + 100),
            ],
            Moves(load=("b",)),
            id="a near deadline before a long wait",
        ),
        pytest.param(
            [
                one("a", "unloaded", lines_at=NOW - 99),
                one("b", "unloaded", lines_at=NOW - 8, lifted=True),
            ],
            Moves(load=("b",)),
            id="a batch that would be late before a long wait",
        ),
        pytest.param(
            [
                one("a", "unloaded", lines_at=NOW - 9 - 4 * TURN_S),
                one("b", "unloaded", lines_at=NOW - 8, lifted=True),
            ],
            Moves(load=("a",)),
            id="not before a very long one",
        ),
        pytest.param(
            [
                one("a", turn_at=NOW - 20, **WORK),
                one("b", "unloaded", lifted=True, **LINES),
            ],
            Moves(look_at=NOW + 40),
            id="it waits for the end of a turn",
        ),
        pytest.param(
            [
                one("a", turn_at=NOW, deadline=NOW + 500, **WORK),
                one("b", "unloaded", deadline=NOW + 400, **LINES),
            ],
            Moves(hold=frozenset("a")),
            id="a nearer deadline ends a turn",
        ),
        pytest.param(
            [
                one("a", turn_at=NOW - 999, deadline=NOW + 400, **WORK),
                one("b", "unloaded", deadline=NOW + 500, **LINES),
            ],
            Moves(),
            id="and keeps it",
        ),
        pytest.param(
            [one("a", "unloaded", asked_at=NOW, not_before=NOW + 7)],
            Moves(look_at=NOW + 7),
            id="a failed load is tried again later",
        ),
    ],
)
def test_each_case_has_one_answer(residents: list[Resident], moves: Moves) -> None:
    """A budget of ten bytes."""
    assert decide(residents, 10, TURN_S, NOW) == moves


class Machine:
    """A server of made-up models and time: a second a tick, lines of ``line_s``, loads of
    ``load_s`` seconds."""

    def __init__(self, names: str, *, line_s: int, load_s: int, lifted: str = "") -> None:
        self.models = {
            name: one(name, "unloaded", lines_at=0.0, deadline=math.inf, lifted=name in lifted)
            for name in names
        }
        self.left = dict.fromkeys(names, 0)
        self.line_s, self.load_s = line_s, load_s
        self.served: list[tuple[int, str]] = []

    def run(self, seconds: int) -> Iterator[int]:
        """Lines of every model always wait; yields after each second."""
        for now in range(seconds):
            moves = decide(list(self.models.values()), 10, TURN_S, float(now))
            for name in moves.load:
                self._set(name, state="loading")
                self.left[name] = self.load_s
            for name in moves.unload:
                assert self.models[name].busy == 0
                self._set(name, state="unloaded", lines_at=float(now))
            for name, model in self.models.items():
                self._tick(name, model, float(now), held=name in moves.hold)
            assert sum(m.size for m in self.models.values() if m.state != "unloaded") <= 10
            yield now

    def _tick(self, name: str, model: Resident, now: float, *, held: bool) -> None:
        self.left[name] = max(0, self.left[name] - 1)
        if model.state == "loading" and not self.left[name]:
            self._set(name, state="loaded", turn_at=now, busy=0)
        elif model.state == "loaded" and not self.left[name]:
            if model.busy:
                self.served.append((int(now), name))
            self._set(name, busy=0 if held else 1, used_at=now)
            self.left[name] = 0 if held else self.line_s

    def _set(self, name: str, **change: Any) -> None:
        self.models[name] = msgspec.structs.replace(self.models[name], **change)


@pytest.mark.parametrize("names", ["ab", "abcd"])
def test_lines_of_every_model_get_their_turn_within_the_bound(names: str) -> None:
    """Endless lines of several models, memory for one: none waits longer than the turns of all
    others, each with its last line and a load; and none is loaded for a few lines only."""
    machine = Machine(names, line_s=7, load_s=5)
    for _ in machine.run(4_000):
        pass
    bound = len(names) * (TURN_S + 7 + 5 + 3)
    for name in names:
        times = [at for at, served in machine.served if served == name]
        gaps = [b - a for a, b in pairwise(times)]
        assert times[0] <= bound
        assert max(gaps) <= bound
    swaps = sum(a[1] != b[1] for a, b in pairwise(machine.served))
    assert swaps <= 4_000 / TURN_S


def test_a_lifted_model_has_every_other_turn() -> None:
    """Half of the time that is not lost to loads, whatever waits; and the others wait for two turns
    of each other at most."""
    machine = Machine("abcd", line_s=7, load_s=5, lifted="a")
    for _ in machine.run(8_000):
        pass
    shares = Counter(name for _, name in machine.served)
    assert shares["a"] / len(machine.served) == pytest.approx(1 / 2, abs=0.02)
    assert max(shares[name] - shares[other] for name in "bcd" for other in "bcd") <= TURN_S / 7


@pytest.mark.parametrize("lifted", ["a", "ab", "abc", "abcd"])
def test_no_model_waits_for_ever_for_lifted_ones(lifted: str) -> None:
    """Twice the bound of before, however many of them are lifted."""
    machine = Machine("abcd", line_s=7, load_s=5, lifted=lifted)
    for _ in machine.run(8_000):
        pass
    for name in "abcd":
        times = [at for at, served in machine.served if served == name]
        assert max(b - a for a, b in pairwise([0, *times, 8_000])) <= 2 * 4 * (TURN_S + 7 + 5 + 3)


def test_one_model_alone_is_never_unloaded() -> None:
    """Its turn does not end where nobody else waits."""
    machine = Machine("a", line_s=1, load_s=1)
    for now in machine.run(500):
        assert now < 2 or machine.models["a"].state == "loaded"
