"""What the engine process does with a request before it may run: render, tokenise, check."""

from __future__ import annotations

from collections.abc import Callable

from tidemill.backends.llama import grammar, tools
from tidemill.backends.llama.answer import Answer
from tidemill.backends.llama.grammar import Grammar
from tidemill.backends.llama.markup import Channels, Markup
from tidemill.backends.llama.model import Model
from tidemill.backends.llama.prompt import Template
from tidemill.backends.llama.sampling import Chooser
from tidemill.errors import ContextLengthExceeded, RequestRefused, TidemillError
from tidemill.scheduler.steps import Ticket
from tidemill.types import Generation, Piece, Sampling, Usage

EXPECTED = 128
"""Tokens of an answer for which a sequence has room where it starts. Many clients ask for thousands
at most and get a hundred; one that does become long moves on, which costs milliseconds."""

Send = Callable[[Piece | TidemillError], None]


class Desk:
    """Turns requests into tickets. Used by the reading thread; every error it raises is a
    ``TidemillError`` that belongs to the request alone."""

    def __init__(self, model: Model, template: Template | None, *, context: int) -> None:
        self._model, self._template, self._context = model, template, context
        self._calls = tools.format_of(template.source) if template and template.tools else None

    def ticket(
        self, key: int, g: Generation, send: Send, *, alone: bool = False
    ) -> Ticket[Chooser] | None:
        """A completion that is ready to run; None when its answer is empty and was sent."""
        if g.echo and g.logprobs is not None:
            raise RequestRefused("logprobs cannot be combined with echo.", param="logprobs")
        text, prompt = self._prompt(g)
        limit = self._limit(g, len(prompt))
        if limit == 0:
            echo = self._echo(g, text, prompt)
            send(Piece(text=echo, finish="length", usage=Usage(input=len(prompt))))
            return None
        _check(g.sampling, self._model.n_vocab)
        chooser = Chooser(self._model, g.sampling, grammar=self._grammar(g), logprobs=g.logprobs)
        answer = Answer(
            send,
            chooser=chooser,
            prompt_tokens=len(prompt),
            stream=g.stream,
            stops=g.stop,
            echo=self._echo(g, text, prompt),
            markup=self._markup(g, text),
            calls=self._calls,
            tools=g.tools or (),
        )
        return Ticket(
            key=key,
            lane=g.lane,
            prompt=prompt,
            limit=limit,
            expected=min(limit, EXPECTED),
            chooser=chooser,
            answer=answer,
            scope=g.owner,
            group=g.batch,
            alone=alone or g.deterministic,
        )

    def count(self, g: Generation) -> int:
        """Prompt tokens of a request, template included."""
        return len(self._prompt(g)[1])

    def inputs(self, inputs: tuple[str | tuple[int, ...], ...], longest: int) -> list[list[int]]:
        """Tokens of every input of an embeddings request, each at most ``longest``."""
        if not inputs:
            raise RequestRefused("There is nothing to embed.", param="input")
        out = []
        for i, item in enumerate(inputs):
            if isinstance(item, str):
                tokens = self._model.tokenize(item, special=True, parse=False)
            else:
                tokens = self._known(item, param="input")
            if not tokens:
                raise RequestRefused(f"Input {i} is empty.", param="input")
            if len(tokens) > longest:
                raise _too_long(len(tokens), longest, param="input")
            out.append(tokens)
        return out

    def _prompt(self, g: Generation) -> tuple[str, list[int]]:
        """The prompt as text (empty when it came as tokens) and as tokens."""
        if g.messages is not None:
            if self._template is None:
                raise RequestRefused(
                    f"The model '{g.model}' has no chat template; use /v1/completions.",
                    param="messages",
                )
            text = self._template.render(g)
            # Many templates write the first token themselves; twice it would change the answer.
            bos = self._model.bos
            special = not (bos and text.startswith(bos))
            return text, self._model.tokenize(text, special=special, parse=True)
        if g.tokens is not None:
            tokens = self._known(g.tokens, param="prompt")
            if not tokens:
                raise RequestRefused("The prompt is empty.", param="prompt")
            return "", tokens
        text = g.text or ""
        # The text of a raw prompt may hold control tokens: that is how such prompts are written.
        tokens = self._model.tokenize(text, special=True, parse=True)
        if not tokens:
            raise RequestRefused("The prompt is empty.", param="prompt")
        return text, tokens

    def _known(self, tokens: tuple[int, ...], *, param: str) -> list[int]:
        for token in tokens:
            if not 0 <= token < self._model.n_vocab:
                raise RequestRefused(
                    f"Token {token} is not in the vocabulary of {self._model.n_vocab} tokens.",
                    param=param,
                )
        return list(tokens)

    def _limit(self, g: Generation, n: int) -> int:
        """Most tokens of the answer: prompt and answer together stay within the context."""
        context = min(self._context, g.max_context or self._context)
        if n > context:
            raise _too_long(n, context, param="messages" if g.messages is not None else "prompt")
        room = context - n
        return room if g.max_tokens is None else min(room, g.max_tokens)

    def _echo(self, g: Generation, text: str, prompt: list[int]) -> str:
        if not g.echo:
            return ""
        return text or self._model.detokenize(prompt)

    def _markup(self, g: Generation, text: str) -> Markup | Channels | None:
        if g.messages is None or self._template is None:
            return None
        calls = self._calls if g.tools and g.tool_choice != "none" else None
        if self._template.channels:
            # A grammar holds all of an answer, which then has no headers.
            return Channels(calls=calls is not None) if g.json_schema is None else None
        if not (self._template.thinks or calls):
            return None
        thinks = self._template.thinks
        inside = thinks is not None and text.rstrip().endswith(thinks[0])
        return Markup(thinks=thinks, inside=inside, calls=calls)

    def _grammar(self, g: Generation) -> Grammar | None:
        spelling = self._calls.arguments if self._calls else "arguments"
        forced = tools.forced_schema(g.tools or (), g.tool_choice, spelling) if g.tools else None
        if forced is not None:
            if self._calls is None or self._calls.begin is None:
                raise RequestRefused(
                    f"The model '{g.model}' cannot be made to call a tool; "
                    "tool_choice must be auto or none.",
                    param="tool_choice",
                )
            gbnf = grammar.from_schema(
                forced, begin=self._calls.begin, end=self._calls.end, param="tools"
            )
            return Grammar(self._model, gbnf, param="tools")
        if g.json_schema is None:
            return None
        gbnf = grammar.from_schema(g.json_schema, param="response_format")
        return Grammar(self._model, gbnf, param="response_format")


def _too_long(n: int, context: int, *, param: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(f"Prompt length {n} exceeds model context {context}", param=param)


def _check(s: Sampling, n_vocab: int) -> None:
    for token in s.logit_bias:
        if not 0 <= token < n_vocab:
            raise RequestRefused(
                f"logit_bias names token {token}, which is not in the vocabulary of "
                f"{n_vocab} tokens.",
                param="logit_bias",
            )
    if s.repeat_penalty <= 0:
        raise RequestRefused("repeat_penalty must be above 0.", param="repeat_penalty")
