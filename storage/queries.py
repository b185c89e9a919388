"""Named SQL: every statement of the store stands in ``sql/*.sql`` under ``-- name: …``."""

from __future__ import annotations

import re
from importlib import resources
from importlib.resources.abc import Traversable

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


def folder() -> Traversable:
    """Where the SQL is, inside the package."""
    return resources.files("tidemill.storage") / "sql"


def load(topic: str) -> dict[str, str]:
    """The statements of ``sql/{topic}.sql`` by name, without their comments.

    Raises ``ValueError`` when a name occurs twice.
    """
    text = (folder() / f"{topic}.sql").read_text(encoding="utf-8")
    parts = _NAME.split(text)[1:]
    statements: dict[str, str] = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        if name in statements:
            raise ValueError(f"two statements of {topic}.sql are named {name}")
        code = (line for line in body.splitlines() if not line.startswith("--"))
        statements[name] = "\n".join(code).strip().removesuffix(";")
    return statements


TOPICS = (
    "files",
    "batches",
    "lines",
    "keys",
    "ledger",
    "facts",
    "upstream",
    "accounts",
    "audit",
    "money",
)
"""All files of statements."""
