"""The two pools and the drain rate."""

from __future__ import annotations

import pytest

from tidemill.errors import AtCapacity
from tidemill.scheduler.admission import DrainRate, IntakePool, SchedulingPool


def test_a_batch_that_does_not_fit_now_is_told_when_to_come_again() -> None:
    """The retry time follows the measured drain rate and nothing is reserved."""
    rate = DrainRate()
    pool = IntakePool(100, rate)
    pool.reserve(90)
    rate.add(50)
    with pytest.raises(AtCapacity) as refused:
        pool.reserve(60)
    assert refused.value.retry_after_s == 1
    assert pool.size == 90


def test_retry_after_stays_within_what_sdks_honour() -> None:
    """1 to 60 seconds, 30 when nothing was measured yet."""
    rate = DrainRate()
    pool = IntakePool(10, rate)
    assert pool.retry_after_s(5) == 30
    rate.add(1, now=1000.0)
    assert pool.retry_after_s(10**9) in range(1, 61)


def test_a_batch_larger_than_the_pool_takes_no_room() -> None:
    """Its validation fails it; it must not block the others meanwhile."""
    pool = IntakePool(10, DrainRate())
    assert pool.reserve(11) == 0
    assert pool.size == 0
    assert not pool.fits_ever(11)


def test_reservations_return_to_zero() -> None:
    """A reservation becomes waiting lines, and lines leave as they are leased."""
    pool = IntakePool(10, DrainRate())
    held = pool.reserve(4)
    pool.release(held)
    pool.add(4)
    pool.remove(4)
    assert (pool.waiting, pool.reserved, pool.size) == (0, 0, 0)


def test_the_drain_rate_forgets_after_a_minute() -> None:
    """Only the last minute counts."""
    rate = DrainRate()
    rate.add(600, now=0.0)
    assert rate.per_second(now=30.0) == pytest.approx(20.0)
    assert rate.per_second(now=61.0) == 0.0


def test_the_scheduling_pool_counts() -> None:
    """What entered and has not left is in flight; nothing leaves that never entered."""
    pool = SchedulingPool(10)
    pool.enter(3)
    pool.leave(1)
    assert pool.active == 2
    with pytest.raises(AssertionError):
        pool.leave(3)


def test_the_last_measured_rate_outlives_the_minute() -> None:
    """Who asks while nothing runs is told the pace of the last work, undiluted by the rest."""
    rate = DrainRate()
    assert rate.measured == 0.0
    rate.add(100, now=0.0)
    rate.add(100, now=10.0)
    rate.add(0, now=500.0)
    assert rate.measured == pytest.approx(20.0)
    assert rate.per_second(now=500.0) == 0.0
