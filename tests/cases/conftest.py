"""Fixtures of the case tests: those of the handler tests."""

from __future__ import annotations

from tests.handlers.conftest import anyio_backend, open_world, shared_world, world

__all__ = ["anyio_backend", "open_world", "shared_world", "world"]
