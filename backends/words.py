"""A provider's words as our clients read them: our names of models, our ids, and no credential."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

NO_KEY = "-"
"""Sent where a provider needs no key, since the SDK wants one; no secret."""
HIDDEN = "[credential]"
_AS_THEY_ARE = frozenset({"code", "type", "param"})
"""Fields of an error that programs read: they hold no names."""


def in_our_words(value: T, names: Mapping[str, str]) -> T:
    """Text, or whatever JSON holds, with the provider's names replaced; ``names``: ours → theirs.

    A name is replaced where it stands alone: ``gpt-4`` is no part of ``gpt-4.1``. One that is also
    ours is left.
    """
    theirs = {their: ours for ours, their in reversed(list(names.items()))}
    theirs |= {their: their for their in theirs if names.get(their) == their}
    if not any(ours != their for their, ours in theirs.items()):
        return value
    longest = "|".join(re.escape(their) for their in sorted(theirs, key=len, reverse=True))
    alone = re.compile(rf"(?<![A-Za-z0-9_-])(?:{longest})(?![A-Za-z0-9_-]|[.:][A-Za-z0-9])")

    def told(value: Any) -> Any:
        if isinstance(value, str):
            return alone.sub(lambda found: theirs[found[0]], value)
        if isinstance(value, list):
            return [told(item) for item in value]
        if isinstance(value, dict):
            return {k: v if k in _AS_THEY_ARE else told(v) for k, v in value.items()}
        return value

    changed: T = told(value)
    return changed


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
