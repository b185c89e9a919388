"""The shapes that the OpenAI SDKs see, and nothing else. Source of every rule:
docs/reference/api.md.

Records become wire objects here; result rows are written here, once, so that they read the same
everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from tidemill import ids
from tidemill.errors import ProviderRefused, TidemillError
from tidemill.prices import shown
from tidemill.types import Answer, BatchRecord, BatchStatus, FileRecord, Outcome, Problem, Refusal

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
"""Endpoints that a batch may address, canonical spelling; those without ``/v1`` are equal."""

RESULT_FILE_EXPIRY_S = 2_592_000
EXPIRY_RANGE_S = (3_600, 2_592_000)

_encoder = msgspec.json.Encoder()


def canonical_endpoint(url: str) -> str | None:
    """``/v1/chat/completions`` for itself and for ``/chat/completions``; None when no batch may
    address it."""
    full = url if url.startswith("/v1/") else "/v1" + url
    return full if full in ENDPOINTS else None


# A reader that splits on these would cut a record in two (httpx.iter_lines, str.splitlines), and
# msgspec writes them raw.
_SPLITTERS = re.compile(b"\xc2\x85|\xe2\x80\xa8|\xe2\x80\xa9")
_ESCAPES = {b"\xc2\x85": b"\\u0085", b"\xe2\x80\xa8": b"\\u2028", b"\xe2\x80\xa9": b"\\u2029"}


def encode(value: Any) -> bytes:
    """Compact JSON that survives every line reader: U+0085, U+2028 and U+2029 are escaped."""
    return _SPLITTERS.sub(lambda m: _ESCAPES[m.group()], _encoder.encode(value))


# --- objects ----------------------------------------------------------------------------------


def file_object(file: FileRecord) -> dict[str, Any]:
    """A ``FileObject`` with our extra fields."""
    body: dict[str, Any] = {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }
    if file.kind == "input":
        body["tidemill_execution"] = file.facts.placement.execution
        body["tidemill_placement"] = {
            "execution": file.facts.placement.execution,
            "provider": file.facts.placement.provider,
            "reason": file.facts.placement.reason,
        }
    return body


_SHOWN = {BatchStatus.EXPIRING: BatchStatus.FINALIZING}


def shown_status(status: BatchStatus) -> str:
    """The status as the SDK's eight names have it."""
    return str(_SHOWN.get(status, status))


def batch_object(batch: BatchRecord) -> dict[str, Any]:
    """A ``Batch``: the 20 documented keys always present, then ``model``, ``usage`` and our own
    fields."""
    usage = batch.usage
    local = batch.placement.execution == "local"
    body: dict[str, Any] = {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": [msgspec.to_builtins(p) for p in batch.problems]}
        if batch.problems
        else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": shown_status(batch.status),
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "in_progress_at": batch.in_progress_at,
        "expires_at": batch.expires_at,
        "finalizing_at": batch.finalizing_at,
        "completed_at": batch.completed_at,
        "failed_at": batch.failed_at,
        "expired_at": batch.expired_at,
        "cancelling_at": batch.cancelling_at,
        "cancelled_at": batch.cancelled_at,
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "metadata": batch.metadata,
        "usage": {
            "input_tokens": usage.input,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.output,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.input + usage.output,
        },
        "tidemill_execution": "local" if local else "provider",
        "logos_execution": "logos" if local else "provider",
        "lines_rerun": batch.lines_rerun,
    }
    if local:
        # Prompt tokens that the engine found computed: a beginning shared, or a whole answer.
        body["prefill_tokens_saved"] = usage.cached
    if batch.cost or batch.held or batch.max_cost is not None:
        body["tidemill_cost"] = {
            "amount": shown(batch.cost),
            "held": shown(batch.held),
            "max_cost": None if batch.max_cost is None else shown(batch.max_cost),
        }
    if batch.waits is not None:
        body["tidemill_waits"] = batch.waits
    if batch.problems and batch.status is BatchStatus.FAILED:
        first = batch.problems[0]
        # BatchGen's clients read one error of the batch as a whole from here.
        body["error"] = {"code": first.code, "message": first.message}
    return body


def list_object(data: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """A page; ``has_more`` is never true on an empty one (the SDKs' pagers would stop silently)."""
    return {
        "object": "list",
        "data": list(data),
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more and bool(data),
    }


def error_object(error: TidemillError) -> dict[str, Any]:
    """The OpenAI envelope; ``error.errors`` lists all problems of an input file. A provider's own
    fields stay as it gave them."""
    inner: dict[str, Any] = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }
    if error.problems:
        inner["errors"] = {
            "object": "list",
            "data": [msgspec.to_builtins(p) for p in error.problems],
        }
    if isinstance(error, ProviderRefused):
        inner |= error.given
    return {"error": inner}


# --- result rows ------------------------------------------------------------------------------


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Failure(msgspec.Struct):
    code: str
    message: str


class _ResultRow(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response | None
    error: _Failure | None


def result_row(custom_id: str, outcome: Outcome) -> bytes:
    """The row of one line, without its line end: exactly ``id, custom_id, response, error``.

    A line that ran has ``response`` and ``error: null``; one that never ran has it the other way
    round.
    """
    if isinstance(outcome, Answer):
        response = _Response(200, outcome.request_id or ids.request_id(), msgspec.Raw(outcome.body))
        return encode(_ResultRow(ids.row_id(), custom_id, response, None))
    if outcome.status_code is None:
        return unrun_row(custom_id, outcome.code, outcome.message)
    body = outcome.body if outcome.body is not None else _encoder.encode(refusal_body(outcome))
    response = _Response(
        outcome.status_code, outcome.request_id or ids.request_id(), msgspec.Raw(body)
    )
    return encode(_ResultRow(ids.row_id(), custom_id, response, None))


def unrun_row(custom_id: str, code: str, message: str) -> bytes:
    """The row of a line that never ran (cancelled, expired, too long, out of budget)."""
    return encode(_ResultRow(ids.row_id(), custom_id, None, _Failure(code, message)))


def refusal_body(refusal: Refusal) -> dict[str, Any]:
    """A refusal in the OpenAI envelope."""
    return {
        "error": {
            "message": refusal.message,
            "type": refusal.type,
            "param": refusal.param,
            "code": refusal.code,
        }
    }


def problem(
    code: str, message: str, *, line: int | None = None, param: str | None = None
) -> Problem:
    """Shorthand for a ``Problem``."""
    return Problem(code=code, message=message, line=line, param=param)
