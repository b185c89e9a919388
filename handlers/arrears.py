"""Usage that could not be booked when it was due, because the store could not be written.

An answer that is computed is given, whatever becomes of its row; but nobody gets another one before
the rows that are owed are in the ledger. So a full disk costs at most the requests that were in
flight when it filled, and each of them is booked once, as soon as there is room.
"""

from __future__ import annotations

from collections import deque

import anyio
import structlog

from tidemill.errors import StoreUnavailable
from tidemill.ports import Store
from tidemill.types import UsageRow

log = structlog.get_logger()


class Arrears:
    """Rows, and reservations, of requests that have ended; kept in memory."""

    def __init__(self) -> None:
        self._owed: deque[tuple[UsageRow | None, int | None]] = deque()
        self._lock = anyio.Lock()

    def __len__(self) -> int:
        """Requests that are owed."""
        return len(self._owed)

    async def settle(self, store: Store, row: UsageRow | None, reservation: int | None) -> None:
        """Book a row and give back a reservation, as far as there is one of either; now, or when
        ``pay`` can."""
        try:
            await _settle(store, row, reservation)
        except StoreUnavailable as exc:
            self._owed.append((row, reservation))
            if row is not None:
                used = {"input": row.usage.input, "output": row.usage.output}
                log.error("usage is not booked yet", why=exc.message, model=row.model, **used)

    async def pay(self, store: Store) -> None:
        """Settle what is owed, in order. Raises ``StoreUnavailable`` while that cannot be."""
        if not self._owed:
            return
        async with self._lock:
            while self._owed:
                await _settle(store, *self._owed[0])
                self._owed.popleft()

    async def close(self, store: Store) -> None:
        """The last chance; what is owed then is lost with the process, and the log has it."""
        try:
            await self.pay(store)
        except StoreUnavailable as exc:
            log.error("usage was never booked", why=exc.message, requests=len(self))


async def _settle(store: Store, row: UsageRow | None, reservation: int | None) -> None:
    if row is not None:
        await store.ledger.book([row], reservation=reservation)
    elif reservation is not None:
        await store.budgets.release(reservation)
