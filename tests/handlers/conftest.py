"""Fixtures of the handler tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path

import pytest

from tests.handlers.world import Open, World, opened


@pytest.fixture
def open_world(tmp_path: Path) -> Open:
    """Opens a world with settings of the test's choice, always on the same store."""
    return partial(opened, tmp_path / "store")


@pytest.fixture
async def world(open_world: Open) -> AsyncGenerator[World]:
    """A world with the keys of Alice and Bob."""
    async with open_world() as one:
        yield one
