"""``GET /batches/{id}/results``: result rows of a batch while it runs, both kinds, as NDJSON.

An extension of the API: ``?after=<cursor>&limit=<rows>&wait=<seconds>``. The next cursor is in
``X-Tidemill-Next``; an empty answer with a terminal ``X-Tidemill-Status`` is the end.
"""

from __future__ import annotations

import anyio
from litestar import Response, get
from litestar.params import FromPath

from tidemill import clock, wire
from tidemill.access import BATCH
from tidemill.handlers.batches import owned_batch
from tidemill.handlers.deps import Incoming, Services, services, whole_number
from tidemill.types import TERMINAL, BatchRecord, ResultRow

MAX_ROWS = 1000
MAX_WAIT_S = 60


@get("/batches/{batch_id:str}/results", opt={"scope": BATCH})
async def batch_results(request: Incoming, batch_id: FromPath[str]) -> Response[bytes]:
    """Rows after a cursor; with ``wait``, as soon as there is one or the batch has ended."""
    batch = await owned_batch(request, batch_id)
    after = whole_number(request, "after", 0, 0, 2**63 - 1)
    limit = whole_number(request, "limit", MAX_ROWS, 1, MAX_ROWS)
    wait_s = whole_number(request, "wait", 0, 0, MAX_WAIT_S)
    batch, rows = await _read(services(request), batch, after, limit, wait_s)
    return Response(
        b"".join(row.row + b"\n" for row in rows),
        media_type="application/x-ndjson",
        headers={
            "X-Tidemill-Next": str(rows[-1].seq if rows else after),
            "X-Tidemill-Status": wire.batch_object(batch)["status"],
        },
    )


ROUTES = (batch_results,)


async def _read(
    given: Services, batch: BatchRecord, after: int, limit: int, wait_s: float
) -> tuple[BatchRecord, list[ResultRow]]:
    until = clock.monotonic() + wait_s
    over = given.wait_rows is None or wait_s == 0
    while True:
        async with anyio.create_task_group() as tasks:
            # Listen first, then look: what happens in between rings.
            heard = _Heard()
            tasks.start_soon(_listen, given, batch.seq, until, heard)
            await anyio.lowlevel.checkpoint()
            # The status before the rows: a terminal batch gets no further row.
            batch = await given.store.batches.get(batch.id, None) or batch
            rows = await given.store.lines.rows(batch.seq, after, limit)
            if not (rows or over or batch.status in TERMINAL):
                await heard.event.wait()
                over = not heard.something
                continue
            tasks.cancel_scope.cancel()
        return batch, rows


class _Heard:
    def __init__(self) -> None:
        self.event = anyio.Event()
        self.something = False


async def _listen(given: Services, seq: int, until: float, heard: _Heard) -> None:
    if given.wait_rows is not None:
        heard.something = await given.wait_rows(seq, max(0.0, until - clock.monotonic()))
    heard.event.set()
