"""Our lines in a provider's words, and its results in ours.

Only what must differ is touched: a line or a body whose names are the same passes as it came, and
of one that is changed every other value keeps its own bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tidemill import wire
from tidemill.backends.words import in_our_words
from tidemill.errors import BadRequest
from tidemill.providers import Kind
from tidemill.types import Answer, BatchParams, Outcome, Refusal, Usage

Fields = dict[str, msgspec.Raw]


class _Spelled(msgspec.Struct):
    url: str


_fields = msgspec.json.Decoder(Fields)
_spelled = msgspec.json.Decoder(_Spelled)
_encode = msgspec.json.Encoder().encode

_LIMIT_FIELD = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
_LIMIT_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


class Outbound:
    """Rewrites the lines of one file for one provider."""

    def __init__(
        self,
        names: Mapping[str, str],
        *,
        url: str,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """``names``: ours → theirs. ``url`` is the surface's spelling, for lines that have another.
        ``defaults`` are body fields for lines that lack them."""
        self._names = {ours: msgspec.Raw(_encode(theirs)) for ours, theirs in names.items()}
        self._same = all(ours == theirs for ours, theirs in names.items())
        self._url, self._raw_url = url, msgspec.Raw(_encode(url))
        self._defaults = {k: msgspec.Raw(_encode(v)) for k, v in (defaults or {}).items()}

    def line(self, data: bytes) -> bytes:
        """One line, without its line end; the same object where nothing is to be changed."""
        if self._same and not self._defaults and _spelled.decode(data).url == self._url:
            return data
        line = _fields.decode(data)
        body = _fields.decode(line["body"])
        ours = msgspec.json.decode(body["model"], type=str)
        body["model"] = self._names[ours]
        for field, value in self._defaults.items():
            if field in _LIMIT_FIELDS and any(name in body for name in _LIMIT_FIELDS):
                continue
            body.setdefault(field, value)
        line["body"] = msgspec.Raw(_encode(body))
        line["url"] = self._raw_url
        return _encode(line)


def body_defaults(params: BatchParams, endpoint: str, kind: Kind) -> dict[str, Any]:
    """The batch's own parameters as body fields of its lines.

    Raises ``BadRequest`` for one that no provider's API has a word for.
    """
    imitates = kind in ("openai_compatible", "tidemill")
    foreign = [
        name
        for name in ("top_k", "max_context_length", "deterministic")
        if getattr(params, name) is not None and not (name == "top_k" and imitates)
    ]
    if foreign:
        raise BadRequest(
            f"'{foreign[0]}' cannot be sent to the provider that this file was placed at; upload "
            "the file with X-Tidemill-Execution: local to run it here.",
            param=foreign[0],
            code="unsupported_parameter",
        )
    fields: dict[str, Any] = {}
    if endpoint == "/v1/embeddings":
        return fields
    if params.temperature is not None:
        fields["temperature"] = params.temperature
    if params.top_p is not None:
        fields["top_p"] = params.top_p
    if params.top_k is not None:
        fields["top_k"] = params.top_k
    if params.max_decoding_length is not None:
        field = _LIMIT_FIELD[endpoint]
        if field == "max_completion_tokens" and kind == "openai_compatible":
            field = "max_tokens"  # the older word, which imitators know
        fields[field] = params.max_decoding_length
    return fields


def renamed(body: bytes, model: str) -> bytes:
    """A response body with our name in ``model``, also inside a Responses object's events."""
    fields = _fields.decode(body)
    if "model" not in fields:
        return body
    fields["model"] = msgspec.Raw(_encode(model))
    return _encode(fields)


# --- results ----------------------------------------------------------------------------------


class _Response(msgspec.Struct):
    status_code: int = 0
    request_id: str | None = None
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Row(msgspec.Struct):
    custom_id: str
    response: _Response | None = None
    error: dict[str, Any] | None = None


_row = msgspec.json.Decoder(_Row)


def custom_id_and_outcome(row: bytes) -> tuple[str, Outcome]:
    """A provider's result row, read. Raises ``msgspec.DecodeError`` for what is none."""
    found = _row.decode(row)
    response, error = found.response, found.error or {}
    if response is None or response.status_code == 0:
        return found.custom_id, Refusal(
            code=str(error.get("code") or "batch_failed"),
            message=str(error.get("message") or "The provider gave no reason."),
        )
    request_id = response.request_id or ""
    if 200 <= response.status_code < 300:
        body = bytes(response.body)
        return found.custom_id, Answer(
            body=body, usage=usage_of(body), model=model_of(body), request_id=request_id
        )
    body = bytes(response.body)
    return found.custom_id, Refusal(
        status_code=response.status_code,
        code=str(error.get("code") or "provider_refused"),
        message=str(error.get("message") or ""),
        body=body if body != b"null" else None,
        request_id=request_id,
    )


def in_our_name(
    outcome: Outcome, ours: str, theirs: str, ids: Mapping[str, str] | None = None
) -> Outcome:
    """The outcome as our client sees it: its own model's name, whatever the provider calls it, and
    our ids (``ids``: ours → theirs) in the words of a refusal."""
    if isinstance(outcome, Answer):
        if ours == theirs:
            return outcome
        return msgspec.structs.replace(outcome, body=renamed(outcome.body, ours))
    names = {ours: theirs, **(ids or {})}
    body = outcome.body
    if body is not None and any(name.encode() in body for name in names.values()):
        body = wire.encode(in_our_words(msgspec.json.decode(body), names))
    return msgspec.structs.replace(outcome, message=in_our_words(outcome.message, names), body=body)


class _Used(msgspec.Struct):
    usage: dict[str, Any] | None = None
    model: Any = None
    created: Any = None
    created_at: Any = None


_used = msgspec.json.Decoder(_Used)


def usage_of(body: bytes) -> Usage:
    """Tokens of a response body of any endpoint: chat, completions and embeddings say
    ``prompt_tokens``, responses say ``input_tokens``. Absent or odd values count as nothing."""
    try:
        usage = _used.decode(body).usage or {}
    except msgspec.DecodeError:
        return Usage()
    return Usage(
        input=_first(usage, "prompt_tokens", "input_tokens"),
        cached=_detail(usage, "cached_tokens", "prompt_tokens_details", "input_tokens_details"),
        output=_first(usage, "completion_tokens", "output_tokens"),
        reasoning=_detail(
            usage, "reasoning_tokens", "completion_tokens_details", "output_tokens_details"
        ),
    )


def model_of(body: bytes) -> str:
    """The ``model`` that a response body names; empty where it names none."""
    try:
        model = _used.decode(body).model
    except msgspec.DecodeError:
        return ""
    return model if isinstance(model, str) else ""


def done_at(body: bytes, earliest: int, latest: int) -> int:
    """When the work was done, as the body says; ``latest`` where it says nothing credible."""
    try:
        used = _used.decode(body)
    except msgspec.DecodeError:
        return latest
    said = _int(used.created) or _int(used.created_at)
    return said if earliest <= said <= latest else latest


def _first(usage: Mapping[str, Any], *names: str) -> int:
    return next((n for n in (_int(usage.get(name)) for name in names) if n), 0)


def _detail(usage: Mapping[str, Any], name: str, *groups: str) -> int:
    details: Iterable[Any] = (usage.get(group) for group in groups)
    return next((n for d in details if isinstance(d, dict) and (n := _int(d.get(name)))), 0)


def _int(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
