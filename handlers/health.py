"""``/health`` for whoever restarts the server, ``/metrics`` for whoever watches it. Both without a
key: neither tells more than load."""

from __future__ import annotations

from collections import Counter

import msgspec
from litestar import MediaType, Response, route
from prometheus_client import generate_latest

from tidemill import telemetry
from tidemill.handlers.deps import Incoming, Services, services

_METRICS_TYPE = "text/plain; version=0.0.4"
"""The framework adds the charset."""


@route("/health", http_method=["GET", "HEAD"], opt={"public": True})
async def health(request: Incoming) -> Response[bytes | None]:
    """200 while requests can be served, else 503 with the reason."""
    reason = services(request).health()
    found = {"status": "healthy"} if reason is None else {"status": "unhealthy", "reason": reason}
    return Response(
        None if request.method == "HEAD" else msgspec.json.encode(found),
        status_code=200 if reason is None else 503,
        media_type=MediaType.JSON,
        headers={"Cache-Control": "no-store"},
    )


@route("/metrics", http_method=["GET"], opt={"public": True})
async def metrics(request: Incoming) -> Response[bytes]:
    """Prometheus metrics, gauges as of now."""
    await _measure(services(request))
    return Response(generate_latest(telemetry.REGISTRY), media_type=_METRICS_TYPE)


ROUTES = (health, metrics)


async def _measure(given: Services) -> None:
    """Gauges are read when somebody looks, not kept."""
    pool = await given.pool_status()
    for field, value in msgspec.structs.asdict(pool).items():
        if isinstance(value, (int, float)):
            telemetry.POOL.labels(field).set(value)
    telemetry.REPLICA_UP.clear()
    for model, replica in pool.replicas.items():
        telemetry.REPLICA_UP.labels(model).set(replica.healthy)
        telemetry.REPLICA_LOADED.labels(model).set(replica.state == "loaded")
        telemetry.REPLICA_MEMORY.labels(model).set(replica.memory_bytes)
        for kind in ("generated", "prefilled", "reused", "drafted", "accepted"):
            tokens = getattr(replica, f"tokens_{kind}")
            telemetry.REPLICA_TOKENS.labels(model, kind).set(tokens)
        for state in ("active", "waiting", "parked", "held"):
            telemetry.REPLICA_SEQUENCES.labels(model, state).set(getattr(replica, state))
        for kind in ("parks", "resumes", "requeues", "refused"):
            telemetry.REPLICA_MOVES.labels(model, kind).set(getattr(replica, kind))
        for field, value in msgspec.structs.asdict(replica.arena).items():
            if isinstance(value, int):
                telemetry.REPLICA_ARENA.labels(model, field).set(value)
    telemetry.BATCHES.clear()
    for status, count in Counter(str(b.status) for b in await given.store.batches.active()).items():
        telemetry.BATCHES.labels(status).set(count)
