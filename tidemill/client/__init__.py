"""The Python client: ``TidemillClient`` and ``AsyncTidemillClient``, the same methods on both."""

from __future__ import annotations

from tidemill.client.aio import AsyncTidemillClient
from tidemill.client.core import (
    ApiError,
    ClientError,
    RetriesExhausted,
    ServerUnreachable,
    WaitTimeout,
)
from tidemill.client.sync import TidemillClient

BatchGenHttpClient = TidemillClient
"""The name under which BatchGen's scripts know this client."""

__all__ = [
    "ApiError",
    "AsyncTidemillClient",
    "BatchGenHttpClient",
    "ClientError",
    "RetriesExhausted",
    "ServerUnreachable",
    "TidemillClient",
    "WaitTimeout",
]
