"""Native code (C++20, nanobind), and what stands in where it was not built.

``SlotPool`` and ``Gate`` are the C++ ones where the extension imports, else those of
``tidemill.native.model``; both have the interface ``tidemill.native.slots.Pool``.
"""

from __future__ import annotations

from tidemill.native.slots import (
    IllegalTransition,
    Pool,
    PoolBroken,
    StaleHandle,
    State,
    Stats,
)

try:
    from tidemill.native._core import Gate, SlotPool

    HAVE_CORE = True
except ImportError:
    from tidemill.native.model import Gate, SlotPool  # type: ignore[assignment]

    HAVE_CORE = False

__all__ = [
    "HAVE_CORE",
    "Gate",
    "IllegalTransition",
    "Pool",
    "PoolBroken",
    "SlotPool",
    "StaleHandle",
    "State",
    "Stats",
]
