"""The stores that must conform: each factory opens one that is not yet started."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.storage.world import Hand
from tidemill.ports import Clock, Store
from tidemill.prices import Catalogue
from tidemill.storage import open_store

Factory = Callable[..., Store]
"""``(path, clock, prices)``; without prices everything costs 0."""


def sqlite(path: Path, clock: Clock, prices: Catalogue | None = None) -> Store:
    return open_store(path, clock=clock, tidy=False, prices=prices)


@pytest.fixture(params=[pytest.param(sqlite, id="sqlite")])
def factory(request: pytest.FixtureRequest) -> Factory:
    made: Factory = request.param
    return made


@pytest.fixture
def clock() -> Hand:
    return Hand()


@pytest.fixture
async def store(
    factory: Factory, tmp_path: Path, clock: Hand, anyio_backend: str
) -> AsyncIterator[Store]:
    """A started, empty store."""
    store = factory(tmp_path / "store", clock)
    await store.start()
    yield store
    await store.close()
