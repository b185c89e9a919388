"""Deletes at a provider what nobody needs there any more.

Once a batch is settled its results are here, and so is its input: the provider's copies of both go,
and the copies of files that were deleted or expired here. Nothing waits for it, and what a provider
will not delete is left to its own expiry.
"""

from __future__ import annotations

import structlog

from tidemill.backends.forwarding import Forwarding, ProviderFailed
from tidemill.backends.refusals import Meaning
from tidemill.ports import Store
from tidemill.types import Leftover

log = structlog.get_logger()

_AT_ONCE = 20
_SOON_S = 1.0
_PASSING = (Meaning.TRANSIENT, Meaning.CREDENTIAL, Meaning.QUOTA)


class Leftovers:
    """Clears one provider, a few files at a time."""

    def __init__(self, name: str, store: Store, forwarding: Forwarding, interval_s: float) -> None:
        self._name = name
        self._store = store
        self._forwarding = forwarding
        self._interval_s = interval_s

    async def clear(self) -> float:
        """Delete some of what is left there; returns seconds until the next time."""
        found = await self._store.upstream.leftovers(self._name, _AT_ONCE)
        for leftover in found:
            try:
                await self._delete(leftover)
            except ProviderFailed as failed:
                log.warning("leftovers remain", provider=self._name, why=str(failed))
                return self._interval_s
            await self._store.upstream.cleared(leftover)
        return _SOON_S if len(found) == _AT_ONCE else self._interval_s

    async def _delete(self, leftover: Leftover) -> None:
        for id in leftover.ids:
            try:
                await self._forwarding.delete_file(id)
            except ProviderFailed as failed:
                if failed.failure.meaning in _PASSING and failed.failure.status != 501:
                    raise
                if failed.failure.meaning is not Meaning.GONE:
                    log.warning("leftover kept there", provider=self._name, why=str(failed))
