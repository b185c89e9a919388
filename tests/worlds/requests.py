"""Input lines and whole input files for the echo engine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


def chat(custom_id: str, text: str, *, model: str = "echo", **body: Any) -> dict[str, Any]:
    """A chat line; the echo engine answers with ``text`` or does what a ``!`` text says."""
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": model, "messages": [{"role": "user", "content": text}], **body},
    }


def jsonl(lines: Iterable[dict[str, Any]]) -> bytes:
    """Lines as a file."""
    return b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines)


def rows(content: bytes) -> dict[str, dict[str, Any]]:
    """Result rows by custom id. Raises ``AssertionError`` for an id that is there twice."""
    found = [json.loads(row) for row in content.split(b"\n") if row]
    by_id = {row["custom_id"]: row for row in found}
    assert len(by_id) == len(found), "a custom_id has two rows"
    return by_id


def said(row: dict[str, Any]) -> str:
    """The text that a chat row answers with."""
    return str(row["response"]["body"]["choices"][0]["message"]["content"])
