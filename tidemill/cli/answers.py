"""Result rows as a person reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tidemill.cli.screen import table
from tidemill.lines import Splitter

Row = dict[str, Any]


def rows(paths: Iterable[Path]) -> Iterator[Row]:
    """The rows of result files, in order."""
    for path in paths:
        splitter = Splitter()
        with path.open("rb") as file:
            while piece := file.read(64 * 1024):
                for text in splitter.feed(piece):
                    yield json.loads(text.data)
        for text in splitter.finish():
            yield json.loads(text.data)


def order(path: Path) -> list[str]:
    """The custom ids of an input file, in its order."""
    return [row["custom_id"] for row in rows([path])]


def show(paths: Sequence[Path], wanted: Sequence[str]) -> None:
    """A table custom_id, answer, tokens; in the order ``wanted``, then as the rows come."""
    place = {custom_id: n for n, custom_id in enumerate(wanted)}
    found = sorted(rows(paths), key=lambda row: place.get(row["custom_id"], len(place)))
    table(
        ("custom_id", "answer", "tokens"),
        [(row["custom_id"], answer(row), tokens(row)) for row in found],
        right="tokens",
    )


def answer(row: Row) -> str:
    """What was answered, as text; for a failed line why not.

    >>> answer({"response": None, "error": {"code": "batch_expired", "message": "too late"}})
    '(batch_expired) too late'
    """
    response = row.get("response")
    if response is None:
        error = row.get("error") or {}
        return f"({error.get('code')}) {error.get('message')}"
    body = response["body"]
    if response["status_code"] >= 400:
        error = body.get("error") or {}
        return f"({error.get('code') or response['status_code']}) {error.get('message')}"
    if body.get("object") == "list":
        vectors = [item["embedding"] for item in body["data"]]
        return f"{len(vectors)} embedding(s) of {len(vectors[0]) if vectors else 0} numbers"
    if "output" in body:
        parts = [part for item in body["output"] for part in item.get("content") or ()]
        return "".join(part.get("text", "") for part in parts).strip()
    return "\n".join(_choice(choice) for choice in body.get("choices", ()))


def _choice(choice: Row) -> str:
    message = choice.get("message")
    if message is None:
        return str(choice.get("text", "")).strip()
    calls = [
        f"{call['function']['name']}({call['function']['arguments']})"
        for call in message.get("tool_calls") or ()
    ]
    return "\n".join([(message.get("content") or "").strip(), *calls]).strip()


def tokens(row: Row) -> int:
    """Tokens that were generated for a row."""
    body = (row.get("response") or {}).get("body") or {}
    usage = body.get("usage") or {}
    return int(usage.get("completion_tokens", usage.get("output_tokens", 0)))
