"""What a principal may do now: models, budgets, pace, and the room it has left.

Limits hang on keys, teams and users; a principal without any passes at no cost.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from tidemill import access, budgets, clock, estimates
from tidemill.errors import Forbidden, RateLimited
from tidemill.handlers.deps import Services
from tidemill.types import FileRecord, Lane, Limits, Principal, Record, UsageRow


async def interactive(
    given: Services, who: Principal, endpoint: str, raw: bytes, model: str | None = None
) -> Lane:
    """Let one interactive request come in; returns the lane that it gets.

    Raises ``Forbidden`` for a model that is not permitted, and ``RateLimited``.
    """
    if not who.limits:
        return Lane.INTERACTIVE
    asked = model or estimates.of_body(raw, endpoint)[0]
    if asked and not access.permits(who.limits, asked, given.inference.where(asked)):
        raise _not_permitted(asked)
    late = given.pace.admit(_named(who), clock.monotonic())
    if late is not None:
        raise RateLimited(
            f"Rate limit reached: {late.limit} {late.what}s per minute. Please try again in "
            f"{late.wait_s:.1f}s.",
            retry_after_s=late.wait_s,
        )
    return access.lane(who.limits, Lane.INTERACTIVE)


class Purchase:
    """What one interactive request reserves of the budgets before it runs.

    ::

        begin ──► True: reserved ──► settle(row)    the true cost takes its place
          │                     └──► settle(None)   it cost nothing
          └────► False: ask again after freed
    """

    def __init__(
        self, given: Services, who: Principal, endpoint: str, raw: bytes, model: str | None = None
    ) -> None:
        self._store = given.store
        self._arrears = given.arrears
        self._key_id = who.key_id
        self._amount: int | None = None
        """Micro-units; None: no budget applies."""
        self._reservation: int | None = None
        if any(one.monthly_budget is not None for one in who.limits):
            unsaid = given.settings.max_decoding_length
            asked, usage = estimates.of_body(raw, endpoint, unsaid=unsaid)
            asked = model or asked
            rate = given.prices.quote(asked, execution=given.inference.where(asked)).rate
            self._amount = 0 if rate.free else rate.cost(usage)
        self._turn = 0

    async def begin(self) -> bool:
        """Reserve; False while what is in flight may use up a budget.

        Raises ``BudgetExceeded``, and ``StoreUnavailable`` where nothing can be booked."""
        await self._arrears.pay(self._store)
        if self._amount is None or self._key_id is None:
            return True
        budget = self._store.budgets
        if self._amount == 0:
            budgets.admit(await budget.purses(self._key_id))
            return True
        self._turn = budget.turn
        self._reservation = await budget.begin(self._key_id, self._amount)
        return self._reservation is not None

    async def freed(self) -> None:
        """Returns once something in flight has ended since ``begin`` was asked."""
        await self._store.budgets.freed(self._turn)

    async def settle(self, row: UsageRow | None) -> None:
        """Book what was used, if anything was, and give back what was reserved; once."""
        reservation, self._reservation = self._reservation, None
        await self._arrears.settle(self._store, row, reservation)


def answered(given: Services, who: Principal, tokens: int) -> None:
    """Take the tokens of an interactive answer from the minute's allowance."""
    given.pace.charge(_named(who), tokens, clock.monotonic())


class Room(Record, frozen=True, kw_only=True):
    """What an owner may keep, and what it keeps already."""

    quota: int | None = None
    stored: int = 0

    async def within(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The same bytes. Raises ``StorageQuotaExceeded`` at the first that does not fit.

        Several uploads at once each see only themselves: the commit counts again.
        """
        size = 0
        async for piece in body:
            size += len(piece)
            if self.quota is not None:
                budgets.keep(self.stored, size, self.quota)
            yield piece


async def upload(given: Services, who: Principal, size: int = 1) -> Room:
    """What an owner may still keep. Raises ``StorageQuotaExceeded`` where that is less than
    ``size`` bytes."""
    quota = access.least(one.storage_bytes for one in who.limits)
    if quota is None:
        return Room()
    stored = await given.store.budgets.stored(who.owner)
    budgets.keep(stored, size, quota)
    return Room(quota=quota, stored=stored)


def batch(given: Services, who: Principal, file: FileRecord) -> None:
    """Whether a key may still use the models of a file, and open another batch now. Raises
    ``Forbidden`` and ``RateLimited``.

    It could when the file came, but a key may be narrowed in between.
    """
    placement = file.facts.placement
    for model in file.facts.models:
        where = placement.provider or given.inference.where(model)
        if not access.permits(who.limits, model, where):
            raise _not_permitted(model)
    late = given.pace.batch(who.owner, given.settings.batches_per_hour, clock.monotonic())
    if late is not None:
        raise RateLimited(
            f"Rate limit reached: {late.limit} batches per hour. Please try again in "
            f"{late.wait_s:.1f}s.",
            retry_after_s=late.wait_s,
        )


def _not_permitted(model: str) -> Forbidden:
    return Forbidden(
        f"This key may not use the model '{model[:100]}'.",
        param="model",
        code="model_not_permitted",
    )


def _named(who: Principal) -> list[tuple[str, Limits]]:
    """The limits with the ids that they count for, in the order of ``Principal.limits``."""
    ids = [id for id in (who.key_id, who.team_id, who.user_id) if id is not None]
    return list(zip(ids, who.limits, strict=True))
