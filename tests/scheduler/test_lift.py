"""Batches that would miss their deadline are lifted, in time and not for ever."""

from __future__ import annotations

import pytest

from tidemill.scheduler.lift import LOOK_S, Lifts, Pace, late
from tidemill.types import BatchRecord, BatchStatus

DAY = 86_400


@pytest.mark.parametrize(
    ("now", "lines", "rate", "lifted", "then"),
    [
        pytest.param(0, 1_000, 1.0, False, False, id="a thousand seconds of work, a day of time"),
        pytest.param(0, 43_201, 1.0, False, True, id="less than twice the time that it needs"),
        pytest.param(0, 43_200, 1.0, False, False, id="exactly twice is enough"),
        pytest.param(0, 30_000, 1.0, True, True, id="lifted, it stays until it has three times"),
        pytest.param(0, 28_800, 1.0, True, False, id="three times: it is lifted no more"),
        pytest.param(0, 10**9, 0.0, False, False, id="no line has ended, so nothing is known"),
        pytest.param(77_759, 1, 0.0, False, False, id="before the last tenth"),
        pytest.param(77_760, 1, 0.0, False, True, id="in the last tenth at any pace"),
        pytest.param(77_760, 1, 1e6, False, True, id="in the last tenth, however fast"),
        pytest.param(77_760, 0, 0.0, True, False, id="no line is left"),
        pytest.param(DAY, 5, 1.0, True, False, id="it is over"),
    ],
)
def test_a_batch_is_lifted_when_it_would_be_late(
    now: float, lines: int, rate: float, lifted: bool, then: bool
) -> None:
    """By what is left of time and lines, by the pace, and by what it was before."""
    assert then is late(now=now, began_at=0, expires_at=DAY, lines=lines, rate=rate, lifted=lifted)


def test_an_even_pace_is_measured_as_it_is() -> None:
    """From the first lines on, and also after much longer than it remembers."""
    pace = Pace(1_000.0)
    assert pace.per_second(1_010.0) == 0.0
    for second in range(1, 3_601):
        pace.add(2, 1_000.0 + second)
        if second in (10, 100, 1_000, 3_600):
            assert pace.per_second(1_000.0 + second) == pytest.approx(2.0, rel=0.12)


def test_a_pace_without_turns_falls() -> None:
    """To less than half in the time that it remembers, and never to nothing."""
    pace = Pace(0.0)
    for second in range(1, 3_001):
        pace.add(1, float(second))
    assert 0.3 < pace.per_second(3_300.0) < 0.5
    assert 0.0 < pace.per_second(6_000.0) < 0.01


def batch(seq: int, *, total: int, done: int = 0) -> BatchRecord:
    """A batch of a day, begun at 0."""
    return BatchRecord(
        seq=seq, id=f"batch_{seq}", owner="a", key_id=None, status=BatchStatus.IN_PROGRESS,
        endpoint="/v1/embeddings", input_file_id="file_1", input_file_seq=1,
        completion_window="24h", created_at=0, expires_at=DAY, total=total, completed=done,
    )  # fmt: skip


def test_pace_and_lines_are_those_of_each_batch() -> None:
    """Two of the same size at the same time: the slow one is lifted, the fast one is not; and it is
    lifted no more when its lines have ended."""
    lifts = Lifts()
    lifts.add(batch(1, total=100_000, done=40_000), 0.0)
    lifts.add(batch(2, total=100_000, done=40_000), 0.0)
    for second in range(1, 1_001):
        lifts.ended(1, 1, float(second))
        lifts.ended(2, 3, float(second))
    assert lifts.look(1_000.0) == {1}
    lifts.ended(1, 59_000, 1_000.0)
    assert lifts.look(1_000.0 + LOOK_S) == set()


def test_all_are_looked_at_now_and_then() -> None:
    """Not for every line that ends; at once when a batch is new, and never one that is gone."""
    lifts = Lifts()
    lifts.add(batch(1, total=9), DAY - 10.0)
    assert lifts.look(DAY - 10.0) == {1}
    assert lifts.look(DAY - 10.0 + LOOK_S / 2) is None
    lifts.add(batch(2, total=9), DAY - 7.0)
    assert lifts.look(DAY - 7.0) == {1, 2}
    lifts.remove(1)
    assert lifts.look(DAY - 7.0 + LOOK_S) == {2}
