"""Reasoning, content and calls are told apart, wherever tokens cut the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.backends.llama import tools
from tidemill.backends.llama.markup import THINKING, Channels, Markup, has_channels, markers

BARE = tools.format_of('{"name": function name, "parameters": dictionary}')
CALL = '{"name": "f", "parameters": {"a": "{<|python_tag|>"}}'

SAID = [
    pytest.param("Hello {x}.", ("Hello {x}.", "", ""), id="text with braces"),
    pytest.param(CALL, ("", "", CALL), id="a call alone"),
    pytest.param("\n " + CALL, ("", "", "\n " + CALL), id="after a line break"),
    pytest.param(f"So: {CALL[:13]}", (f"So: {CALL[:13]}", "", ""), id="not after text"),
    pytest.param("So<|python_tag|>{}", ("So", "", "<|python_tag|>{}"), id="a tag anywhere"),
    pytest.param(
        "<think>\n{x}\n</think>\n\n" + CALL, ("", "{x}\n", CALL), id="after reasoning, not in it"
    ),
]


def fed(markup: Markup | Channels, text: str, places: list[int]) -> tuple[str, str, str]:
    """(content, reasoning, calls) of a text that is cut at these places."""
    cuts = sorted({place % (len(text) + 1) for place in places})
    content = reasoning = ""
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        more = markup.feed(text[begin:end], final=end == len(text) and begin == ([0, *cuts])[-1])
        content, reasoning = content + more[0], reasoning + more[1]
    return content, reasoning, markup.called


@pytest.mark.parametrize(("text", "parts"), SAID)
@given(places=st.lists(st.integers(0, 200), max_size=8))
def test_a_call_with_nothing_around_it_is_all_of_an_answer(
    text: str, parts: tuple[str, str, str], places: list[int]
) -> None:
    """It begins where nothing was said before but reasoning."""
    got = fed(Markup(thinks=THINKING[0], inside=False, calls=BARE), text, places)
    shown, thought, called = got
    assert (shown.strip() if called else shown, thought, called.strip()) == (
        parts[0].strip() if parts[2] else parts[0], parts[1], parts[2].strip()
    )  # fmt: skip


@pytest.mark.parametrize("tags", THINKING)
@given(places=st.lists(st.integers(0, 200), max_size=8))
def test_reasoning_is_between_its_tags(tags: tuple[str, str], places: list[int]) -> None:
    """Whatever tags the family of the model has."""
    text = f"{tags[0]}\nHm < 3 [x].\n{tags[1]}\n\nYes < [y]"
    markup = Markup(thinks=tags, inside=False, calls=None)
    assert fed(markup, text, places) == ("Yes < [y]", "Hm < 3 [x].\n", "")


HEADED = [
    (
        "<|channel|>analysis<|message|>Hm <|.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes.",
        ("Yes.", "Hm <|.", ""),
    ),
    (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
        '<|message|>I ask.<|end|><|start|>assistant to=functions.f<|channel|>commentary '
        '<|constrain|>json<|message|>{"a": 1}<|call|>',
        ("I ask.", "Hm.", '<|channel|>commentary to=functions.f<|message|>{"a": 1}'),
    ),
    (
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}',
        ("", "", '<|channel|>commentary to=functions.f<|message|>{"a": 1}'),
    ),
    ("Yes, at once.", ("Yes, at once.", "", "")),
    ("<|channel|>final<|message|>Cut at <|sta", ("Cut at <|sta", "", "")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "parts"), HEADED)
@given(places=st.lists(st.integers(0, 300), max_size=8))
def test_an_answer_of_several_messages_is_told_by_their_headers(
    text: str, parts: tuple[str, str, str], places: list[int]
) -> None:
    """Reasoning, what is for the client, and calls; an answer without any header is text."""
    assert fed(Channels(calls=True), text, places) == parts


def test_what_is_said_to_a_tool_that_was_not_offered_is_text() -> None:
    """Nothing of what the model said is lost."""
    text = "<|channel|>commentary to=functions.f<|message|>{}"
    assert fed(Channels(calls=False), text, []) == ("{}", "", "")


def test_control_tokens_are_text_only_where_they_mean_something() -> None:
    """``<|end|>`` ends a message in one family, and is nothing in the others."""
    channels = "<|start|>assistant<|channel|>analysis<|message|>...<|end|>"
    assert has_channels(channels)
    assert {b"<|end|>", b"<|channel|>", b"<|message|>"} <= markers(channels)
    assert markers("<|user|>...<|end|>") == {b"[ARGS]", b"[CALL_ID]"}
    assert {b"<think>", b"</think>", b"<tool_call>"} <= markers("<tool_call> </think>")
    assert {b"[THINK]", b"[TOOL_CALLS]"} <= markers("[TOOL_CALLS] [THINK] [/THINK]")
