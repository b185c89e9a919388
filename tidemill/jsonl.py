"""The check of a JSONL input file, line by line, all problems in one go.

One class serves the upload, the batch that validates a stored file, and ``tidemill check``. Rules:
sections G and H of docs/reference/api.md.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from tidemill import complaints
from tidemill.errors import InvalidFile, TooLarge
from tidemill.lines import Cutter, LineTooLong, Splitter, Text
from tidemill.types import FileFacts, NewLine, Problem
from tidemill.wire import ENDPOINTS, canonical_endpoint

MAX_PROBLEMS = 100
MAX_EMBEDDING_INPUTS = 50_000

ERROR_CODES = {
    "too_many_tasks": "batch_file_too_many_requests",
    "empty_file": "empty_batch_file",
    "model_not_permitted": "model_not_permitted",
    "unsupported_url": "unsupported_batch_endpoint",
}
"""From the code of the first problem to the code of the error; all others are
``invalid_batch_line``."""

_NEEDS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/v1/embeddings": "input",
}


class Fed(msgspec.Struct, frozen=True):
    """What one piece of a file gave."""

    chunks: list[bytes]
    """To store: together with all others the exact bytes of the file. None come once a problem was
    found, because such a file is not kept."""
    lines: list[NewLine]
    """The requests in it. Empty where the check is off."""


class _Line(msgspec.Struct):
    # The body is decoded whole, not skipped as ``Raw``: skipping lets broken UTF-8, lone surrogates
    # and numbers like 1e999 through, and costs only half as much.
    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


_UNKNOWN = Problem(code="", message="")
"""Stands for "not asked yet" where None means "nothing wrong"."""

_decoder = msgspec.json.Decoder(_Line)


class _CustomIds:
    """Finds repeated ids in 12 bytes per line: a file may have millions, and none is kept.

    Ids are compared by their 64-bit hash (for a million lines the odds of a false alarm are
    1 : 10⁷), sharded so that the search needs a small set at a time.
    """

    def __init__(self) -> None:
        self._hashes = [array("q") for _ in range(64)]
        self._nos = [array("I") for _ in range(64)]

    def add(self, custom_id: str, no: int) -> None:
        code = hash(custom_id)
        self._hashes[code & 63].append(code)
        self._nos[code & 63].append(no)

    def repeated(self) -> Iterator[tuple[int, int]]:
        """Pairs of line numbers: the first use of an id and a later one."""
        for hashes, nos in zip(self._hashes, self._nos, strict=True):
            if len(set(hashes)) == len(hashes):
                continue
            several = {code for code, n in Counter(hashes).items() if n > 1}
            first: dict[int, int] = {}
            for code, no in zip(hashes, nos, strict=True):
                if code in several and first.setdefault(code, no) != no:
                    yield first[code], no


class Checker:
    """Checks a file that arrives in pieces.

    ``knows`` says whether a model is served at all, ``permits`` whether this key may use it (None:
    every model). ``endpoint`` is the batch's, canonical; None at upload, where all lines of a file
    must agree on one. ``check=False`` only cuts and counts: the batch will check.

    >>> checker = Checker(max_bytes=1000, max_lines=10, knows=None)
    >>> fed = checker.feed(b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",')
    >>> fed = checker.feed(b' "body": {"model": "m", "messages": [{}]}}')
    >>> fed, facts = checker.finish()
    >>> facts.lines, facts.models, facts.endpoint
    (1, ('m',), '/v1/chat/completions')
    """

    def __init__(
        self,
        max_bytes: int,
        max_lines: int,
        knows: Callable[[str], bool] | None,
        permits: Callable[[str], bool] | None = None,
        endpoint: str | None = None,
        check: bool = True,
    ) -> None:
        self._max_bytes, self._max_lines = max_bytes, max_lines
        self._knows, self._permits = knows, permits
        self._asked, self._endpoint = endpoint, endpoint
        self._check = check
        self._splitter, self._cutter = Splitter(), Cutter()
        self._head: bytes | None = b""
        self._bytes = self._lines = self._inputs = self._longest = 0
        self._ids = _CustomIds()
        self._urls: dict[str, str | None] = {}
        self._accepted: dict[str, str] = {}
        """Urls that are this file's, and their canonical form."""
        self._foreign: set[int] = set()
        """Lines whose url no batch may address."""
        self._models: dict[str, Problem | None] = {}
        self._problems: list[Problem] = []
        self._over = False
        """No more lines are looked at: one more problem would say nothing new."""

    # --- the two calls ------------------------------------------------------------------------

    def feed(self, piece: bytes) -> Fed:
        """Take the next bytes. Raises ``TooLarge``, and ``InvalidFile`` where going on is useless
        (not UTF-8 at all, an endless line)."""
        self._bytes += len(piece)
        if self._bytes > self._max_bytes:
            raise TooLarge(
                f"The file is larger than the limit of {self._max_bytes} bytes; split it into "
                "several files.",
                param="file",
            )
        if self._head is not None:
            # The encoding shows in the first four bytes.
            self._head += piece
            if len(self._head) < 4:
                return Fed([], [])
            piece, self._head = self._head, None
            self._sniff(piece)
        return self._take(piece, last=False)

    def finish(self) -> tuple[Fed, FileFacts]:
        """End of file. Raises ``InvalidFile`` with all problems, in line order."""
        rest, self._head = self._head or b"", None
        self._sniff(rest)
        fed = self._take(rest, last=True)
        if self._check:
            if not self._lines and not self._problems:
                self._note("empty_file", "The file has no requests.")
            self._note_repeated()
        self._raise_if_bad()
        facts = FileFacts(
            lines=self._lines,
            models=tuple(self._models),
            endpoint=self._endpoint,
            max_line_bytes=self._longest,
            checked=self._check,
        )
        return fed, facts

    # --- a piece ------------------------------------------------------------------------------

    def _take(self, piece: bytes, *, last: bool) -> Fed:
        try:
            texts = self._splitter.feed(piece)
            if last:
                texts += self._splitter.finish()
        except LineTooLong as exc:
            self._problems.append(Problem(code="invalid_request", message=str(exc), line=exc.no))
            self._raise_if_bad()
        chunks = self._cutter.feed(piece)
        if last:
            chunks += self._cutter.finish()
        if self._check:
            lines = [] if self._over else self._examine(texts)
        else:
            lines = []
            self._lines += len(texts)
            self._longest = max(self._longest, max((len(t.data) for t in texts), default=0))
        return Fed([] if self._problems else chunks, lines)

    def _examine(self, texts: list[Text]) -> list[NewLine]:
        lines = []
        for text in texts:
            self._lines += 1
            if self._lines > self._max_lines:
                self._note(
                    "too_many_tasks",
                    f"The file has more than {self._max_lines} requests; split it into several "
                    "files.",
                )
                self._over = True
                break
            line = self._quick(text)
            if line is None:
                self._problems += self._diagnose(text)
                if len(self._problems) >= MAX_PROBLEMS:
                    self._over = True
                    break
                continue
            self._ids.add(line.custom_id, text.no)
            lines.append(line)
            if len(text.data) > self._longest:
                self._longest = len(text.data)
        return lines

    def _quick(self, text: Text) -> NewLine | None:
        """The line where nothing is wrong with it; else None, and ``_diagnose`` finds the words."""
        try:
            line = _decoder.decode(text.data)
        except (RecursionError, ValueError):
            return None
        body, model = line.body, line.body.get("model")
        endpoint = self._accepted.get(line.url) or self._accept_url(line.url, text.no)
        if (
            endpoint is None
            or line.method != "POST"
            or not 0 < len(line.custom_id) <= complaints.MAX_CUSTOM_ID
            or ("stream" in body and complaints.stream(body["stream"]))
            or not isinstance(model, str)
            or (self._models.get(model, _UNKNOWN) is not None and self._model_problem(model))
            or complaints.content(_NEEDS[endpoint], body.get(_NEEDS[endpoint]))
        ):
            return None
        if endpoint == "/v1/embeddings" and not self._count_inputs(body["input"]):
            return None
        return NewLine(
            no=text.no,
            offset=text.offset,
            length=len(text.data),
            custom_id=line.custom_id,
            model=model,
        )

    # --- rules --------------------------------------------------------------------------------

    def _model_problem(self, model: str) -> Problem | None:
        if model not in self._models:
            problem = None
            if not model:
                problem = Problem(
                    code="invalid_request",
                    message="Model parameter is required.",
                    param="body.model",
                )
            elif self._permits is not None and not self._permits(model):
                problem = Problem(
                    code="model_not_permitted",
                    message=f"This key may not use the model {complaints.shown(model)}",
                    param="body.model",
                )
            elif self._knows is not None and not self._knows(model):
                problem = Problem(
                    code="model_not_found",
                    message=f"The model {complaints.shown(model)} does not exist here",
                    param="body.model",
                )
            self._models[model] = problem
        return self._models[model]

    def _accept_url(self, url: str, no: int) -> str | None:
        if self._url_problem(url, no) is not None:
            return None
        endpoint = self._accepted[url] = self._urls[url] or ""
        return endpoint

    def _url_problem(self, url: str, no: int) -> Problem | None:
        if url not in self._urls:
            self._urls[url] = canonical_endpoint(url)
        canonical = self._urls[url]
        if canonical is not None and self._endpoint is None:
            self._endpoint = canonical
        if canonical is not None and canonical == self._endpoint:
            return None
        if self._asked is not None:
            message = "The URL provided for this request does not match the batch endpoint."
        elif canonical is None:
            self._foreign.add(no)
            message = (
                f"A batch may not address the url {complaints.shown(url)}. Supported values are: "
                f"{', '.join(ENDPOINTS)}."
            )
        else:
            message = (
                f"The url {complaints.shown(url)} differs from that of the lines before it "
                f"('{self._endpoint}'); all lines of a file go to one endpoint."
            )
        return Problem(code="invalid_url", message=message, line=no, param="url")

    def _count_inputs(self, value: Any) -> bool:
        """False once the file's embedding inputs are too many. A list of token numbers is one
        input."""
        several = isinstance(value, list) and not (value and isinstance(value[0], int))
        self._inputs += len(value) if several else 1
        return self._inputs <= MAX_EMBEDDING_INPUTS

    # --- words --------------------------------------------------------------------------------

    def _diagnose(self, text: Text) -> list[Problem]:
        """Everything that is wrong with one line, at least one thing."""
        try:
            value = msgspec.json.decode(text.data)
        except (RecursionError, ValueError) as exc:
            message = complaints.unreadable(text, exc)
            return [Problem(code="invalid_json_line", message=message, line=text.no)]
        if not isinstance(value, dict):
            message = f"This line is not a JSON object but {complaints.kind(value)}."
            return [Problem(code="invalid_json_line", message=message, line=text.no)]

        found = list(complaints.shape(value))
        custom_id, url, body = value.get("custom_id"), value.get("url"), value.get("body")
        if isinstance(custom_id, str):
            self._ids.add(custom_id, text.no)
        endpoint = None
        if isinstance(url, str):
            found += filter(None, [self._url_problem(url, text.no)])
            endpoint = self._urls[url]
        if isinstance(body, dict):
            found += filter(None, self._diagnose_body(body, endpoint, custom_id))
        if not found:
            # The two decoders differ in how deep they go before they give up.
            message = complaints.unreadable(text, RecursionError())
            found.append(Problem(code="invalid_json_line", message=message))
        return [msgspec.structs.replace(problem, line=text.no) for problem in found]

    def _diagnose_body(
        self, body: dict[str, Any], endpoint: str | None, custom_id: Any
    ) -> Iterator[Problem | None]:
        yield complaints.stream(body.get("stream"))
        model = body.get("model")
        if model is None:
            yield self._model_problem("")
        elif not isinstance(model, str):
            yield Problem(
                code="invalid_request",
                message=f"'model' must be a string, not {complaints.kind(model)}.",
                param="body.model",
            )
        elif problem := self._model_problem(model):
            tail = (
                ""
                if problem.message.endswith(".")
                else f" (custom_id {complaints.shown(custom_id)})."
            )
            yield msgspec.structs.replace(problem, message=problem.message + tail)
        if endpoint is not None:
            yield complaints.content(_NEEDS[endpoint], body.get(_NEEDS[endpoint]))
            if endpoint == "/v1/embeddings" and self._inputs > MAX_EMBEDDING_INPUTS:
                self._over = True
                yield Problem(
                    code="too_many_tasks",
                    message=f"The file has more than {MAX_EMBEDDING_INPUTS} embedding inputs.",
                    param="body.input",
                )

    def _sniff(self, head: bytes) -> None:
        encoding = complaints.encoding(head[:4])
        if self._check and encoding is not None:
            self._problems = [
                Problem(
                    code="invalid_json_line",
                    message=f"The file is encoded in {encoding}; save it as UTF-8.",
                    line=1,
                )
            ]
            self._raise_if_bad()

    def _note(self, code: str, message: str) -> None:
        self._problems.append(Problem(code=code, message=message))

    def _note_repeated(self) -> None:
        for first, no in self._ids.repeated():
            if len(self._problems) >= MAX_PROBLEMS:
                return
            self._problems.append(
                Problem(
                    code="duplicate_custom_id",
                    message=f"The custom_id of line {no} was already used on line {first}.",
                    line=no,
                    param="custom_id",
                )
            )

    def _raise_if_bad(self) -> None:
        if not self._problems:
            return
        # What concerns the file as a whole comes before its lines.
        problems = sorted(self._problems, key=lambda p: p.line or 0)[:MAX_PROBLEMS]
        first = problems[0]
        code = first.code
        if code == "invalid_url" and first.line in self._foreign:
            code = "unsupported_url"
        raise InvalidFile(
            problems,
            code=ERROR_CODES.get(code, "invalid_batch_line"),
            status=403 if code == "model_not_permitted" else 400,
        )
