"""OpenAI-shaped requests on the engines of this server, for interactive routes and batch lines
alike."""

from __future__ import annotations

from tidemill.backends.inference.local import LocalInference

__all__ = ["LocalInference"]
