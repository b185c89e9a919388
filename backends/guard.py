"""Asks, before a line runs, whether its key still may and whether there is money for it.

A batch lives for hours; a key can be revoked or narrowed, and a budget used up, between its create
and its last line. What is finished stays; what has not run gets a row that says why.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeVar

from tidemill import access, clock, estimates
from tidemill.budgets import Turn
from tidemill.errors import Forbidden
from tidemill.ports import Accounts, Budgets, Executor
from tidemill.prices import Catalogue
from tidemill.types import BatchRecord, Grant, Lease, Outcome, Refusal, Waiting

K = TypeVar("K")
V = TypeVar("V")

GRANT_TTL_S = 1.0
"""How old what is known of a key may be; many lines a second ask."""
_MOST = 4096
"""Keys, and stopped batches, that are remembered."""

_OVER = Refusal(
    code="budget_exceeded",
    message="This request was not executed because its cost could exceed what may be spent.",
)


_CLOSING = Refusal(
    code="batch_closing",
    message="The batch ended while this request waited for its turn.",
    retry=True,
    spend=False,
)
"""Given back rather than settled: whoever closes the batch gives the line its row."""


class GuardedExecutor:
    """An ``Executor`` around another one. ``where`` says at which provider a model runs;
    ``max_answer`` is the server's limit where neither line nor batch has one, 0: none."""

    def __init__(
        self,
        inner: Executor,
        accounts: Accounts,
        budgets: Budgets,
        *,
        prices: Catalogue,
        where: Callable[[str], str],
        max_answer: int = 0,
    ) -> None:
        self._inner = inner
        self._accounts = accounts
        self._budgets = budgets
        self._prices = prices
        self._where = where
        self._max_answer = max_answer
        self._grants: OrderedDict[str, tuple[float, Grant | None]] = OrderedDict()
        self._stopped: OrderedDict[int, None] = OrderedDict()

    @property
    def capacities(self) -> Mapping[str, int]:
        """Lines that the inner executor wants in flight."""
        return self._inner.capacities

    def place(self, model: str, endpoint: str) -> str:
        """Where the inner executor runs a line."""
        return self._inner.place(model, endpoint)

    def waits(self, lines: Mapping[str, Waiting]) -> None:
        """The inner executor is told."""
        self._inner.waits(lines)

    async def execute(self, lease: Lease) -> Outcome:
        """The line's answer, or why it did not run. All is asked again after each wait for money,
        which can take as long as other lines do."""
        while lease.batch_seq not in self._stopped:
            since = self._budgets.turn
            grant = None if lease.key_id is None else await self._grant(lease.key_id)
            turn = await self._turn(lease, grant)
            if isinstance(turn, Refusal):
                return turn
            if turn == "held":
                return await self._inner.execute(lease)
            if turn == "over":
                _remember(self._stopped, lease.batch_seq, None)
            else:
                await self._budgets.freed(since)
        return _OVER

    async def _turn(self, lease: Lease, grant: Grant | None) -> Turn | Refusal:
        """Whether a line may run now; what it may cost is then held."""
        if grant is None and not lease.capped:
            return "held"
        model, usage = estimates.of_line(
            lease.line, lease.endpoint, lease.params, unsaid=self._max_answer
        )
        where = self._where(model)
        if grant is not None and (refusal := _withheld(grant, model, where)):
            return refusal
        rate = self._prices.quote(model, execution=where).rate
        if rate.free or not (lease.capped or (grant is not None and _budgeted(grant))):
            return "held"
        turn = await self._budgets.hold(lease, rate.cost(usage))
        return _CLOSING if turn == "closing" else turn

    async def _grant(self, key_id: str) -> Grant | None:
        now = clock.monotonic()
        known = self._grants.get(key_id)
        if known is not None and now - known[0] < GRANT_TTL_S:
            return known[1]
        grant = await self._accounts.grant(key_id)
        _remember(self._grants, key_id, (now, grant))
        return grant


async def permits(accounts: Accounts, batch: BatchRecord) -> Callable[[str], bool] | None:
    """Which models the key of a batch may use somewhere, as of now; None: all.

    Raises ``Forbidden`` for a key that may do nothing any more.
    """
    grant = None if batch.key_id is None else await accounts.grant(batch.key_id)
    if grant is None:
        return None
    trouble = access.trouble(grant, clock.now())
    if trouble is not None:
        code, message = trouble
        raise Forbidden(message, code=code)
    return partial(access.permits, access.limits(grant))


async def stopped(
    accounts: Accounts, batch: BatchRecord, models: Iterable[str], where: str
) -> Refusal | None:
    """Why a batch at a provider must not go on, as of now; None: it may.

    A provider runs a batch as a whole: it stops when any of its models may no longer be used there.
    """
    grant = None if batch.key_id is None else await accounts.grant(batch.key_id)
    if grant is None:
        return None
    if (trouble := _in_trouble(grant)) is not None:
        return trouble
    return next(filter(None, (_withheld(grant, model, where) for model in models)), None)


def _budgeted(grant: Grant) -> bool:
    return any(one.monthly_budget is not None for one in access.limits(grant))


def _in_trouble(grant: Grant) -> Refusal | None:
    trouble = access.trouble(grant, clock.now())
    if trouble is None:
        return None
    code, message = trouble
    return Refusal(code=code, message=f"This request was not executed: {message}")


def _withheld(grant: Grant, model: str, where: str) -> Refusal | None:
    if (trouble := _in_trouble(grant)) is not None:
        return trouble
    if not access.permits(access.limits(grant), model, where):
        return Refusal(
            code="model_not_permitted",
            message=f"This request was not executed: the key may no longer use '{model[:100]}'.",
            param="body.model",
        )
    return None


def _remember(known: OrderedDict[K, V], key: K, value: V) -> None:
    known[key] = value
    known.move_to_end(key)
    while len(known) > _MOST:
        known.popitem(last=False)
