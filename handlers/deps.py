"""What handlers are given: the services of this server, and who is asking."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from tidemill.ports import Inference, Registry, Store
from tidemill.settings import Settings
from tidemill.types import PoolStatus


class Services(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a handler may touch, wired by ``tidemill.app``; kept in ``app.state.services``."""

    settings: Settings
    store: Store
    backends: Registry
    inference: Inference
    pool_status: Callable[[], Awaitable[PoolStatus]]
    health: Callable[[], str | None]
    """None when healthy, else the reason."""
