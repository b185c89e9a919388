"""Fixtures of the handler tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path

import pytest

from tests.handlers.world import Open, World, opened


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """One event loop for all tests of a file, because they share an application."""
    return "asyncio"


@pytest.fixture(scope="module")
async def shared_world(
    anyio_backend: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[World]:
    """One application for the tests of a file: to start one each would be most of their time, and
    one for all would keep its event loop open under tests that start their own."""
    async with opened(tmp_path_factory.mktemp("shared") / "store") as one:
        yield one


@pytest.fixture
async def world(shared_world: World) -> AsyncGenerator[World]:
    """The shared application, seen by an owner who has nothing yet."""
    async with shared_world.for_newcomers() as mine:
        yield mine


@pytest.fixture
def open_world(tmp_path: Path) -> Open:
    """Opens an application of the test's own, with settings of its choice, always on the same
    store."""
    return partial(opened, tmp_path / "store")
