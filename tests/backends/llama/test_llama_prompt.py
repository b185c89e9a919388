"""Chat templates in their sandbox, and tool calls read from answers."""

from __future__ import annotations

import json
import re
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

BARE = 'Respond in the format {"name": function name, "parameters": dictionary of argument name}'


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
    "needs",
    [
        "{% if call.function.arguments is string %}{{ raise_exception('no text') }}{% endif %}",
        "{{ 'called with ' + call.function.arguments }}",
        "{% if call.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}",
        "{{ 'x' + call.function.arguments }}{% if call.id | length != 9 %}"
        "{{ raise_exception('nine letters') }}{% endif %}",
    ],
)
def test_calls_are_spelled_as_their_template_insists(needs: str) -> None:
    """Arguments as an object or a string, ids as they are or of nine letters and digits, and then
    the same ones in the answer of the tool."""
    call = {"id": "call_123456", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    template = Template(
        "{% for m in messages %}{% for call in m.tool_calls or [] %}" + needs + "<{{ call.id }}>"
        "{% endfor %}{% if m.tool_call_id %}<{{ m.tool_call_id }}>{% endif %}{% endfor %}"
        "{{ tools }}"
    )
    text = template.render(
        chat(
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_123456", "content": "sunny"},
        )
    )
    made, answered = re.findall("<(.*?)>", text)
    assert made == answered
    assert re.fullmatch("[a-z0-9]{9}" if "nine" in needs else "call_123456", made)


def test_what_a_filter_makes_can_be_written_as_json() -> None:
    """``map`` and ``select`` give generators, which JSON has none of."""
    text = Template("{{ tools | map(attribute='type') | tojson }}").render(chat(tools=(WEATHER,)))
    assert text == '["function"]'


@pytest.mark.parametrize(
    ("marker", "text"),
    [
        (
            "<tool_call>",
            '<tool_call>\n{"name": "weather", "arguments": {"at": "Köln"}}\n</tool_call>',
        ),
        (
            "<tool_call>",
            "<tool_call>\n<function=weather>\n<parameter=at>\nKöln\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
        (
            "<tool_call>",
            "<tool_call>weather\n<arg_key>at</arg_key>\n<arg_value>Köln</arg_value>\n</tool_call>",
        ),
        (
            "<seed:tool_call>",
            "<seed:tool_call>\n<function=weather>\n<parameter=at>Köln</parameter>\n</function>\n"
            "</seed:tool_call>",
        ),
        ("<TOOLCALL>", '<TOOLCALL>[{"name": "weather", "arguments": {"at": "Köln"}}]</TOOLCALL>'),
        ("<|tool_call|>", '<|tool_call|>[{"name": "weather", "arguments": {"at": "Köln"}}]'),
        (
            "<|START_ACTION|>",
            '<|START_ACTION|>[\n  {"tool_call_id": "0", "tool_name": "weather", '
            '"parameters": {"at": "Köln"}}\n]<|END_ACTION|>',
        ),
        ("[TOOL_CALLS]", '[TOOL_CALLS] [{"name": "weather", "arguments": {"at": "Köln"}}]'),
        ("[TOOL_CALLS]", '[TOOL_CALLS]weather[ARGS]{"at": "Köln"}'),
        ("[TOOL_CALLS]", '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"at": "Köln"}'),
        ("<function=", '<function=weather>{"at": "Köln"}</function>'),
        ("<|python_tag|>", '<|python_tag|>{"name": "weather", "parameters": {"at": "Köln"}}'),
        (BARE, '<|python_tag|>{"name": "weather", "parameters": {"at": "Köln"}}'),
        (BARE, '\n{"name": "weather", "parameters": {"at": "Köln"}}'),
        (BARE, '{"type": "function", "name": "weather", "parameters": {"at": "Köln"}};'),
        (
            "<|channel|>analysis",
            '<|channel|>commentary to=functions.weather<|message|>{"at": "Köln"}',
        ),
    ],
)
def test_calls_are_read_as_their_template_writes_them(marker: str, text: str) -> None:
    """Each family has its own way, some have several; the API has one."""
    form = tools.format_of(f"... {marker} ...")
    assert form is not None
    (call,) = tools.parse(form, text, (WEATHER,))
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"at": "Köln"}


@pytest.mark.parametrize(
    ("marker", "text"),
    [
        (
            "<tool_call>",
            '<tool_call>{"name": "a"}</tool_call>\n<tool_call>{"name": "b"}</tool_call>',
        ),
        ("[TOOL_CALLS]", "[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]b[ARGS]{}"),
        ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "a"}, {"name": "b"}]'),
        ("<function=", "<function=a>{}</function><function=b>{}</function>"),
        (BARE, '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}'),
        (
            "<|channel|>analysis",
            "<|channel|>commentary to=functions.a<|message|>{}"
            "<|channel|>commentary to=functions.b<|message|>{}",
        ),
    ],
)
def test_two_calls_keep_their_order(marker: str, text: str) -> None:
    """Parallel calls stand one after the other."""
    form = tools.format_of(marker)
    assert form is not None
    offered = tuple({"type": "function", "function": {"name": name}} for name in "ab")
    assert [c["function"]["name"] for c in tools.parse(form, text, offered)] == ["a", "b"]


def test_a_value_without_quotes_is_what_its_schema_says() -> None:
    """A string stays one, though it looks like a number; anything else is read as JSON."""
    form = tools.format_of("<tool_call>")
    assert form is not None
    schema = {"properties": {"zip": {"type": "string"}, "days": {"type": "integer"}, "at": {}}}
    offered = ({"type": "function", "function": {"name": "f", "parameters": schema}},)
    values = {"zip": "01067", "days": "3", "at": "[1]", "free": "so <b>so</b>"}
    text = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    (call,) = tools.parse(form, f"<tool_call>\n<function=f>\n{text}</function>", offered)
    assert json.loads(call["function"]["arguments"]) == {
        "zip": "01067", "days": 3, "at": [1], "free": "so <b>so</b>"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("marker", "text"),
    [
        ("<tool_call>", '<tool_call>{"name": "a'),
        ("<tool_call>", "<tool_call>[]</tool_call>"),
        ("<tool_call>", "<tool_call>" + "[" * 100_000),
        ("<tool_call>", "<tool_call><function=weather><parameter=at>Kö"),
        ("<tool_call>", "<tool_call>I would call it</tool_call>"),
        ("<tool_call>", ""),
        ("[TOOL_CALLS]", "[TOOL_CALLS]weather[ARGS]"),
        ("[TOOL_CALLS]", "[TOOL_CALLS]weather[ARGS][1]"),
        (BARE, '{"name": "Ada", "parameters": {}}'),
        (BARE, '{"name": "weather", "parameters": {}} is what I would say'),
        (BARE, '{"city": "Köln"}'),
        ("<|channel|>analysis", "<|channel|>commentary to=functions.weather<|message|>Köln"),
    ],
)
def test_what_is_no_call_gives_none(marker: str, text: str) -> None:
    """A cut or malformed call is not made up for, and an object that happens to have a name is no
    call of a tool that was not offered."""
    form = tools.format_of(marker)
    assert form is not None
    assert tools.parse(form, text, (WEATHER,)) == ()


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
