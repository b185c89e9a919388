"""What is wrong with a line, in words for the person who wrote the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from tidemill.lines import Text
from tidemill.types import Problem

MAX_CUSTOM_ID = 256


def shape(value: dict[str, Any]) -> Iterator[Problem]:
    """Problems of the four keys that every line has, apart from what their values mean."""
    for name, wanted in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
        item = value.get(name)
        if item is None:
            message = f"Missing required parameter: '{name}'."
            yield Problem(code="missing_required_parameter", message=message, param=name)
        elif not isinstance(item, wanted):
            noun = "a string" if wanted is str else "an object"
            message = f"'{name}' must be {noun}, not {kind(item)}."
            yield Problem(code="invalid_request", message=message, param=name)
        elif name == "custom_id" and not 0 < len(item) <= MAX_CUSTOM_ID:
            message = f"'custom_id' must have 1 to {MAX_CUSTOM_ID} characters, not {len(item)}."
            yield Problem(code="invalid_request", message=message, param=name)
        elif name == "method" and item != "POST":
            message = f"'method' must be 'POST', not {shown(item)}."
            yield Problem(code="invalid_request", message=message, param=name)


def stream(value: Any) -> Problem | None:
    """The problem of a body's ``stream``."""
    if value is None or value is False:
        return None
    if value is True:
        return Problem(
            code="streaming_unsupported",
            message="Streaming is not supported in a batch; remove 'stream'.",
            param="body.stream",
        )
    message = f"'stream' must be a boolean, not {kind(value)}."
    return Problem(code="invalid_request", message=message, param="body.stream")


def content(name: str, value: Any) -> Problem | None:
    """The problem of ``messages``, ``prompt`` or ``input``, whichever the endpoint needs."""
    if value is None:
        message = f"Missing required parameter: '{name}'."
    elif name == "messages" and not (isinstance(value, list) and value):
        message = "'messages' must be a list with at least one message."
    else:
        return None
    return Problem(code="invalid_request", message=message, param=f"body.{name}")


def encoding(head: bytes) -> str | None:
    """The name of a UTF-16 or UTF-32 encoding by its byte order mark or by its NULs; None for
    anything else."""
    if head.startswith((b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")):
        return "UTF-32"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16"
    zeros = [byte == 0 for byte in head]
    if zeros in ([False, True, True, True], [True, True, True, False]):
        return "UTF-32"
    if zeros in ([False, True, False, True], [True, False, True, False]):
        return "UTF-16"
    return None


def unreadable(text: Text, exc: Exception) -> str:
    """Why a line is no JSON. The plain case has OpenAI's words."""
    plain = "This line is not parseable as valid JSON"
    try:
        decoded = text.data.decode()
    except UnicodeDecodeError as wrong:
        byte, at = text.data[wrong.start], wrong.start
        return (
            f"This line is not valid UTF-8: byte 0x{byte:02X} at byte {at} of the line, offset "
            f"{text.offset + at} of the file."
        )
    if isinstance(exc, RecursionError):
        return f"{plain}: it is nested too deeply."
    if "out of range" in str(exc) or not isinstance(exc, msgspec.DecodeError):
        return f"{plain}: a number is out of range."
    constants: list[str] = []
    try:
        json.loads(decoded, parse_constant=constants.append)
    except (ValueError, RecursionError):
        return f"{plain}."
    # Python's own parser is more tolerant than JSON in just these two ways.
    if constants:
        return f"{plain}: {constants[0]} is not a JSON number."
    return f"{plain}: a \\u escape is half of a surrogate pair."


def kind(value: Any) -> str:
    """A JSON type in words.

    >>> kind(True), kind([]), kind(1.5)
    ('a boolean', 'an array', 'a number')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def shown(value: Any) -> str:
    """A value of the client in quotes, cut where it is long."""
    text = value if isinstance(value, str) else str(value)
    return "'" + (text if len(text) <= 100 else text[:100] + "…") + "'"
