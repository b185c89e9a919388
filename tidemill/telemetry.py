"""What the server says about itself: log lines and Prometheus metrics.

Labels are bounded: routes are templates, never paths, and nothing is labelled by owner, key or id.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import TextIO, cast

import structlog
import structlog.tracebacks
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)

from tidemill.settings import Settings

# Else every counter has a second series, that nobody reads.
disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY = CollectorRegistry()

REQUESTS = Counter(
    "tidemill_http_requests",
    "HTTP requests answered, by route template and status.",
    ("method", "route", "status"),
    registry=REGISTRY,
)
REQUEST_SECONDS = Histogram(
    "tidemill_http_request_seconds",
    "Time from a request's head to the end of its answer.",
    ("route",),
    buckets=(0.005, 0.025, 0.1, 0.5, 2.5, 10, 60, 300),
    registry=REGISTRY,
)
LINES_SETTLED = Counter(
    "tidemill_lines_settled",
    "Batch lines that ended here.",
    ("outcome",),
    registry=REGISTRY,
)
LINES_SHARED = Counter(
    "tidemill_lines_shared",
    "Batch lines that got the answer of an equal line of their batch.",
    registry=REGISTRY,
)
BATCHES = Gauge(
    "tidemill_batches_active",
    "Batches that are not terminal, by status.",
    ("status",),
    registry=REGISTRY,
)
POOL = Gauge(
    "tidemill_pool",
    "The fields of /v1/pool/status.",
    ("field",),
    registry=REGISTRY,
)
REPLICA_UP = Gauge(
    "tidemill_replica_up",
    "1 while the engine of a model is healthy.",
    ("model",),
    registry=REGISTRY,
)
REPLICA_LOADED = Gauge(
    "tidemill_replica_loaded",
    "1 while a model is in memory.",
    ("model",),
    registry=REGISTRY,
)
REPLICA_MEMORY = Gauge(
    "tidemill_replica_memory_bytes",
    "What a model takes while it is in memory, estimated.",
    ("model",),
    registry=REGISTRY,
)
MODEL_LOADS = Counter(
    "tidemill_model_loads",
    "Loads of a model on demand, by outcome.",
    ("model", "outcome"),
    registry=REGISTRY,
)
MODEL_UNLOADS = Counter(
    "tidemill_model_unloads",
    "Times that a model was unloaded to make room for another one.",
    ("model",),
    registry=REGISTRY,
)
REPLICA_TOKENS = Gauge(
    "tidemill_replica_tokens",
    "Tokens of a model since its engine was created.",
    ("model", "kind"),
    registry=REGISTRY,
)
REPLICA_SEQUENCES = Gauge(
    "tidemill_replica_sequences",
    "Sequences of a model now, by state.",
    ("model", "state"),
    registry=REGISTRY,
)
REPLICA_MOVES = Gauge(
    "tidemill_replica_moves",
    "What became of sequences that made way, since the engine was created.",
    ("model", "kind"),
    registry=REGISTRY,
)
REPLICA_ARENA = Gauge(
    "tidemill_replica_arena",
    "The memory for parked states of a model: bytes, and states in it.",
    ("model", "field"),
    registry=REGISTRY,
)


def lines_settled(succeeded: int, failed: int) -> None:
    """Count lines that a commit settled."""
    LINES_SETTLED.labels("succeeded").inc(succeeded)
    LINES_SETTLED.labels("failed").inc(failed)


class _Unfailing:
    """A stream whose reader may go away: what cannot be written is lost, and the server goes on.

    A broken pipe met while a batch is being closed would otherwise end the loop that closes it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


def configure_logging(settings: Settings) -> None:
    """Write log lines to standard error, as JSON or for eyes; libraries' lines look the same."""
    stream = cast(TextIO, _Unfailing(sys.stderr))
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Tracebacks without the frames' variables: those hold prompts, headers and keys.
    render: list[structlog.typing.Processor]
    if settings.log_format == "json":
        transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        render = [
            structlog.processors.ExceptionRenderer(transformer),
            structlog.processors.JSONRenderer(),
        ]
    else:
        render = [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                exception_formatter=structlog.dev.plain_traceback,
            )
        ]
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(stream),
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries speak up when something is wrong, not for every request they make.
    root.setLevel(max(level, logging.WARNING))
