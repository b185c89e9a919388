"""What a provider's failure means: one reading of every exception that the SDK raises.

Codes are read first, then ``errors.data[]``, then words: providers agree on none of the three.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any

import msgspec
import openai

from tidemill import clock
from tidemill.backends.words import in_our_words, sent, without_credential
from tidemill.errors import NotSupported, ProviderRefused, ProviderUnavailable, TidemillError
from tidemill.types import Problem, Record


class Meaning(StrEnum):
    """What a failure says about the batch."""

    MODEL = "model"
    """The provider does not batch this model: it teaches, and the batch can run elsewhere."""
    MIXED = "mixed"
    """It takes one model a file: the batch can run elsewhere, and no model is to blame."""
    UNSERVED = "unserved"
    """It serves no Batch API, or no more: the batch can run elsewhere."""
    QUOTA = "quota"
    """No room now, or no money: says nothing about the model."""
    GONE = "gone"
    """404 for an object that we hold an id of."""
    CREDENTIAL = "credential"
    """Our key is wrong there, not the client's here."""
    TRANSIENT = "transient"
    """Time-out, broken connection, 429, 5xx: nothing is known; ask again."""
    REQUEST = "request"
    """Anything else: the client's own mistake, passed on."""


class Failure(Record, frozen=True, kw_only=True):
    """One failure, read."""

    meaning: Meaning
    message: str
    status: int | None = None
    """None: no answer came."""
    code: str | None = None
    param: str | None = None
    type: str = "invalid_request_error"
    retry_after_s: float | None = None
    request_id: str = ""
    problems: tuple[Problem, ...] = ()
    given: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """The provider's own error object, whole; empty where it sent none."""

    @property
    def certain(self) -> bool:
        """True when the provider certainly did not do what it was asked."""
        if self.meaning is Meaning.UNSERVED:
            return True
        return self.status is not None and self.status < 500 and self.status != 408


_MODEL_CODES = frozenset(
    {
        "model_not_found",
        "model_not_supported",
        "unsupported_model",
        "model_not_available",
        "model_not_available_for_batch",
        "model_not_permitted",
        "invalid_model",
        "invalid_deployment_type",
        "deployment_not_found",
        "deploymentnotfound",
        "deployment_not_supported",
        "operationnotsupported",
        "operation_not_supported",
    }
)
_MIXED_CODES = frozenset({"model_mismatch", "mismatched_model"})
_UNSERVED_CODE = "batch_api_not_supported"
_HARD_QUOTA_CODES = frozenset(
    {
        "token_limit_exceeded",
        "insufficient_quota",
        "quota_exceeded",
        "batch_limit_exceeded",
        "billing_hard_limit_reached",
    }
)
_QUOTA_CODES = _HARD_QUOTA_CODES | {"rate_limit_exceeded", "too_many_requests"}
_QUOTA_WORDS = re.compile(
    r"token_limit_exceeded|enqueued token|\bquota\b|\brate limit|billing|\bcapacity\b", re.I
)
_MODEL_WORDS = re.compile(
    r"\b(?:not|n't|cannot|un)\b[\w\s]{0,40}?(?:support|avail|enabl|offer|found|exist|allow|batch)"
    r"|n't\s+(?:support|exist|have)|unsupported|unavailable|invalid model",
    re.I,
)
_ABOUT_MODEL = re.compile(r"\b(?:model|deployment|sku)s?\b", re.I)


def meaning_of(code: str | None, message: str) -> Meaning | None:
    """What a code and a message mean; None when neither says."""
    return _meaning_of_code(code) or _meaning_of_words(message)


def _meaning_of_code(code: str | None) -> Meaning | None:
    key = (code or "").lower()
    if key in _QUOTA_CODES:
        return Meaning.QUOTA
    if key in _MIXED_CODES:
        return Meaning.MIXED
    if key in _MODEL_CODES:
        return Meaning.MODEL
    return Meaning.UNSERVED if key == _UNSERVED_CODE else None


def _meaning_of_words(message: str) -> Meaning | None:
    if _QUOTA_WORDS.search(message):
        return Meaning.QUOTA
    if _ABOUT_MODEL.search(message) and _MODEL_WORDS.search(message):
        return Meaning.MODEL
    return None


def meaning_of_problems(problems: Sequence[Problem]) -> Meaning | None:
    """The meaning of a batch that finished failed: quota wins, since it must never teach."""
    found = {meaning_of(problem.code, problem.message) for problem in problems}
    for meaning in (Meaning.QUOTA, Meaning.MIXED, Meaning.MODEL, Meaning.UNSERVED):
        if meaning in found:
            return meaning
    return None


def named_models(texts: Iterable[str], models: Iterable[str]) -> frozenset[str]:
    """Those of ``models`` that the texts name exactly: gpt-4.1 is not named by gpt-4.1-mini."""
    joined = "\n".join(texts)
    return frozenset(
        model
        for model in models
        if re.search(
            rf"(?<![A-Za-z0-9._:/-]){re.escape(model)}(?![A-Za-z0-9_-]|[.:/][A-Za-z0-9])", joined
        )
    )


def read(exc: Exception) -> Failure:
    """The failure behind an exception of a provider call. Raises what is no failure of theirs."""
    if isinstance(exc, openai.APIStatusError):
        return _read_status(exc)
    if isinstance(exc, TidemillError):
        credential = exc.code == "provider_credential"
        return Failure(
            meaning=Meaning.CREDENTIAL if credential else Meaning.TRANSIENT, message=exc.message
        )
    if isinstance(exc, openai.APIConnectionError) and isinstance(exc.__cause__, TidemillError):
        return read(exc.__cause__)
    if isinstance(exc, openai.APITimeoutError):
        return Failure(meaning=Meaning.TRANSIENT, message="The provider did not answer in time.")
    if isinstance(exc, openai.APIError | OSError) or _is_transport_error(exc):
        words = str(exc.__cause__ or exc) or type(exc).__name__
        return Failure(meaning=Meaning.TRANSIENT, message=f"The connection failed: {words}")
    raise exc


def _is_transport_error(exc: Exception) -> bool:
    # A body that is cut off while it is streamed raises httpx's own error, and which httpx that is
    # depends on the SDK's version.
    return any(
        base.__name__ in ("TransportError", "StreamError") and "httpx" in base.__module__
        for base in type(exc).__mro__
    )


def _read_status(exc: openai.APIStatusError) -> Failure:
    status, body = exc.status_code, without_credential(exc.body, sent(exc.request.headers))
    inner: Any = body.get("error", body) if isinstance(body, dict) else None
    inner = inner if isinstance(inner, dict) else {}
    message = _text(inner.get("message")) or _text(body) or f"The provider answered {status}."
    code, param = _text(inner.get("code")), _text(inner.get("param"))
    problems = problems_of(inner.get("errors"))
    if 300 <= status < 400:
        return Failure(
            meaning=Meaning.TRANSIENT,
            status=502,
            message="The provider answered with a redirect, which is not followed with a "
            "credential; correct its base URL.",
        )
    meaning = _meaning_of_status(status, code, message, problems)
    return Failure(
        meaning=meaning,
        message=message,
        status=status,
        code=code,
        param=param,
        type=_text(inner.get("type")) or "invalid_request_error",
        retry_after_s=_retry_after(exc.response.headers),
        request_id=exc.request_id or "",
        problems=problems,
        given=inner,
    )


def _meaning_of_status(
    status: int, code: str | None, message: str, problems: Sequence[Problem]
) -> Meaning:
    typed = _meaning_of_code(code)
    said = typed or meaning_of_problems(problems) or _meaning_of_words(message)
    if status == 501 and typed is not None:
        return typed
    if status >= 500 or status == 408:
        return Meaning.TRANSIENT
    if status == 402:
        return Meaning.QUOTA
    if status == 429:
        # "Too fast" passes by itself, "too much" does not.
        hard = (code or "").lower() in _HARD_QUOTA_CODES or "enqueued token" in message.lower()
        return Meaning.QUOTA if hard else Meaning.TRANSIENT
    if said is not None:
        return said
    if status in (401, 403):
        return Meaning.CREDENTIAL
    return {404: Meaning.GONE, 409: Meaning.TRANSIENT}.get(status, Meaning.REQUEST)


def unserved(failure: Failure) -> Failure:
    """The failure of a call that names no object: "there is no such route" says that there is no
    Batch API."""
    silent = (Meaning.GONE, Meaning.REQUEST, Meaning.TRANSIENT)
    if failure.status not in (404, 405, 501) or failure.meaning not in silent:
        return failure
    return msgspec.structs.replace(failure, meaning=Meaning.UNSERVED, code=_UNSERVED_CODE)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _retry_after(headers: Any) -> float | None:
    """``retry-after-ms`` wins over ``Retry-After`` (seconds or an HTTP date), as in the SDKs."""
    try:
        if (ms := headers.get("retry-after-ms")) is not None:
            return max(0.0, float(ms) / 1000)
        value = headers.get("retry-after")
        if value is None:
            return None
        try:
            return max(0.0, float(value))
        except ValueError:
            return max(0.0, parsedate_to_datetime(value).timestamp() - clock.now_f())
    except ValueError:
        return None


def problems_of(errors: Any) -> tuple[Problem, ...]:
    """``errors.data[]`` of a batch or an error, also where line and param are missing (Azure)."""
    data = errors.get("data") if isinstance(errors, dict) else errors
    if not isinstance(data, list):
        return ()
    return tuple(
        Problem(
            code=_text(item.get("code")) or "batch_failed",
            message=_text(item.get("message")) or "The provider gave no reason.",
            line=item["line"] if isinstance(item.get("line"), int) else None,
            param=_text(item.get("param")),
        )
        for item in data
        if isinstance(item, dict)
    )


def error_of(
    provider: str, failure: Failure, names: Mapping[str, str] | None = None
) -> TidemillError:
    """The failure as the client sees it: the provider's own error, unchanged but for its names of
    things (``names``: ours → theirs), and in our words where it sent none that is the client's."""
    failure = told(failure, names or {})
    if failure.meaning is Meaning.CREDENTIAL:
        # 401 and 403 would read as if the client's own key were wrong here.
        return ProviderUnavailable(
            f"Provider '{provider}' does not accept this server's credential: {failure.message}",
            code="provider_credential",
        )
    if failure.meaning is Meaning.UNSERVED:
        return NotSupported(f"Provider '{provider}' serves no Batch API: {failure.message}")
    if failure.status is None or (failure.status >= 500 and not failure.given):
        return ProviderUnavailable(f"Provider '{provider}' failed: {failure.message}")
    return ProviderRefused(
        failure.message,
        status=failure.status,
        type=failure.type,
        param=failure.param,
        code=failure.code,
        retry_after_s=failure.retry_after_s,
        given=failure.given,
    )


def told(failure: Failure, names: Mapping[str, str]) -> Failure:
    """The failure with our names in the provider's words; ``names``: ours → theirs."""
    return msgspec.structs.replace(
        failure,
        message=in_our_words(failure.message, names),
        problems=in_our_names(failure.problems, names),
        given=in_our_words(failure.given, names),
    )


def in_our_names(problems: Sequence[Problem], names: Mapping[str, str]) -> tuple[Problem, ...]:
    """The same for the problems of a batch."""
    return tuple(
        msgspec.structs.replace(problem, message=in_our_words(problem.message, names))
        for problem in problems
    )
