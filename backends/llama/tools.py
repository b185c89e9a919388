"""Tool calls in a model's answer: how known template families write them, and how to read them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from tidemill import ids
from tidemill.errors import RequestRefused

Call = dict[str, Any]


class Format(msgspec.Struct, frozen=True):
    """One way to write calls."""

    marker: str
    """Stands in the template, and in an answer where calls begin."""
    read: Callable[[str], list[tuple[str, Any]]]
    """(name, arguments) of each call in an answer from its first marker on; ``ValueError`` when it
    is none."""
    begin: str | None = None
    end: str = ""
    """Text around a single call ``{"name", "arguments"}``; None: a call cannot be forced."""


def _tagged(text: str) -> list[tuple[str, Any]]:
    calls = []
    for part in text.split("<tool_call>")[1:]:
        calls.append(_call(json.loads(part.split("</tool_call>")[0])))
    return calls


def _listed(text: str) -> list[tuple[str, Any]]:
    value, _ = json.JSONDecoder().raw_decode(text.removeprefix("[TOOL_CALLS]").lstrip())
    return [_call(item) for item in value]


def _bare(text: str) -> list[tuple[str, Any]]:
    parts = text.removeprefix("<|python_tag|>").split(";")
    try:
        return [_call(json.loads(text.removeprefix("<|python_tag|>")))]
    except ValueError:
        return [_call(json.loads(part)) for part in parts]


def _call(value: Any) -> tuple[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("a call needs a name")
    return value["name"], value.get("arguments", value.get("parameters", {}))


FORMATS = (
    Format("<tool_call>", _tagged, "<tool_call>\n", "\n</tool_call>"),
    Format("[TOOL_CALLS]", _listed),
    Format("<|python_tag|>", _bare),
)


def format_of(template: str) -> Format | None:
    """How a model with this template writes its calls; None: unknown, they stay text."""
    return next((form for form in FORMATS if form.marker in template), None)


def parse(form: Format, text: str) -> tuple[Call, ...]:
    """Calls in the API's shape; empty when ``text`` holds none that can be read."""
    try:
        calls = form.read(text.strip())
    except (ValueError, TypeError):
        return ()
    return tuple(
        {
            "id": ids.call_id(),
            "type": "function",
            "function": {
                "name": name,
                "arguments": arguments
                if isinstance(arguments, str)
                else json.dumps(arguments, ensure_ascii=False),
            },
        }
        for name, arguments in calls
    )


def forced_schema(tools: tuple[dict[str, Any], ...], choice: Any) -> dict[str, Any] | None:
    """The schema that a call must match under ``tool_choice``; None when the model may choose.

    Raises ``RequestRefused`` for a choice that names no tool.
    """
    if choice in (None, "auto", "none"):
        return None
    functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), dict)]
    if isinstance(choice, dict):
        wanted = (choice.get("function") or {}).get("name") or choice.get("name")
        functions = [f for f in functions if f.get("name") == wanted]
        if not functions:
            raise RequestRefused(
                f"tool_choice names {wanted!r}, which is not among the tools.", param="tool_choice"
            )
    elif choice != "required":
        raise RequestRefused(
            f"tool_choice is none, auto, required or a function, not {choice!r}.",
            param="tool_choice",
        )
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "name": {"const": f.get("name")},
                    "arguments": f.get("parameters") or {"type": "object"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for f in functions
        ]
    }
