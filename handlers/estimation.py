"""What a file's batch may cost, before it runs: an estimate until its lines are booked."""

from __future__ import annotations

from collections.abc import Mapping

from tidemill.errors import BudgetExceeded
from tidemill.estimates import Demand, Tally
from tidemill.handlers.deps import Services
from tidemill.prices import LOCAL, shown
from tidemill.types import BatchParams, FileRecord, Placement


async def demand_of(
    given: Services, file: FileRecord, endpoint: str, params: BatchParams
) -> dict[str, Demand]:
    """What the lines of a stored file ask for, by model."""
    tally = Tally(endpoint, params, unsaid=given.settings.max_decoding_length)
    async for piece in given.store.files.read(file):
        tally.feed(piece)
    return tally.finish()


def cost(
    given: Services, demand: Mapping[str, Demand], placement: Placement, tier: str | None = None
) -> int:
    """Micro-units for all lines; ``tier`` other than that of the placement says: what if.

    At most: each row's cost is rounded up by less than one.
    """
    total = 0
    provider = placement.provider if placement.execution != LOCAL else None
    for model, one in demand.items():
        where = provider or given.inference.where(model)
        own = "batch" if provider else "standard"
        rate = given.prices.quote(model, execution=where, tier=tier or own).rate
        total += 0 if rate.free else rate.cost(one.usage) + one.lines
    return total


async def reservation(
    given: Services,
    file: FileRecord,
    endpoint: str,
    params: BatchParams,
    *,
    hold: bool,
    max_cost: int | None,
) -> int:
    """What to reserve for a new batch.

    A provider runs a batch as a whole: its lines cannot be stopped before the one that crosses, so
    there the estimate must fit. Raises ``BudgetExceeded``.
    """
    forwarded = file.facts.placement.execution != LOCAL
    if not hold and not (forwarded and max_cost is not None):
        return 0
    demand = await demand_of(given, file, endpoint, params)
    estimate = cost(given, demand, file.facts.placement)
    if forwarded and max_cost is not None and estimate > max_cost:
        raise BudgetExceeded(
            f"The estimated cost of {shown(estimate)} is more than the 'max_cost' of "
            f"{shown(max_cost)}, and a provider cannot stop a batch in between."
        )
    if max_cost is not None:
        estimate = min(estimate, max_cost)
    return estimate if hold else 0
