"""Limits as people write them: in the admin API's JSON and on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tidemill.prices import micro, shown
from tidemill.types import Lane, Limits

LANES = {lane.name.lower(): lane for lane in Lane}


def parse(fields: Mapping[str, Any]) -> Limits:
    """Limits from named fields; what is absent or null is no limit.

    ``lane`` is a name, ``monthly_budget`` an amount of currency. Raises ``ValueError`` naming the
    field.

    >>> parse({"lane": "batch", "monthly_budget": "12.50"}).monthly_budget
    12500000
    """
    unknown = set(fields) - set(Limits.__struct_fields__)
    if unknown:
        raise ValueError(f"unknown limit '{min(unknown)}'")
    values = {name: value for name, value in fields.items() if value is not None}
    if "lane" in values:
        if values["lane"] not in LANES:
            raise ValueError(f"'lane' is one of {', '.join(LANES)}")
        values["lane"] = LANES[values["lane"]]
    if "monthly_budget" in values:
        amount = values["monthly_budget"]
        if isinstance(amount, bool) or not isinstance(amount, int | float | str):
            raise ValueError("'monthly_budget' is an amount of currency")
        try:
            values["monthly_budget"] = micro(str(amount))
        except ValueError as exc:
            raise ValueError(f"'monthly_budget': {exc}") from None
    for name, value in values.items():
        if isinstance(value, int) and not 0 <= value < 2**63:
            raise ValueError(f"'{name}' is not negative")
    try:
        return msgspec.convert(values, Limits)
    except msgspec.ValidationError as exc:
        raise ValueError(str(exc)) from None


def written(limits: Limits) -> dict[str, Any]:
    """The limits that are set, as ``parse`` reads them.

    >>> written(Limits(lane=Lane.JOB, monthly_budget=1))
    {'lane': 'job', 'monthly_budget': '0.000001'}
    """
    fields: dict[str, Any] = {
        name: value
        for name, value in msgspec.json.decode(msgspec.json.encode(limits)).items()
        if value is not None and not (name == "lane" and value == Lane.INTERACTIVE)
    }
    if "lane" in fields:
        fields["lane"] = limits.lane.name.lower()
    if limits.monthly_budget is not None:
        fields["monthly_budget"] = shown(limits.monthly_budget)
    return fields
