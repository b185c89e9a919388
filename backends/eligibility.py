"""Which models a provider has refused to batch, learned from its own refusals.

A provider publishes no list of what it batches. A refusal is remembered for some months, so that
a model added later is picked up by itself; the cost of a stale record is one more refused batch.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidemill.ports import Facts
from tidemill.types import Actor, Record

KIND = "eligibility"
MIXED = "*"
"""Stands for "several models in one file"; no model can have this name."""


class Refused(Record, frozen=True, kw_only=True):
    """One model that a provider does not batch, as ``tidemill providers`` shows it."""

    provider: str
    model: str
    reason: str
    since_at: int


class Eligibility:
    """Remembers refusals in the store's facts."""

    def __init__(self, facts: Facts, *, ttl_days: float) -> None:
        self._facts = facts
        self._ttl_s = int(ttl_days * 86_400)

    async def teach(self, provider: str, models: Iterable[str], reason: str) -> None:
        """The provider refused to batch these models (ours by name)."""
        for model in models:
            await self._facts.put(KIND, _key(provider, model), reason.encode(), self._ttl_s)

    async def refused(self, provider: str) -> frozenset[str]:
        """Models not to be sent to this provider now; ``MIXED`` among them for mixed files."""
        return frozenset(record.model for record in await self.all() if record.provider == provider)

    async def forget(
        self, provider: str, models: Iterable[str] | None = None, by: Actor | None = None
    ) -> int:
        """Forget some models' refusals, or all of a provider; returns how many there were. The
        audit trail has each, as ``provider/model``, where somebody asked for it."""
        if models is None:
            models = await self.refused(provider)
        forgotten = 0
        for model in models:
            key, about = _key(provider, model), f"{provider}/{model}"
            forgotten += await self._facts.forget(KIND, key, by, about)
        return forgotten

    async def all(self) -> list[Refused]:
        """Everything remembered now."""
        records = []
        for key, (reason, at) in (await self._facts.all(KIND)).items():
            provider, _, model = key.partition("\n")
            records.append(
                Refused(provider=provider, model=model, reason=reason.decode(), since_at=at)
            )
        return sorted(records, key=lambda record: (record.provider, record.model))


def _key(provider: str, model: str) -> str:
    # A model's name may hold any printable character, so no printable one can separate the two.
    return f"{provider}\n{model}"
