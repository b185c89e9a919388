"""``deterministic`` reaches the engine, from a batch or from the server's settings."""

from __future__ import annotations

import json

import pytest

from tests.backends.inference.conftest import CHAT, RESPONSES, TEXT, Ask, Watched, minimal
from tidemill.backends.inference import LocalInference
from tidemill.settings import Settings
from tidemill.types import Answer, BatchParams, Lane

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("endpoint", [CHAT, TEXT, RESPONSES])
async def test_a_batch_asks_for_the_same_text_every_time(
    ask: Ask, echo: Watched, endpoint: str
) -> None:
    """Its lines are marked, and a draw without a seed gets one; other lines are not."""
    params = BatchParams(deterministic=True, temperature=0.7)
    assert isinstance(await ask(endpoint, minimal(endpoint), params), Answer)
    assert isinstance(await ask(endpoint, minimal(endpoint)), Answer)
    marked, free = echo.asked
    assert (marked.deterministic, marked.sampling.seed) == (True, 0)
    assert (free.deterministic, free.sampling.seed) == (False, None)


@pytest.mark.parametrize("endpoint", [CHAT, TEXT, RESPONSES])
async def test_the_setting_holds_where_a_batch_says_nothing(echo: Watched, endpoint: str) -> None:
    """Interactive requests, and batches without the field; a batch that declines it is free."""
    inference = LocalInference({"echo": echo}, Settings(deterministic=True))
    for params in (None, BatchParams(top_p=0.5), BatchParams(deterministic=False)):
        body = json.dumps(minimal(endpoint)).encode()
        await inference.answer(endpoint, body, lane=Lane.BATCH, owner="o", defaults=params)
    assert [g.deterministic for g in echo.asked] == [True, True, False]


async def test_choices_of_one_request_differ_by_their_seeds(ask: Ask, echo: Watched) -> None:
    """Three draws are three texts, each the same on every run."""
    params = BatchParams(deterministic=True, temperature=1.0)
    await ask(CHAT, minimal(CHAT, n=3), params)
    assert [g.sampling.seed for g in echo.asked] == [0, 1, 2]
