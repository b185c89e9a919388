"""Requests and tokens per minute."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.pace import Pace
from tidemill.types import Limits


@given(
    st.integers(1, 20),
    st.lists(st.floats(0, 30, allow_nan=False), min_size=1, max_size=60),
)
def test_no_minute_has_more_than_twice_its_requests(limit: int, gaps: list[float]) -> None:
    """A full bucket and what flows in meanwhile: never more than two minutes' worth in one."""
    pace, limits, now, granted = Pace(), [("key", Limits(requests_per_minute=limit))], 0.0, []
    for gap in gaps:
        now += gap
        if pace.admit(limits, now) is None:
            granted.append(now)
    for start in granted:
        assert sum(start <= at < start + 60 for at in granted) <= 2 * limit


@given(st.integers(1, 100), st.integers(0, 200))
def test_who_waits_as_told_is_let_in(limit: int, asked: int) -> None:
    """The time that a refusal gives is enough, and not much longer than needed."""
    pace, limits = Pace(), [("key", Limits(requests_per_minute=limit))]
    for _ in range(asked):
        late = pace.admit(limits, 0.0)
        if late is not None:
            assert late.wait_s <= 60 / limit + 1e-6
            assert pace.admit(limits, late.wait_s * 0.9) is not None
            assert pace.admit(limits, late.wait_s + 1e-6) is None
            return
    assert asked <= limit


def test_an_hour_has_so_many_batches_of_an_owner() -> None:
    """They come back evenly, each owner has its own, and 0 is no limit."""
    pace = Pace()
    assert [pace.batch("a", 3, 0.0) for _ in range(3)] == [None, None, None]
    late = pace.batch("a", 3, 0.0)
    assert late is not None
    assert (late.what, late.limit, late.wait_s) == ("batch", 3, 1_200.0)
    assert pace.batch("b", 3, 0.0) is None
    assert pace.batch("a", 3, 1_199.0) is not None
    assert pace.batch("a", 3, 1_201.0) is None
    assert all(pace.batch("c", 0, 0.0) is None for _ in range(5_000))


def test_tokens_are_taken_once_they_are_known() -> None:
    """An answer may overdraw the minute; the next request waits until it is paid back."""
    pace, limits = Pace(), [("key", Limits(tokens_per_minute=60))]
    assert pace.admit(limits, 0.0) is None
    pace.charge(limits, 90, 0.0)
    late = pace.admit(limits, 0.0)
    assert late is not None
    assert (late.what, late.limit, round(late.wait_s)) == ("token", 60, 30)
    assert pace.admit(limits, 31.0) is None


def test_the_tightest_limit_counts_and_a_refusal_takes_nothing() -> None:
    """A request that its team refuses does not use up its key's minute."""
    pace = Pace()
    key = ("key", Limits(requests_per_minute=2))
    team = ("team", Limits(requests_per_minute=1))
    assert pace.admit([key, team], 0.0) is None
    assert pace.admit([key, team], 0.0) is not None
    assert pace.admit([key], 0.0) is None
    assert pace.admit([key], 0.0) is not None


def test_zero_means_never() -> None:
    """A limit of zero is a limit; no limit is none."""
    pace = Pace()
    late = pace.admit([("key", Limits(requests_per_minute=0))], 0.0)
    assert late is not None
    assert late.wait_s == 60
    assert pace.admit([("key", Limits())], 0.0) is None
