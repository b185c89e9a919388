"""Chat templates in their sandbox, and tool calls read from answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidemill.backends.llama import tools
from tidemill.backends.llama.prompt import Template
from tidemill.errors import EngineUnavailable, RequestRefused
from tidemill.types import Generation

PLAIN = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Write <tool_call>{...}</tool_call>\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function.arguments | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def chat(*messages: dict[str, Any], **fields: Any) -> Generation:
    """A chat request."""
    return Generation(model="m", messages=messages, **fields)


def test_messages_are_rendered_by_the_template() -> None:
    """Roles, contents, and the opening of the answer."""
    text = Template(PLAIN).render(chat({"role": "user", "content": "Hi <b> & é"}))
    assert text == "<|user|>Hi <b> & é\n<|assistant|>"


def test_content_parts_become_one_text() -> None:
    """Templates of text models add strings."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "<|user|>ab\n" in Template(PLAIN).render(chat({"role": "user", "content": parts}))


def test_an_image_is_refused_by_name() -> None:
    """The error says which part of which message."""
    parts = [{"type": "image_url", "image_url": {"url": "data:"}}]
    with pytest.raises(RequestRefused, match="part 0 of message 0 is 'image_url'") as caught:
        Template(PLAIN).render(chat({"role": "user", "content": parts}))
    assert caught.value.param == "messages[0].content"


def test_no_content_is_an_empty_text() -> None:
    """An assistant message with tool calls has ``content: null``."""
    assert "<|assistant|>\n" in Template(PLAIN).render(
        chat({"role": "assistant", "content": None}, {"role": "user", "content": "x"})
    )


def test_developer_is_system_where_the_template_knows_no_developer() -> None:
    """The role is newer than most templates."""
    assert (
        Template(PLAIN)
        .render(chat({"role": "developer", "content": "x"}))
        .startswith("<|system|>x")
    )


def test_a_template_that_refuses_messages_is_passed_on() -> None:
    """``raise_exception`` is how a template's author speaks to the client."""
    template = Template("{{ raise_exception('Roles must alternate') }}")
    with pytest.raises(RequestRefused, match="Roles must alternate") as caught:
        template.render(chat({"role": "user", "content": "x"}))
    assert caught.value.param == "messages"


def test_a_template_cannot_leave_its_sandbox() -> None:
    """A GGUF from anywhere must not run code here."""
    template = Template("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(RequestRefused, match="unsafe"):
        template.render(chat({"role": "user", "content": "x"}))


def test_a_broken_template_is_told_at_the_start() -> None:
    """Not at the first request."""
    with pytest.raises(EngineUnavailable, match="chat template is broken"):
        Template("{% for %}")


def test_tools_are_refused_where_the_template_has_no_place_for_them() -> None:
    """Silence would let the model answer as if there were none."""
    assert not Template(PLAIN).tools
    with pytest.raises(RequestRefused, match="does not support tools") as caught:
        Template(PLAIN).render(chat({"role": "user", "content": "x"}, tools=(WEATHER,)))
    assert caught.value.param == "tools"


def test_tools_that_may_not_be_used_are_not_rendered() -> None:
    """``tool_choice: none`` works with every template."""
    asked = chat({"role": "user", "content": "x"}, tools=(WEATHER,), tool_choice="none")
    assert "weather" not in Template(TOOLS).render(asked)
    assert "<|user|>x" in Template(PLAIN).render(asked)


def test_tools_and_earlier_calls_are_rendered() -> None:
    """Arguments, a JSON string in the API, reach the template as the object that it expects."""
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}}
    text = Template(TOOLS).render(
        chat({"role": "assistant", "content": None, "tool_calls": [call]}, tools=(WEATHER,))
    )
    assert '"name": "weather"' in text
    assert '<tool_call>{"a": 1}</tool_call>' in text


@pytest.mark.parametrize(
    ("marker", "text"),
    [
        (
            "<tool_call>",
            '<tool_call>\n{"name": "weather", "arguments": {"at": "Köln"}}\n</tool_call>',
        ),
        ("[TOOL_CALLS]", '[TOOL_CALLS] [{"name": "weather", "arguments": {"at": "Köln"}}]'),
        ("<|python_tag|>", '<|python_tag|>{"name": "weather", "parameters": {"at": "Köln"}}'),
    ],
)
def test_calls_are_read_as_their_template_writes_them(marker: str, text: str) -> None:
    """Each family has its own way; the API has one."""
    form = tools.format_of(f"... {marker} ...")
    assert form is not None
    (call,) = tools.parse(form, text)
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"at": "Köln"}


def test_two_calls_keep_their_order() -> None:
    """Parallel calls stand one after the other."""
    form = tools.format_of("<tool_call>")
    assert form is not None
    text = '<tool_call>{"name": "a"}</tool_call>\n<tool_call>{"name": "b"}</tool_call>'
    assert [c["function"]["name"] for c in tools.parse(form, text)] == ["a", "b"]


@pytest.mark.parametrize("text", ['<tool_call>{"name": "a', "<tool_call>[]</tool_call>", ""])
def test_what_is_no_call_gives_none(text: str) -> None:
    """A cut or malformed call is not made up for."""
    form = tools.format_of("<tool_call>")
    assert form is not None
    assert tools.parse(form, text) == ()


def test_a_forced_choice_is_a_schema_of_its_tools() -> None:
    """``required`` allows every tool, a named one only that."""
    other = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
    both = tools.forced_schema((WEATHER, other), "required")
    one = tools.forced_schema((WEATHER, other), {"type": "function", "function": {"name": "time"}})
    assert both is not None
    assert one is not None
    assert len(both["anyOf"]) == 2
    assert [s["properties"]["name"] for s in one["anyOf"]] == [{"const": "time"}]
    assert tools.forced_schema((WEATHER,), "auto") is None


@pytest.mark.parametrize("choice", ["sometimes", {"type": "function", "function": {"name": "x"}}])
def test_a_choice_that_names_no_tool_is_refused(choice: Any) -> None:
    """The parameter is named."""
    with pytest.raises(RequestRefused) as caught:
        tools.forced_schema((WEATHER,), choice)
    assert caught.value.param == "tool_choice"
