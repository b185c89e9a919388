"""Reasoning, content and tool calls in the text of an answer, told apart as it comes."""

from __future__ import annotations

import re

from tidemill.backends.llama.stops import find, held
from tidemill.backends.llama.tools import Format, format_of

Tags = tuple[str, str]

THINKING: tuple[Tags, ...] = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Between what models reason."""

_CHANNEL, _CONSTRAIN, _MESSAGE = "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|start|>", "<|end|>", "<|return|>", "<|call|>")
"""Between two messages of an answer."""


def thinking(template: str) -> Tags | None:
    """Between what a model with this template reasons; None: it does not."""
    return next((tags for tags in THINKING if tags[1] in template), None)


def has_channels(template: str) -> bool:
    """True where an answer is several messages, each with a header: see ``Channels``."""
    return _CHANNEL + "analysis" in template


def markers(template: str) -> frozenset[bytes]:
    """Control tokens are no text, except these: they say what a part of an answer is."""
    spoken = [*(thinking(template) or ()), "[CALL_ID]", "[ARGS]"]
    if (form := format_of(template)) is not None:
        spoken += [form.opens, form.closes]
    if has_channels(template):
        spoken += [_CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS]
    return frozenset(tag.encode() for tag in spoken if tag)


class Markup:
    """Splits text into reasoning, content and the raw text of tool calls, as it comes."""

    def __init__(self, *, thinks: Tags | None, inside: bool, calls: Format | None) -> None:
        """``inside``: the prompt ended within the reasoning. ``calls``: how tool calls begin."""
        self._thinks, self._calls = thinks, calls
        self.reasoning = inside
        """True while the model reasons."""
        self.called = ""
        """Everything from the first tool call on."""
        self._rest = ""
        self._trim = inside
        self._said = False
        """Something was said that is no reasoning."""

    def feed(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """Add text; returns (content, reasoning) that are certain now."""
        if self.called:
            self.called += text
            return "", ""
        shown: dict[bool, list[str]] = {False: [], True: []}
        buffer = self._rest + text
        while (match := find(buffer, self._needles())) is not None:
            at, needle = match
            if self._bare(buffer[:at]):
                break
            if self._calls is not None and needle == self._calls.opens:
                self._show(shown, buffer[:at])
                self.called, self._rest = buffer[at:], ""
                return "".join(shown[False]), "".join(shown[True])
            self._show(shown, buffer[:at])
            self.reasoning, self._trim = not self.reasoning, True
            buffer = buffer[at + len(needle) :]
        if self._bare(buffer):
            self.called, self._rest = buffer, ""
            return "".join(shown[False]), "".join(shown[True])
        cut = len(buffer) - (0 if final else held(buffer, self._needles()))
        self._show(shown, buffer[:cut])
        self._rest = buffer[cut:]
        return "".join(shown[False]), "".join(shown[True])

    def _bare(self, text: str) -> bool:
        """True for an answer that begins as a call with nothing around it does."""
        bare = self._calls is not None and self._calls.bare
        return bare and not (self.reasoning or self._said) and text.lstrip().startswith("{")

    def _show(self, shown: dict[bool, list[str]], text: str) -> None:
        # The line breaks around the tags belong to the tags.
        if self._trim:
            text = text.lstrip("\n")
            self._trim = not text
        if not self.reasoning and text.strip():
            self._said = True
        shown[self.reasoning].append(text)

    def _needles(self) -> list[str]:
        if self.reasoning:
            return [self._thinks[1]] if self._thinks else []
        opens = [self._thinks[0]] if self._thinks else []
        return opens + ([self._calls.opens] if self._calls else [])


class Channels:
    """Does the same where an answer is several messages, each with a header that says whom it is
    for: reasoning (``analysis``), the client, or a tool."""

    def __init__(self, *, calls: bool) -> None:
        """``calls``: it may call tools; else what it says to them is shown."""
        self._calls = calls
        self.reasoning = False
        """True while the model reasons."""
        self.called = ""
        """The calls so far, each with its header."""
        self._rest = self._header = ""
        self._calling = self._begun = False
        self._in_header = True  # the prompt has begun it

    def feed(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """Add text; returns (content, reasoning) that are certain now."""
        needles = [_CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS]
        shown: dict[bool, list[str]] = {False: [], True: []}
        buffer = self._rest + text
        while (match := find(buffer, needles)) is not None:
            at, needle = match
            self._put(shown, buffer[:at])
            buffer = buffer[at + len(needle) :]
            if needle == _MESSAGE:
                self._open()
            elif needle in _ENDS:
                self._header, self._in_header, self.reasoning = "", True, False
            else:
                self._put(shown, needle)
        cut = len(buffer) - (0 if final else held(buffer, needles))
        self._put(shown, buffer[:cut])
        self._rest = buffer[cut:]
        if final and not self._begun:  # the model did without a header
            shown[False].append(self._header)
        return "".join(shown[False]), "".join(shown[True])

    def _open(self) -> None:
        """A message begins."""
        to = re.search(r"to=functions\.([\w.-]+)", self._header)
        channel = re.search(re.escape(_CHANNEL) + r"\s*(\w+)", self._header)
        self._begun, self._in_header = True, False
        self._calling = to is not None and self._calls
        self.reasoning = to is None and channel is not None and channel[1] == "analysis"
        if to is not None and self._calls:
            self.called += f"{_CHANNEL}commentary to=functions.{to[1]}{_MESSAGE}"

    def _put(self, shown: dict[bool, list[str]], text: str) -> None:
        if self._in_header:
            self._header += text
        elif self._calling:
            self.called += text
        else:
            shown[self.reasoning].append(text)
