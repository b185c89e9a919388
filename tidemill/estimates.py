"""What a request may use, told from its body before it runs.

Input is estimated from bytes, output from the limit that the request (or its batch) sets. Only the
model's own tokenizer knows better, so whatever shows such a number calls it an estimate.
"""

from __future__ import annotations

import msgspec

from tidemill.budgets import BYTES_PER_TOKEN
from tidemill.lines import Splitter, Text
from tidemill.types import BatchParams, FileFacts, Record, Usage
from tidemill.wire import canonical_endpoint

DEFAULT_OUTPUT = 512
"""Output tokens of a request that nobody limits: neither itself, nor its batch, nor its server."""

_MOST_OUTPUT = 2**40
"""Nobody means more, and its cost still fits 64 bits at any price."""

EMBEDDINGS = "/v1/embeddings"
COMPLETIONS = "/v1/completions"


class Wanted(msgspec.Struct):
    """What of a body decides its cost; values of other types are the engine's to refuse."""

    model: object = None
    max_tokens: object = None
    max_completion_tokens: object = None
    max_output_tokens: object = None
    n: object = None
    best_of: object = None
    prompt: object = None


class _Line(msgspec.Struct):
    body: msgspec.Raw = msgspec.Raw()
    url: object = None


_wanted = msgspec.json.Decoder(Wanted)
_line = msgspec.json.Decoder(_Line)


def of_body(
    body: bytes, endpoint: str, params: BatchParams | None = None, *, unsaid: int = 0
) -> tuple[str, Usage]:
    """Model and estimated usage of a request body; the model is empty where none can be read.

    ``unsaid``: the server's limit of an answer that has no other; 0: it has none.

    >>> of_body(b'{"model": "m", "max_tokens": 5, "n": 2}', "/v1/chat/completions")[1].output
    10
    """
    try:
        wanted = _wanted.decode(body)
    except (ValueError, RecursionError):
        return "", Usage()
    model = wanted.model if isinstance(wanted.model, str) else ""
    fallback = unsaid or DEFAULT_OUTPUT
    if params is not None and params.max_decoding_length is not None:
        fallback = params.max_decoding_length
    limits = (wanted.max_completion_tokens, wanted.max_output_tokens, wanted.max_tokens)
    output = next((limit for limit in limits if _whole(limit)), fallback)
    assert isinstance(output, int)
    answers = _choices(wanted) * (_prompts(wanted.prompt) if endpoint == COMPLETIONS else 1)
    return model, Usage(
        input=-(-len(body) // BYTES_PER_TOKEN),
        output=0 if endpoint == EMBEDDINGS else min(output * answers, _MOST_OUTPUT),
    )


def of_line(
    line: bytes, endpoint: str | None, params: BatchParams | None = None, *, unsaid: int = 0
) -> tuple[str, Usage]:
    """The same for a line of an input file; without an endpoint the line's own url counts."""
    try:
        found = _line.decode(line)
    except (ValueError, RecursionError):
        return "", Usage()
    if endpoint is None:
        endpoint = canonical_endpoint(found.url) or "" if isinstance(found.url, str) else ""
    return of_body(bytes(found.body), endpoint, params, unsaid=unsaid)


def body_of(line: bytes) -> bytes:
    """The request body of a line; empty where none can be read."""
    try:
        return bytes(_line.decode(line).body)
    except (ValueError, RecursionError):
        return b""


def _choices(wanted: Wanted) -> int:
    """Answers that are written to a prompt; of ``best_of`` all are paid, and one is shown."""
    given = [n for n in (wanted.n, wanted.best_of) if isinstance(n, int) and _whole(n)]
    return max(given, default=1)


def _prompts(prompt: object) -> int:
    """A list is several prompts, unless it is the tokens of one."""
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return 1
    return len(prompt)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


class Demand(Record, frozen=True, kw_only=True):
    """What the lines of one model ask for."""

    lines: int = 0
    usage: Usage = Usage()


class Examination(Record, frozen=True, kw_only=True):
    """What an upload would be, had it been kept."""

    facts: FileFacts
    size: int
    """Bytes of the file."""
    demand: dict[str, Demand]
    """By model."""
    samples: dict[str, tuple[bytes, ...]]
    """The first bodies by model, for who can count their tokens."""


class Tally:
    """Adds up an input file by model as it passes by; keeps the first ``sample`` bodies of each."""

    def __init__(
        self,
        endpoint: str | None,
        params: BatchParams | None = None,
        *,
        unsaid: int = 0,
        sample: int = 0,
    ) -> None:
        self._endpoint, self._params, self._unsaid = endpoint, params, unsaid
        self._sample = sample
        self.samples: dict[str, list[bytes]] = {}
        self._splitter = Splitter()
        self._sums: dict[str, list[int]] = {}

    def feed(self, piece: bytes) -> None:
        """Take the next bytes of the file."""
        self._add(self._splitter.feed(piece))

    def finish(self) -> dict[str, Demand]:
        """End of file: the demand by model."""
        self._add(self._splitter.finish())
        return {
            model: Demand(lines=lines, usage=Usage(input=input, output=output))
            for model, (lines, input, output) in self._sums.items()
        }

    def _add(self, texts: list[Text]) -> None:
        for text in texts:
            model, usage = of_line(text.data, self._endpoint, self._params, unsaid=self._unsaid)
            sums = self._sums.setdefault(model, [0, 0, 0])
            sums[0] += 1
            sums[1] += usage.input
            sums[2] += usage.output
            if sums[0] <= self._sample:
                self.samples.setdefault(model, []).append(body_of(text.data))
