"""From a request to prompt text: the model's own chat template, rendered in a sandbox."""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tidemill.backends.llama.markup import has_channels, thinking
from tidemill.errors import EngineUnavailable, RequestRefused
from tidemill.types import Generation

_UNRENDERED = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""Template authors refuse with raise_exception; a field of a wrong type surfaces as any of the
others, and so do a range or a recursion without end."""


_LETTERS = string.digits + string.ascii_lowercase


class Template:
    """A chat template and what can be told from its source."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        """Compile; raises ``EngineUnavailable`` for a template that is not Jinja."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            names = meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except TemplateError as exc:
            raise EngineUnavailable(f"The model's chat template is broken: {exc}.") from exc
        self.source = source
        self.tools = "tools" in names
        """True when it renders tools."""
        self.thinks = thinking(source)
        """Between what answers may reason; None: they do not."""
        self.channels = has_channels(source)
        """True when answers are several messages."""
        self._developer = "developer" in source
        self._bos, self._eos = bos, eos

    def render(self, generation: Generation) -> str:
        """The prompt of a chat request. Raises ``RequestRefused`` for messages and tools that the
        template cannot take."""
        tools = generation.tools if generation.tool_choice != "none" else None
        if tools and not self.tools:
            raise RequestRefused(
                f"The model '{generation.model}' does not support tools: its chat template has no "
                "place for them.",
                param="tools",
                code="unsupported_parameter",
            )
        messages = [self._message(i, m) for i, m in enumerate(generation.messages or ())]
        first: Exception | None = None
        for spelled in _spellings(messages):
            try:
                return self._template.render(
                    messages=spelled,
                    tools=list(tools) if tools else None,
                    add_generation_prompt=True,
                    bos_token=self._bos,
                    eos_token=self._eos,
                )
            except _UNRENDERED as exc:
                first = first or exc
        raise RequestRefused(
            f"The model's chat template cannot render these messages: {first}.", param="messages"
        ) from first

    def _message(self, i: int, message: dict[str, Any]) -> dict[str, Any]:
        out = dict(message)
        if out.get("role") == "developer" and not self._developer:
            out["role"] = "system"
        out["content"] = _text(i, out.get("content"))
        return out


def _text(i: int, content: Any) -> str:
    """Content parts as one text: templates of text models know strings only."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for n, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise RequestRefused(
                f"This model takes text only, and part {n} of message {i} is {kind!r}.",
                param=f"messages[{i}].content",
                code="unsupported_parameter",
            )
        texts.append(part.get("text") or part.get("refusal") or "")
    return "".join(texts)


def _spellings(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The messages with their tool calls in every way that some template insists on, the most usual
    first: arguments as an object or as the text that it is in the API, ids as they are or short."""
    called = any(m.get("tool_calls") or m.get("tool_call_id") for m in messages)
    for name in (str, _short_id) if called else (str,):
        for argue in (_with_object_arguments, dict) if called else (dict,):
            yield [_respelled(m, argue, name) for m in messages]


def _respelled(
    message: dict[str, Any],
    argue: Callable[[dict[str, Any]], dict[str, Any]],
    name: Callable[[str], str],
) -> dict[str, Any]:
    out = dict(message)
    if isinstance(answered := out.get("tool_call_id"), str):
        out["tool_call_id"] = name(answered)
    if calls := out.get("tool_calls"):
        out["tool_calls"] = [
            argue({**call, "id": name(call["id"])} if isinstance(call.get("id"), str) else call)
            for call in calls
        ]
    return out


def _short_id(own: str) -> str:
    """Nine letters and digits: what Mistral's templates take for an id, and nothing else."""
    number = int.from_bytes(hashlib.sha256(own.encode()).digest())
    return "".join(_LETTERS[number // 36**place % 36] for place in range(9))


def _with_object_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Most templates write ``arguments | tojson``; the API carries a JSON string, which would be
    quoted twice."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    # Not Jinja's own filter, which escapes for HTML. Filters like ``map`` give generators.
    return json.dumps(value, ensure_ascii=False, indent=indent, default=list)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
