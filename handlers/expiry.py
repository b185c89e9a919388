"""``expires_after`` of a file and ``output_expires_after`` of a batch: one shape, one check."""

from __future__ import annotations

from typing import Any

from tidemill.errors import BadRequest
from tidemill.wire import EXPIRY_RANGE_S


def expires_after_s(name: str, value: Any) -> int:
    """Seconds of an ``expires_after`` object. Raises ``BadRequest`` that names the field."""
    if not isinstance(value, dict):
        raise BadRequest(
            f"Invalid type for '{name}': expected an object with 'anchor' and 'seconds'.",
            param=name,
            code="invalid_type",
        )
    anchor, seconds = value.get("anchor"), value.get("seconds")
    for field, content in (("anchor", anchor), ("seconds", seconds)):
        if content is None:
            raise BadRequest(
                f"Missing required parameter: '{name}.{field}'.",
                param=f"{name}.{field}",
                code="missing_required_parameter",
            )
    if anchor != "created_at":
        raise BadRequest(
            f"Invalid value for '{name}.anchor'. Supported values are: 'created_at'.",
            param=f"{name}.anchor",
        )
    if not isinstance(seconds, int) or isinstance(seconds, bool):
        raise BadRequest(
            f"Invalid type for '{name}.seconds': expected an integer.",
            param=f"{name}.seconds",
            code="invalid_type",
        )
    low, high = EXPIRY_RANGE_S
    if not low <= seconds <= high:
        raise BadRequest(
            f"Invalid value for '{name}.seconds': expected {low} to {high}.",
            param=f"{name}.seconds",
        )
    return seconds
