"""One answer on its way out: text, reasoning, tool calls, log probabilities, usage."""

from __future__ import annotations

from collections.abc import Callable

from tidemill.backends.llama.markup import Channels, Markup
from tidemill.backends.llama.sampling import Chooser
from tidemill.backends.llama.stops import StopBuffer
from tidemill.backends.llama.tools import Call, Format, Tools, parse
from tidemill.errors import TidemillError
from tidemill.scheduler.steps import Sampled
from tidemill.types import FinishReason, Piece, TokenLogprob, Usage


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
        markup: Markup | Channels | None = None,
        calls: Format | None = None,
        tools: Tools = (),
    ) -> None:
        self._send, self._chooser, self._stream = send, chooser, stream
        self._prompt_tokens, self._calls, self._markup = prompt_tokens, calls, markup
        self._tools = tools
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
            calls = parse(self._calls, self._markup.called, self._tools)
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
