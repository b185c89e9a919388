"""Fixtures of all tests."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator

import pytest

# Servers that tests start listen on loopback. Where the machine reaches the world through a proxy,
# they are reached without it: by our clients, by child processes, by everybody who asks.
for name in ("no_proxy", "NO_PROXY"):
    os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost")))

# In the background of a shell Ctrl-C is ignored, and so it would be by all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def anyio_backend() -> str:
    """The server runs on asyncio; so do its tests."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def cache_home() -> Iterator[None]:
    """A cache folder of this run's own, for its child processes too: weights are rewritten into it
    once, and nothing is left in the user's."""
    with (
        tempfile.TemporaryDirectory(prefix="tidemill-cache-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("XDG_CACHE_HOME", folder)
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What needs a GPU is for whoever has one and asks for it."""
    if "gpu" in config.option.markexpr:
        return
    wanted = [item for item in items if item.get_closest_marker("gpu") is None]
    if len(wanted) < len(items):
        left_out = [item for item in items if item not in wanted]
        config.hook.pytest_deselected(items=left_out)
        items[:] = wanted
