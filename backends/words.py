"""A provider's words as our clients read them: without our credential."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NO_KEY = "-"
"""Sent where a provider needs no key, since the SDK wants one; no secret."""
HIDDEN = "[credential]"


def sent(headers: Any) -> list[str]:
    """The credentials that a request with these headers carried; some providers repeat them in
    their refusals."""
    values = (headers.get("authorization", "").partition(" ")[2], headers.get("api-key", ""))
    return [value for value in values if value not in ("", NO_KEY)]


def without_credential(value: Any, credentials: Sequence[str]) -> Any:
    """A provider's words without our credential, which is nobody's to read in an answer or log."""
    if isinstance(value, str):
        for credential in credentials:
            value = value.replace(credential, HIDDEN)
        return value
    if isinstance(value, dict):
        return {name: without_credential(item, credentials) for name, item in value.items()}
    if isinstance(value, list):
        return [without_credential(item, credentials) for item in value]
    return value
