"""How many drafts pay is decided from numbers, and numbers only."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.arithmetic import ticket
from tidemill.scheduler import speculation
from tidemill.scheduler.loop import Chunk, Sampled
from tidemill.scheduler.plan import UNBOUNDED, Limits
from tidemill.scheduler.sequence import Sequence as Live
from tidemill.scheduler.speculation import (
    COUNTS,
    GROUPS,
    MARGIN,
    PRIOR,
    PROBE,
    Costs,
    Guess,
    Odds,
    Speculation,
    passes,
    share,
)
from tidemill.types import Lane


def costs(seconds: dict[int, float]) -> Costs:
    """Learned from passes of these rows, each many times."""
    made = Costs()
    for _ in range(400):
        for rows, took in seconds.items():
            made.learn([rows], took)
    return made


FREE = costs({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0, 32: 1.0, 64: 1.0, 128: 1.0, 256: 1.0})
"""As on a large GPU: what counts is the pass."""
LINEAR = costs({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 16: 16.0, 32: 32.0, 64: 64.0, 128: 128.0})
"""Two rows are twice one."""
CPU = costs({1: 6.3, 2: 21, 4: 29, 8: 39, 16: 49, 32: 88, 64: 150, 128: 260})
"""Milliseconds of a small model on one thread: a single row has a kernel of its own."""


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([(0, 1)], [1]),
        ([(0, 1), (1, 1), (2, 1)], [3]),
        ([(0, 1), (2, 1)], [1, 1]),
        ([(0, 1), (1, 100), (2, 1)], [3, 99]),
        ([(0, 5), (1, 5), (2, 5)], [15]),
        ([(0, 1), (1, 5), (2, 5), (3, 1), (4, 5)], [5, 8, 4]),
        ([(3, 2), (4, 3), (6, 1)], [4, 1, 1]),
    ],
)
def test_neighbours_share_a_pass_as_far_as_the_shortest_goes(
    lengths: list[tuple[int, int]], expected: list[int]
) -> None:
    """What is left of the longer ones takes passes of its own."""
    assert passes(lengths) == expected


@given(st.dictionaries(st.integers(0, 20), st.integers(1, 30), min_size=1))
def test_passes_hold_every_row_once(lengths: dict[int, int]) -> None:
    """However the step is cut."""
    assert sum(passes(sorted(lengths.items()))) == sum(lengths.values())


def test_costs_are_learned_between_the_knots_too() -> None:
    """A pass of three rows says something of two and of four."""
    made = costs({1: 1.0, 3: 2.0})
    assert made.of(1) == pytest.approx(1.0, rel=0.01)
    assert made.of(3) == pytest.approx(2.0, rel=0.01)
    assert made.of(1) <= made.of(2) <= made.of(3) <= made.of(4)


def test_what_was_not_measured_looks_cheap_and_is_tried() -> None:
    """Before anything was computed nothing is decided. After a prompt a row of it is a row; after a
    token of an answer a few more look free, until they were tried."""
    made = Costs()
    assert made.of(4) == 0.0
    assert share([(0, 1)], {0: Guess(1.0, 16)}, made, 99) == ({}, 1.0)
    made.learn([100], 50.0)
    assert [made.of(n) for n in (1, 10, 100)] == pytest.approx([0.5, 5.0, 50.0])
    made.learn([1], 0.8)
    assert [made.of(n) for n in (1, 2, 17, 32)] == pytest.approx([0.8] * 4)
    made.learn([17], 5.0)
    assert made.of(17) == pytest.approx(5.0, rel=0.1)
    assert made.of(2) == pytest.approx(0.8)


def test_a_moment_in_which_the_machine_stood_still_teaches_little() -> None:
    """A step that took a thousand times as long moves the estimate by a fraction of it."""
    made = costs({1: 1.0})
    made.learn([1], 1_000.0)
    assert made.of(1) < 1.5


def test_what_several_passes_took_is_shared_among_them() -> None:
    """A step of two passes teaches both."""
    made = costs({8: 1.0, 2: 0.5})
    for _ in range(400):
        made.learn([8, 2], 3.0)
    assert made.total([8, 2]) == pytest.approx(3.0, rel=0.01)
    assert made.of(8) == pytest.approx(2.0, rel=0.05)


def test_more_rows_never_look_cheaper_and_never_dearer_than_passes() -> None:
    """Whatever was measured when the machine was slower or faster."""
    made = costs({4: 1.0})
    for _ in range(400):
        made.learn([1], 5.0)
    assert made.of(1) == pytest.approx(5.0, rel=0.01)
    assert made.of(1) <= made.of(2) <= 2 * made.of(1)


def test_odds_are_learned_by_group_and_by_length_of_the_match() -> None:
    """A short match that never holds says nothing of a long one, or of somebody else's."""
    odds = Odds()
    assert [odds.of("a", n) for n in (2, 3, 4, 5, 8, 9, 16)] == [
        PRIOR[k] for k in (0, 1, 1, 2, 2, 3, 3)
    ]
    for _ in range(200):
        odds.learn("a", 2, kept=0, refused=True)
        odds.learn("a", 16, kept=3, refused=False)
    assert odds.of("a", 2) < 0.01
    assert odds.of("a", 16) > 0.99
    assert odds.of("a", 4) == PRIOR[1]
    assert odds.of("b", 2) == PRIOR[0]


def test_three_of_four_kept_is_three_quarters() -> None:
    """Drafts after the first refused one were not tried."""
    odds = Odds()
    for _ in range(400):
        odds.learn("a", 2, kept=3, refused=True)
    assert odds.of("a", 2) == pytest.approx(0.75, abs=0.05)


def test_groups_are_forgotten_in_the_end() -> None:
    """A server with ever new owners keeps the last ones."""
    odds = Odds()
    for group in range(GROUPS + 1):
        odds.learn(group, 2, kept=0, refused=True)
    assert odds.of(0, 2) == PRIOR[0]
    assert odds.of(1, 2) < PRIOR[0]
    assert odds.of(GROUPS, 2) < PRIOR[0]


@pytest.mark.parametrize(
    ("seconds", "live", "chances", "expected"),
    [
        # Rows cost nothing: as many as there may be, whatever the chance.
        (FREE, 1, {0: 0.3}, {0: 15}),
        (FREE, 8, dict.fromkeys(range(8), 0.5), dict.fromkeys(range(8), 15)),
        # Rows cost in full: a draft that is surely kept costs what the token would.
        (LINEAR, 1, {0: 0.9}, None),
        (LINEAR, 8, dict.fromkeys(range(8), 0.95), None),
        # One row is cheap and two are dear: all or nothing, for a copy but not for a guess.
        (CPU, 1, {0: 0.95}, {0: 15}),
        (CPU, 1, {0: 0.5}, None),
        (CPU, 1, {0: 0.7}, None),
        # Eight that copy share their passes.
        (CPU, 8, dict.fromkeys(range(8), 0.95), dict.fromkeys(range(8), 7)),
        (CPU, 8, dict.fromkeys(range(8), 0.3), None),
        # One of eight that copies costs a pass of its own.
        (CPU, 8, {3: 0.5}, None),
        # Good ones are not held back by bad ones.
        (FREE, 2, {0: 0.9, 1: 0.0}, {0: 15, 1: 15}),
        (CPU, 1, {}, None),
    ],
)
def test_as_much_is_drafted_as_pays(
    seconds: Costs, live: int, chances: dict[int, float], expected: dict[int, int] | None
) -> None:
    """By what a pass of more rows costs and how likely a draft is kept."""
    lengths = [(seq, 1) for seq in range(live)]
    guesses = {i: Guess(chance, 99) for i, chance in chances.items()}
    given, ratio = share(lengths, guesses, seconds, 512)
    if expected is None:
        assert ratio < MARGIN
    else:
        assert ratio > MARGIN
        assert given == expected


def test_drafts_stay_within_the_room_and_the_limits() -> None:
    """Free rows of the step, and tokens that an answer may still have."""
    lengths = [(0, 1), (1, 1)]
    assert share(lengths, {0: Guess(0.9, 99), 1: Guess(0.9, 99)}, FREE, 7)[0] == {0: 3, 1: 3}
    assert share(lengths, {0: Guess(0.9, 5), 1: Guess(0.9, 5)}, FREE, 99)[0] == {0: 5, 1: 5}
    assert share(lengths, {0: Guess(0.9, 99)}, FREE, 0) == ({}, 1.0)


def test_the_time_of_prompts_is_not_the_drafts_to_pay() -> None:
    """Beside a long prompt a row costs what a row of it costs, and a token is worth as ever."""
    alone, together = [(0, 1)], [(0, 1), (1, 200)]
    for seconds in (FREE, LINEAR):
        paid = share(alone, {0: Guess(0.95, 16)}, seconds, 300)[1] >= MARGIN
        beside = share(together, {0: Guess(0.95, 16)}, seconds, 300)[1] >= MARGIN
        assert paid == beside


def test_drafts_that_save_a_pass_are_not_paid_twice() -> None:
    """Beside a prompt of four rows three drafts make one pass of two: they are free, not more."""
    given, ratio = share([(0, 1), (1, 4)], {0: Guess(0.5, 3)}, FREE, 99)
    assert given == {0: 3}
    assert ratio == pytest.approx(1 + (0.5 + 0.25 + 0.125) / 2)


class Scene:
    """Sequences on ids from 0, each of which says 1, 2, 3, 1, 2, 3; and a clock."""

    def __init__(self, lanes: Sequence[Lane], *, limit: int = 1_000) -> None:
        self.time = 0.0
        self.speculation: Speculation[str] = Speculation(now=lambda: self.time)
        self.live: dict[int, Live[str]] = {}
        for key, lane in enumerate(lanes):
            asked = ticket(key, [1, 2, 3, 1, 2], lane=lane, limit=limit)
            live = Live(asked, key, 0, slot=key, limits=Limits(slots=8, rows=520))
            live.tokens.append(3)
            live.done = 5
            self.live[key] = live

    def step(self, *, keeps: bool, seconds: float, context: int = UNBOUNDED) -> list[int]:
        """One step in which all drafts are kept or refused; how many each sequence got."""
        chunks = [live.chunk(key, 1) for key, live in self.live.items()]
        chunks = self.speculation.begin(chunks, self.live, rows=512, context=context)
        self.time += seconds
        sampled = {
            chunk.key: [Sampled(token=t) for t in [*chunk.drafts * keeps, 9]] for chunk in chunks
        }
        self.speculation.end(chunks, sampled)
        return [len(chunk.drafts) for chunk in chunks]


def test_what_is_kept_is_drafted_and_what_is_refused_is_not() -> None:
    """Where rows are free, drafts go on for as long as they are kept; when none is any more they
    stop, but for one step in so many."""
    scene = Scene([Lane.BATCH])
    got = [scene.step(keeps=True, seconds=1.0)[0] for _ in range(20)]
    assert got[0] == 0, "nothing was measured yet"
    assert got[-1] == COUNTS[-1]
    refused = [scene.step(keeps=False, seconds=1.0)[0] for _ in range(1_000)]
    assert refused[0] == COUNTS[-1]
    assert 0 < sum(n > 0 for n in refused[500:]) <= -(-500 // PROBE)


def test_one_batch_learns_nothing_from_another() -> None:
    """An owner's batch whose answers copy, and one whose answers do not: the first is drafted."""
    scene = Scene([Lane.BATCH])
    scene.live[0].group = "invents"
    for _ in range(300):
        scene.step(keeps=False, seconds=1.0)
    assert scene.step(keeps=False, seconds=1.0) == [0]
    scene.live[0].group = "copies"
    got = [scene.step(keeps=True, seconds=1.0)[0] for _ in range(20)]
    assert got[-1] == COUNTS[-1]


def test_drafts_come_back_when_they_are_kept_again() -> None:
    """A probe finds out."""
    scene = Scene([Lane.BATCH])
    for _ in range(300):
        scene.step(keeps=False, seconds=1.0)
    later = [scene.step(keeps=True, seconds=1.0)[0] for _ in range(20 * PROBE)]
    assert later[-1] > 0


def test_nobody_else_gets_drafts_beside_somebody_interactive() -> None:
    """Lines would lengthen the step that a person waits for; the person's own drafts do not."""
    scene = Scene([Lane.BATCH, Lane.INTERACTIVE, Lane.JOB])
    for lane in Lane:
        scene.speculation.odds.learn(("", lane, ""), 3, kept=99, refused=False)
    for _ in range(5):
        got = scene.step(keeps=True, seconds=1.0)
    assert got == [0, COUNTS[-1], 0]


def test_an_answer_is_not_drafted_beyond_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token is chosen and not computed."""
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    for limit, most in ((2, 0), (3, 1), (6, 4)):
        scene = Scene([Lane.BATCH], limit=limit)
        assert max(scene.step(keeps=True, seconds=1.0)[0] for _ in range(9)) == most


def test_a_sequence_is_not_drafted_out_of_its_context() -> None:
    """It has six tokens; what its id has no room for is not computed on it."""
    for context, most in ((6, 0), (7, 1), (9, 3)):
        scene = Scene([Lane.BATCH])
        scene.speculation.odds.learn(("", Lane.BATCH), 3, kept=99, refused=False)
        got = [scene.step(keeps=True, seconds=1.0, context=context)[0] for _ in range(9)]
        assert max(got) == most


def test_prompts_are_not_drafted() -> None:
    """A sequence that has said nothing yet has its prompt to compute."""
    scene = Scene([Lane.BATCH])
    del scene.live[0].tokens[-1]
    scene.live[0].done = 4
    assert [scene.step(keeps=True, seconds=1.0) for _ in range(9)] == [[0]] * 9
    chunk = Chunk(key=0, seq=0, start=0, tokens=[1, 2], chooser=None)
    assert scene.speculation.begin([chunk], scene.live, rows=512, context=UNBOUNDED) == [chunk]
