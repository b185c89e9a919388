"""The executor runs lines and never raises for one."""

from __future__ import annotations

import json

import pytest

from tests.backends.inference.conftest import CHAT, Watched, chat
from tidemill.backends.executors import LocalExecutor
from tidemill.backends.inference import LocalInference
from tidemill.backends.routed import RoutedInference
from tidemill.types import Answer, BatchParams, Lane, Lease, Refusal

pytestmark = pytest.mark.anyio


def lease(line: bytes, params: BatchParams | None = None) -> Lease:
    """A lease on this line."""
    return Lease(
        batch_seq=1,
        batch_id="batch_1",
        owner="ann",
        key_id=None,
        no=1,
        token=1,
        attempt=1,
        custom_id="c",
        line=line,
        endpoint=CHAT,
        expires_at=0,
        params=params or BatchParams(),
    )


def line(text: str) -> bytes:
    """A line as a file has it."""
    return json.dumps(
        {"custom_id": "c", "method": "POST", "url": "/chat/completions", "body": chat(text)}
    ).encode()


async def test_a_line_runs_in_the_batch_lane_for_its_owner(
    inference: LocalInference, echo: Watched
) -> None:
    """Owner, lane and the batch's defaults reach the engine."""
    outcome = await LocalExecutor(RoutedInference([inference])).execute(
        lease(line("a b c"), BatchParams(max_decoding_length=2))
    )
    assert isinstance(outcome, Answer)
    (got,) = echo.asked
    assert (got.lane, got.owner, got.max_tokens) == (Lane.BATCH, "ann", 2)


async def test_a_bug_is_one_lines_failure(inference: LocalInference) -> None:
    """An unexpected exception is a refusal that may be retried."""
    outcome = await LocalExecutor(RoutedInference([inference])).execute(lease(line("!crash")))
    assert isinstance(outcome, Refusal)
    assert (outcome.status_code, outcome.code, outcome.retry) == (500, "internal_error", True)


@pytest.mark.parametrize("raw", [b"", b"[1]", b'{"custom_id":"c"}', b"\xff", b'{"body":"x"}'])
async def test_a_line_that_cannot_be_read_is_refused(inference: LocalInference, raw: bytes) -> None:
    """Nothing in a line's bytes makes the executor raise."""
    outcome = await LocalExecutor(RoutedInference([inference])).execute(lease(raw))
    assert isinstance(outcome, Refusal)
    assert outcome.status_code == 400


async def test_capacity_keeps_the_engine_busy(inference: LocalInference, echo: Watched) -> None:
    """As many lines wait next in line as run; those of a model that is gone are refused
    beside them."""
    executor = LocalExecutor(RoutedInference([inference]))
    assert executor.place("echo", CHAT) == "local/echo"
    assert executor.place("gone", CHAT) == "local"
    assert executor.capacities["local/echo"] == 2 * echo.status().slots
    assert executor.capacities["local"] > 0
