"""The two state machines as random walks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.scheduler import states
from tidemill.types import TERMINAL, BatchStatus, LineState


@given(st.data())
def test_every_walk_of_a_batch_ends_and_never_leaves_its_end(data: st.DataObject) -> None:
    """From validating, any sequence of allowed moves reaches a terminal state in at most five."""
    state, steps = BatchStatus.VALIDATING, 0
    seen = {state}
    while moves := sorted(states.BATCH_MOVES[state]):
        state = data.draw(st.sampled_from(moves))
        assert state not in seen, "a status never comes twice"
        seen.add(state)
        steps += 1
    assert state in TERMINAL
    assert steps <= 4


@given(st.data())
def test_every_walk_of_a_line_ends_in_one_result(data: st.DataObject) -> None:
    """A line goes to and fro between queued and running only; every end is final."""
    state = LineState.QUEUED
    for _ in range(50):
        moves = sorted(states.LINE_MOVES[state])
        if not moves:
            break
        state = data.draw(st.sampled_from(moves))
    assert (state in states.LINE_ENDS) == (not states.LINE_MOVES[state])
    assert {
        LineState.SUCCEEDED,
        LineState.FAILED,
        LineState.CANCELLED,
        LineState.EXPIRED,
    } == states.LINE_ENDS


def test_the_tables_agree_with_the_terminal_states() -> None:
    """No move leaves a terminal state, and every other state can be left."""
    assert {s for s, to in states.BATCH_MOVES.items() if not to} == TERMINAL
    assert set(BatchStatus) == states.OPEN | TERMINAL
    assert set(states.ENDS.values()) < TERMINAL


@pytest.mark.parametrize("state", sorted(states.BATCH_MOVES))
def test_sources_is_the_inverse_of_the_table(state: BatchStatus) -> None:
    """``sources`` names exactly the states whose moves contain the target."""
    for frm in BatchStatus:
        assert (frm in states.sources(state)) == states.allowed(frm, state)


def test_only_validating_and_in_progress_can_be_cancelled() -> None:
    """What is finalizing or ended cannot be cancelled any more."""
    assert {BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS} == states.CANCELLABLE


def test_a_cancelled_line_never_ran_and_a_running_one_is_not_cancelled() -> None:
    """Lines in flight finish and are kept."""
    assert not states.allowed_line(LineState.RUNNING, LineState.CANCELLED)
    assert states.allowed_line(LineState.QUEUED, LineState.CANCELLED)
