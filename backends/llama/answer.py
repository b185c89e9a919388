"""One answer on its way out: text, reasoning, tool calls, log probabilities, usage."""

from __future__ import annotations

from collections.abc import Callable

from tidemill.backends.llama.sampling import Chooser
from tidemill.backends.llama.stops import StopBuffer, find, held
from tidemill.backends.llama.tools import Call, Format, parse
from tidemill.errors import TidemillError
from tidemill.scheduler.steps import Sampled
from tidemill.types import FinishReason, Piece, TokenLogprob, Usage


class Markup:
    """Splits text into reasoning, content and the raw text of tool calls, as it comes."""

    def __init__(self, *, thinks: bool, inside: bool, calls: Format | None) -> None:
        """``inside``: the prompt ended within the reasoning. ``calls``: how tool calls begin."""
        self._thinks, self._marker = thinks, calls.marker if calls else None
        self.reasoning = inside
        """True while the model reasons."""
        self.called = ""
        """Everything from the first tool call on."""
        self._rest = ""
        self._trim = inside

    def feed(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """Add text; returns (content, reasoning) that are certain now."""
        if self.called:
            self.called += text
            return "", ""
        shown: dict[bool, list[str]] = {False: [], True: []}
        buffer = self._rest + text
        while (match := find(buffer, self._needles())) is not None:
            at, needle = match
            self._show(shown, buffer[:at])
            if needle == self._marker:
                self.called, self._rest = buffer[at:], ""
                return "".join(shown[False]), "".join(shown[True])
            self.reasoning, self._trim = needle == "<think>", True
            buffer = buffer[at + len(needle) :]
        cut = len(buffer) - (0 if final else held(buffer, self._needles()))
        self._show(shown, buffer[:cut])
        self._rest = buffer[cut:]
        return "".join(shown[False]), "".join(shown[True])

    def _show(self, shown: dict[bool, list[str]], text: str) -> None:
        # The line breaks around the tags belong to the tags.
        if self._trim:
            text = text.lstrip("\n")
            self._trim = not text
        shown[self.reasoning].append(text)

    def _needles(self) -> list[str]:
        if self.reasoning:
            return ["</think>"]
        return (["<think>"] if self._thinks else []) + ([self._marker] if self._marker else [])


class Answer:
    """Receives the tokens of one completion and sends it away as pieces.

    ``send`` gets every piece when the request streams, else one piece at the end. With a stop
    string or within a character, a piece may lag behind the tokens.
    """

    def __init__(
        self,
        send: Callable[[Piece | TidemillError], None],
        *,
        chooser: Chooser | None,
        prompt_tokens: int,
        stream: bool,
        stops: tuple[str, ...] = (),
        echo: str = "",
        markup: Markup | None = None,
        calls: Format | None = None,
    ) -> None:
        self._send, self._chooser, self._stream = send, chooser, stream
        self._prompt_tokens, self._calls, self._markup = prompt_tokens, calls, markup
        self._buffer = StopBuffer(stops)
        self._content, self._reasoning = [echo], [""]
        self._logprobs: list[tuple[int, TokenLogprob]] = []
        self._ready: list[TokenLogprob] = []
        self._bytes = self._tokens = self._reasoned = self._cached = 0

    def reused(self, tokens: int) -> None:
        """So many tokens of the prompt did not have to be computed."""
        self._cached = tokens

    def take(self, sampled: Sampled) -> FinishReason | None:
        """One more token; ``stop`` when a stop string is complete."""
        self._tokens += 1
        if self._markup is not None and self._markup.reasoning:
            self._reasoned += 1
        if sampled.logprob is not None:
            self._logprobs.append((self._bytes, sampled.logprob))
        self._bytes += len(sampled.piece)
        self._put(self._buffer.feed(sampled.piece))
        if self._buffer.stopped:
            return "stop"
        self._release()
        if self._stream:
            self._emit()
        return None

    def finish(self, reason: FinishReason) -> None:
        """No more tokens: send what is left, with the reason and the usage."""
        self._put(self._buffer.end(), final=True)
        self._release()
        calls: tuple[Call, ...] = ()
        if self._markup is not None and self._calls is not None and self._markup.called:
            calls = parse(self._calls, self._markup.called)
            if not calls:  # not a call after all, or one cut by the limit: it stays text
                self._content.append(self._markup.called)
        self._emit(
            finish="tool_calls" if calls else reason,
            usage=Usage(
                input=self._prompt_tokens,
                cached=self._cached,
                output=self._tokens,
                reasoning=self._reasoned,
            ),
            tool_calls=calls,
        )

    def fail(self, error: TidemillError) -> None:
        """It ends in an error."""
        self._send(error)

    def close(self) -> None:
        """Free what llama.cpp holds for this answer."""
        if self._chooser is not None:
            self._chooser.close()

    def _put(self, text: str, *, final: bool = False) -> None:
        if self._markup is None:
            self._content.append(text)
            return
        content, reasoning = self._markup.feed(text, final=final)
        self._content.append(content)
        self._reasoning.append(reasoning)

    def _release(self) -> None:
        """A token's log probability goes out with the first byte of its text, and not at all when a
        stop string swallowed it."""
        n = 0
        for start, logprob in self._logprobs:
            if start + bool(logprob.bytes) > self._buffer.emitted:
                break
            self._ready.append(logprob)
            n += 1
        del self._logprobs[:n]

    def _emit(
        self,
        finish: FinishReason | None = None,
        usage: Usage | None = None,
        tool_calls: tuple[Call, ...] = (),
    ) -> None:
        text, reasoning = "".join(self._content), "".join(self._reasoning)
        if finish is None and not (text or reasoning or self._ready):
            return
        piece = Piece(
            text=text,
            reasoning=reasoning,
            logprobs=tuple(self._ready),
            finish=finish,
            usage=usage,
            tool_calls=tool_calls,
        )
        self._content, self._reasoning, self._ready = [], [], []
        self._send(piece)
