"""The body of ``POST /batches``: every field checked, each complaint naming its field.

Messages and codes: section E of docs/reference/api.md. Unknown fields are ignored, because
SDKs merge ``extra_body`` into the top level and Azure's own samples send stray ones.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from tidemill.errors import BadRequest
from tidemill.handlers.expiry import expires_after_s
from tidemill.prices import micro
from tidemill.types import BatchParams, Record
from tidemill.wire import ENDPOINTS, canonical_endpoint

MAX_PAIRS = 16
MAX_KEY = 64
MAX_VALUE = 512


class Creation(Record, frozen=True, kw_only=True):
    """What a client asks for."""

    input_file_id: str
    endpoint: str
    """Canonical."""
    completion_window: str
    metadata: dict[str, str] | None
    output_expires_after_s: int | None
    params: BatchParams
    max_cost: int | None = None
    """Micro-units."""
    hold: bool = False
    """Reserve the estimated cost."""


def parse(body: bytes) -> Creation:
    """Raises ``BadRequest`` for the first field that is wrong."""
    try:
        fields = msgspec.json.decode(body)
    except (ValueError, RecursionError) as exc:
        raise BadRequest(
            "The body is not valid JSON; a batch is created with a JSON object "
            "(Content-Type: application/json).",
            code="invalid_json",
        ) from exc
    if not isinstance(fields, dict):
        raise BadRequest(
            f"The body must be a JSON object, not {_kind(fields)}.", code="invalid_type"
        )
    if fields.get("input_blob") is not None:
        raise BadRequest(
            "'input_blob' is not supported here: upload the file to /v1/files and send its id as "
            "'input_file_id'.",
            param="input_blob",
            code="unsupported_parameter",
        )
    return Creation(
        input_file_id=_text(fields, "input_file_id"),
        endpoint=_endpoint(_text(fields, "endpoint")),
        completion_window=_window(fields),
        metadata=_metadata(fields.get("metadata")),
        output_expires_after_s=(
            None
            if fields.get("output_expires_after") is None
            else expires_after_s("output_expires_after", fields["output_expires_after"])
        ),
        params=_params(fields),
        max_cost=_amount(fields, "max_cost"),
        hold=_hold(fields),
    )


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is None:
        raise BadRequest(
            f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
        )
    if not isinstance(value, str):
        raise _wrong_type(name, "a string", value)
    return value


def _endpoint(value: str) -> str:
    canonical = canonical_endpoint(value)
    if canonical is None:
        supported = ", ".join(f"'{endpoint}'" for endpoint in ENDPOINTS)
        raise BadRequest(
            f"Invalid value: '{value[:100]}'. Supported values are: {supported}.", param="endpoint"
        )
    return canonical


def _window(fields: dict[str, Any]) -> str:
    # OpenAI insists on the field; BatchGen's client and its documented curl call leave it out, and
    # there is only one value that it could have.
    value = fields.get("completion_window")
    if value is None:
        return "24h"
    if not isinstance(value, str):
        raise _wrong_type("completion_window", "a string", value)
    if value != "24h":
        raise BadRequest(
            f"Invalid value: '{value[:100]}'. Supported values are: '24h'.",
            param="completion_window",
        )
    return value


def _metadata(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _wrong_type("metadata", "an object", value)
    if len(value) > MAX_PAIRS:
        raise BadRequest(
            f"'metadata' has {len(value)} pairs; at most {MAX_PAIRS} are allowed.", param="metadata"
        )
    for key, content in value.items():
        if len(key) > MAX_KEY:
            raise BadRequest(
                f"A key of 'metadata' has {len(key)} characters; at most {MAX_KEY} are allowed.",
                param="metadata",
            )
        if not isinstance(content, str):
            raise _wrong_type(f"metadata.{key}", "a string", content)
        if len(content) > MAX_VALUE:
            raise BadRequest(
                f"The value of 'metadata.{key}' has {len(content)} characters; at most "
                f"{MAX_VALUE} are allowed.",
                param=f"metadata.{key}",
            )
    return value


def _amount(fields: dict[str, Any], name: str) -> int | None:
    """An amount of currency, as a number or, for who wants it exact, as a text."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _wrong_type(name, "a number", value)
    try:
        return micro(value if isinstance(value, int) else str(value))
    except ValueError as exc:
        raise BadRequest(f"Invalid value for '{name}': {exc}.", param=name) from None


def _hold(fields: dict[str, Any]) -> bool:
    value = fields.get("hold")
    if value is None:
        return False
    if value != "estimate":
        raise BadRequest(
            "Invalid value for 'hold'. Supported values are: 'estimate'.", param="hold"
        )
    return True


def _params(fields: dict[str, Any]) -> BatchParams:
    return BatchParams(
        max_decoding_length=_integer(fields, "max_decoding_length", 1),
        temperature=_number(fields, "temperature", 0.0, 2.0),
        top_p=_number(fields, "top_p", 0.0, 1.0),
        top_k=_integer(fields, "top_k", 0),
        max_context_length=_integer(fields, "max_context_length", 1),
        deterministic=_boolean(fields, "deterministic"),
    )


def _integer(fields: dict[str, Any], name: str, low: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong_type(name, "an integer", value)
    if not low <= value < 2**31:
        raise BadRequest(f"Invalid value for '{name}': expected {low} to {2**31 - 1}.", param=name)
    return value


def _number(fields: dict[str, Any], name: str, low: float, high: float) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _wrong_type(name, "a number", value)
    if not low <= value <= high or math.isnan(value):
        raise BadRequest(f"Invalid value for '{name}': expected {low:g} to {high:g}.", param=name)
    return float(value)


def _boolean(fields: dict[str, Any], name: str) -> bool | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong_type(name, "a boolean", value)
    return value


def _wrong_type(name: str, wanted: str, value: Any) -> BadRequest:
    return BadRequest(
        f"Invalid type for '{name}': expected {wanted}, but got {_kind(value)} instead.",
        param=name,
        code="invalid_type",
    )


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int):
        return "an integer"
    if isinstance(value, float):
        return "a decimal"
    if isinstance(value, str):
        return "a string"
    if value is None:
        return "null"
    return "an array" if isinstance(value, list) else "an object"
