"""The llama.cpp engine: one supervised child process per model."""

from __future__ import annotations

from tidemill.backends.llama.llama_replica import replica

__all__ = ["replica"]
