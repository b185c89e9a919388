"""A provider on loopback, and this server in front of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from worlds.house import House, Open, open_house
from worlds.provider import API_KEY, ProviderWorld

from tidemill.settings import Settings


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that only a test knows are not asked of the machine's own proxy."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture(scope="package")
def provider_process() -> Iterator[ProviderWorld]:
    with ProviderWorld() as world:
        yield world


@pytest.fixture
def world(provider_process: ProviderWorld) -> ProviderWorld:
    provider_process.reset()
    return provider_process


@pytest.fixture
def server(tmp_path: Path, world: ProviderWorld, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens servers on one store: ``async with server({"kind": …}, prefer="cheapest") as house``.

    Each table given is one provider, laid over the usual one.
    """
    monkeypatch.setenv("UP_KEY", API_KEY)
    usual = {
        "name": "up",
        "kind": "openai_compatible",
        "base_url": world.url + "/v1",
        "api_key_env": "UP_KEY",
        "models": {
            "big": "gpt-4.1",
            "small": {"batch": "gpt-4.1-mini"},
            "gpt-4.1-mini": "gpt-4.1-mini",
            "vectors": "embed",
            "echo": {"batch": "dep-41"},
        },
    }

    def opened(*tables: dict[str, Any], **more: Any) -> AbstractAsyncContextManager[House]:
        settings: dict[str, Any] = {"provider_refresh_s": 0.0, "drain_seconds": 0.0} | more
        return open_house(
            Settings(
                storage_path=str(tmp_path / "store"),
                engine="echo",
                providers=json.dumps([usual | table for table in tables or ({},)]),
                **settings,
            )
        )

    return opened
