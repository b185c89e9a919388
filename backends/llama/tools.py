"""Tool calls in a model's answer: how known template families write them, and how to read them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tidemill import ids
from tidemill.errors import RequestRefused

Call = dict[str, Any]
Tools = tuple[dict[str, Any], ...]


class Format(msgspec.Struct, frozen=True):
    """One way to write calls."""

    marker: str
    """Stands in the template of every model that writes so."""
    opens: str
    """Stands in an answer where a call begins, or a list of them."""
    closes: str = ""
    """Stands where it ends; empty: where the next one opens, or the answer ends."""
    bare: bool = False
    """A call may also be all of an answer, with nothing around it."""
    begin: str | None = None
    end: str = ""
    """Text around a single call ``{"name", arguments}``; None: a call cannot be forced."""
    arguments: str = "arguments"
    """What the model was taught to call them."""


FORMATS = (
    Format("<seed:tool_call>", "<seed:tool_call>", "</seed:tool_call>"),
    Format(
        "<tool_call>", "<tool_call>", "</tool_call>", begin="<tool_call>\n", end="\n</tool_call>"
    ),
    Format("<TOOLCALL>", "<TOOLCALL>", "</TOOLCALL>"),
    Format("<|tool_call|>", "<|tool_call|>", "<|/tool_call|>"),
    Format("<|START_ACTION|>", "<|START_ACTION|>", "<|END_ACTION|>"),
    Format("[TOOL_CALLS]", "[TOOL_CALLS]"),
    Format("<|channel|>analysis", "<|channel|>"),
    Format("<function=", "<function="),
    Format(
        '{"name": function name, "parameters":',
        "<|python_tag|>",
        bare=True,
        begin="",
        arguments="parameters",
    ),
    Format("<|python_tag|>", "<|python_tag|>"),
)
"""The first whose marker stands in a template is that template's."""


def format_of(template: str) -> Format | None:
    """How a model with this template writes its calls; None: unknown, they stay text."""
    return next((form for form in FORMATS if form.marker in template), None)


def parse(form: Format, text: str, offered: Tools = ()) -> tuple[Call, ...]:
    """Calls in the API's shape; empty when ``text`` holds none that can be read. ``offered`` are
    the tools of the request: their schemas say what is a string where the model does not, and a
    bare object is a call only where it names one of them."""
    functions = {f["name"]: f for f in _functions(offered) if isinstance(f.get("name"), str)}
    text = text.strip()
    try:
        if form.bare and text.startswith("{"):
            calls = list(_values(text, whole=True))
            if any(name not in functions for name, _ in calls):
                return ()
        else:
            calls = [call for part in _parts(form, text) for call in _read(part, functions)]
    except (ValueError, TypeError, RecursionError):
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


def _parts(form: Format, text: str) -> Iterator[str]:
    if form.opens == "<function=":  # its name stands in the tag
        yield text
        return
    for part in text.split(form.opens)[1:]:
        yield (part.split(form.closes)[0] if form.closes else part).strip()


def _read(part: str, functions: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and arguments of each call, in any of the ways that models write them between tags.
    Raises ``ValueError`` where there is none."""
    if part.startswith(("{", "[")):
        yield from _values(part)
    elif "<function=" in part:
        yield from _tagged(part, functions)
    elif (found := _ADDRESSED.match(part)) is not None:
        yield found[1], _object(part[found.end() :])
    elif "[ARGS]" in part:
        name, _, arguments = part.partition("[ARGS]")
        yield name.split("[CALL_ID]")[0].strip(), _object(arguments)
    else:
        yield _pairs(part, functions)


def _values(text: str, *, whole: bool = False) -> Iterator[tuple[str, Any]]:
    """JSON objects that are calls, one after another or in lists. ``whole``: there must be nothing
    else."""
    for value in _objects(text, whole=whole):
        for one in value if isinstance(value, list) else [value]:
            yield _call(one)


def _objects(text: str, *, whole: bool = False) -> Iterator[Any]:
    decoder, at = json.JSONDecoder(), 0
    first = True
    while (at := _beyond(text, at)) < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except ValueError:
            if first or whole:
                raise
            return
        first = False
        yield value


def _object(text: str) -> dict[str, Any]:
    for value in _objects(text):
        if isinstance(value, dict):
            return value
        break
    raise ValueError("arguments are an object")


def _beyond(text: str, at: int) -> int:
    """Where the next value begins."""
    while at < len(text) and text[at] in " \t\r\n;,":
        at += 1
    return at


_ADDRESSED = re.compile(r"commentary to=functions\.([\w.-]+)<\|message\|>")
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _tagged(text: str, functions: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    found = _FUNCTION.findall(text)
    if not found:
        raise ValueError("the call does not end")
    for name, body in found:
        if body.lstrip().startswith("{"):
            yield name, _object(body)
        else:
            yield name, _typed(name, _PARAMETER.findall(body), functions)


def _pairs(text: str, functions: Mapping[str, Any]) -> tuple[str, Any]:
    name = text.split("<arg_key>")[0].strip()
    if not re.fullmatch(r"[\w.:-]+", name):
        raise ValueError("a call needs a name")
    return name, _typed(name, _PAIR.findall(text), functions)


def _typed(name: str, given: list[tuple[str, str]], functions: Mapping[str, Any]) -> Any:
    """Arguments of which only the text is there."""
    schema = functions.get(name, {}).get("parameters")
    known = schema.get("properties") if isinstance(schema, dict) else None
    arguments = {}
    for key, text in given:
        # The line breaks around a value belong to its tags.
        value: Any = text.removeprefix("\n").removesuffix("\n")
        one = known.get(key) if isinstance(known, dict) else None
        if not (isinstance(one, dict) and one.get("type") == "string"):
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        arguments[key] = value
    return arguments


def _call(value: Any) -> tuple[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a call is an object")
    name = value.get("name", value.get("tool_name"))
    if not isinstance(name, str):
        raise ValueError("a call needs a name")
    return name, value.get("arguments", value.get("parameters", {}))


def _functions(tools: Tools) -> list[dict[str, Any]]:
    return [tool["function"] for tool in tools if isinstance(tool.get("function"), dict)]


def forced_schema(tools: Tools, choice: Any, arguments: str = "arguments") -> dict[str, Any] | None:
    """The schema that a call must match under ``tool_choice``; None when the model may choose.
    ``arguments``: what the model calls them.

    Raises ``RequestRefused`` for a choice that names no tool.
    """
    if choice in (None, "auto", "none"):
        return None
    functions = _functions(tools)
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
                    arguments: f.get("parameters") or {"type": "object"},
                },
                "required": ["name", arguments],
                "additionalProperties": False,
            }
            for f in functions
        ]
    }
