"""``GET /usage``: what was used and what it cost, for the asker's own objects."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import MediaType, Response, get

from tidemill import clock, reports
from tidemill.errors import BadRequest
from tidemill.handlers.deps import Incoming, principal, services


@get("/usage")
async def usage(request: Incoming) -> Response[bytes]:
    """Sums of the owner's usage rows: ``?since=&until=&group_by=&format=json|csv``."""
    who = await principal(request)
    return await report(request, who.owner)


ROUTES = (usage,)


async def report(request: Incoming, owner: str | None) -> Response[bytes]:
    """Sums of an owner's usage rows, or of everybody's."""
    asked = request.query_params
    kind = asked.get("format") or "json"
    if kind not in ("json", "csv"):
        raise BadRequest(
            "Invalid value for 'format'. Supported values are: 'json', 'csv'.", param="format"
        )
    try:
        query = reports.query(
            since=asked.get("since") or None,
            until=asked.get("until") or None,
            by=asked.get("group_by") or None,
            owner=owner,
            now=clock.now(),
        )
    except reports.BadQuery as exc:
        raise BadRequest(f"Invalid value for '{exc.param}': {exc}.", param=exc.param) from None
    given = services(request)
    sums = await given.store.ledger.report(query)
    if kind == "csv":
        return Response(
            reports.as_csv(query.by, sums).encode(),
            media_type="text/csv; charset=utf-8",
            headers={"Content-Disposition": 'attachment; filename="usage.csv"'},
        )
    body: dict[str, Any] = {
        "object": "list",
        "currency": given.prices.currency,
        "since_at": query.since_at,
        "until_at": query.until_at,
        "data": reports.rows(sums),
    }
    return Response(msgspec.json.encode(body), media_type=MediaType.JSON)
