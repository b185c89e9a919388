"""Every error that a client can meet, in one table.

An error class is its meaning: the docstring says when it happens and what to do.
``docs/reference/errors.md`` is
checked against this file. Foreign exceptions are mapped to these once, at the boundary where they
appear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tidemill.types import Problem, Refusal


class TidemillError(Exception):
    """Base of all errors that are answered in the OpenAI envelope."""

    status: int = 500
    type: str = "server_error"
    code: str | None = "internal_error"
    should_retry: ClassVar[bool | None] = None
    """Sent as ``x-should-retry``: the SDKs repeat 408, 409, 429 and 5xx unless told not to."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code
        self.retry_after_s = retry_after_s
        self.problems: tuple[Problem, ...] = ()


class BadRequest(TidemillError):
    """The request is wrong; ``param`` names the field and the message says what to send instead."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class RequestRefused(BadRequest):
    """A completion request that cannot run: a parameter that is unsupported, a prompt that is too
    long, a bad schema."""

    code = "invalid_request_error"


class ContextLengthExceeded(RequestRefused):
    """The prompt (and the answer asked for) does not fit the model's context. In a batch the line
    never ran."""

    code = "context_length_exceeded"


class InvalidFile(BadRequest):
    """An input file with problems: the first is the error's own, all (up to 100) are in
    ``error.errors.data``."""

    code = "invalid_batch_line"

    def __init__(
        self, problems: Sequence[Problem], *, code: str | None = None, status: int = 400
    ) -> None:
        first = problems[0]
        where = f"Line {first.line}: " if first.line is not None else ""
        others = len(problems) - 1
        noun = "problem" if others == 1 else "problems"
        more = f" ({others} more {noun}, see error.errors)" if others else ""
        super().__init__(f"{where}{first.message}{more}", param=first.param, code=code)
        self.problems = tuple(problems)
        self.status = status


class TooLarge(TidemillError):
    """A file over the configured byte limit; split it."""

    status = 413
    type = "invalid_request_error"
    code = "batch_file_too_large"


class RangeNotSatisfiable(TidemillError):
    """A ``Range`` that begins behind the end of the file."""

    status = 416
    type = "invalid_request_error"
    code = "range_not_satisfiable"

    def __init__(self, size: int) -> None:
        super().__init__(f"The range begins behind the end of the file, which has {size} bytes.")
        self.size = size


class Unauthenticated(TidemillError):
    """No key, a wrong key, or one that is revoked or expired."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class Forbidden(TidemillError):
    """The key is right but may not do this (a model, a provider, an admin route)."""

    status = 403
    type = "permission_error"
    code = "permission_denied"


class ProviderNotPermitted(Forbidden):
    """A request names a provider that is unknown, or that the key may not use: both look alike."""

    code = "provider_not_permitted"

    def __init__(self, provider: str) -> None:
        super().__init__(
            f"The key may not use a provider named '{provider[:100]}'.", param="X-Tidemill-Provider"
        )


class NotFound(TidemillError):
    """Nothing with this id; a foreign object looks the same."""

    status = 404
    type = "invalid_request_error"
    code = None


class ModelNotFound(TidemillError):
    """No model of this name is served here."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class MethodNotAllowed(TidemillError):
    """The route exists, the method does not."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class Conflict(TidemillError):
    """The object's state does not allow this; repeating will not help."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"
    should_retry = False


class NotCancellable(Conflict):
    """Cancel of a batch that has already ended."""

    code = "batch_not_cancellable"


class FileInUse(Conflict):
    """Deleting an input file that an active batch still reads; cancel the batch or wait."""

    code = "file_in_use"


class DuplicateActiveBatch(BadRequest):
    """A second batch for a file whose first is still active; the message names the first."""

    code = "duplicate_active_batch"


class BudgetExceeded(TidemillError):
    """The key, its team or its user is over its budget for this month, or what was asked for is
    more than is left of it, or than the batch's ``max_cost``."""

    status = 402
    type = "insufficient_quota"
    code = "budget_exceeded"
    should_retry = False


class QuotaExceeded(BadRequest):
    """More lines or tokens than this key, team or user may have enqueued; wait for batches to end.

    A 400, as Azure's fail-fast quota: the SDKs would repeat a 429 at once, and in vain."""

    type = "insufficient_quota"
    code = "token_limit_exceeded"
    should_retry = False


class StorageQuotaExceeded(TidemillError):
    """With this file the owner would keep more bytes of input files than it may; delete some."""

    status = 403
    type = "insufficient_quota"
    code = "storage_quota_exceeded"
    should_retry = False


class RateLimited(TidemillError):
    """This key, team or user has sent its requests or tokens of this minute, or its owner has
    created its batches of this hour; ``Retry-After`` says when to come again. Batch lines do not
    count."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class AtCapacity(TidemillError):
    """The intake pool cannot take this batch now; ``Retry-After`` says when to come again. Nothing
    was created."""

    status = 429
    type = "rate_limit_error"
    code = "capacity_exceeded"


class NotSupported(TidemillError):
    """The route or mode exists in the API but not on this server."""

    status = 501
    type = "invalid_request_error"
    code = "batch_api_not_supported"
    should_retry = False


class EngineUnavailable(TidemillError):
    """The engine of this model is down and has not come back; see ``/health``."""

    status = 503
    type = "server_error"
    code = "engine_unavailable"


class EngineLost(EngineUnavailable):
    """The engine died under this request. A batch line runs again; an interactive client may
    repeat."""

    code = "engine_restarted"


class EngineDown(EngineUnavailable):
    """There is no engine to ask, whatever is asked. Batch lines wait for it and lose no attempt."""


class ModelNotLoaded(EngineUnavailable):
    """The model is not in memory and could not be loaded in time, because others are at work there;
    ``Retry-After`` says when to come again. Batch lines wait."""

    code = "model_not_loaded"


class EngineCrash(TidemillError):
    """The engine died three times while it worked on this request, the last two times on nothing
    else. It is not run again."""

    code = "engine_crash"
    should_retry = False


class AmbiguousProvider(BadRequest):
    """Several providers could take the batch; name one in ``X-Tidemill-Provider``."""

    code = "multiple_batch_providers"


class ProviderRefused(TidemillError):
    """A provider refused or failed, and said why: its own status and error object are passed on."""

    code: str | None = "provider_refused"

    def __init__(
        self,
        message: str,
        *,
        status: int,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        given: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.status = status
        self.type = type
        self.code = code
        self.given = given or {}


class ProviderUnavailable(TidemillError):
    """A provider cannot be reached, fails, or does not accept this server's credential."""

    status = 502
    code = "provider_unavailable"


class OwnershipUnrecorded(TidemillError):
    """A provider's object was made but could not be recorded here, and was undone; try again."""

    status = 502
    code = "batch_ownership_unrecorded"


class StoreBusy(TidemillError):
    """Another server has this storage path; stop it or choose another path."""

    status = 503
    code = "store_busy"


class StoreUnavailable(TidemillError):
    """The store cannot be written (disk full, I/O error, shut down); nothing of the request was
    kept. ``/health`` has the reason; repeat later."""

    status = 503
    code = "store_unavailable"


class StoreTooNew(TidemillError):
    """The database was written by a newer Tidemill; upgrade this one or choose another path."""

    status = 503
    code = "store_too_new"


class InvariantBroken(TidemillError):
    """A change that would have left the store in a state that cannot be; a bug. Nothing was
    changed."""

    status = 500
    should_retry = False


class SettingsError(Exception):
    """A setting is unknown or bad. The start stops with this one sentence."""


def refusal(error: TidemillError) -> Refusal:
    """The same failure as a value, for a line. A line whose prompt is too long counts as never
    run."""
    if isinstance(error, ContextLengthExceeded):
        return Refusal(code=error.code or "error", message=error.message, param=error.param)
    return Refusal(
        status_code=error.status,
        code=error.code or "error",
        message=error.message,
        param=error.param,
        type=error.type,
        retry=error.status in (429, 500, 502, 503) and error.should_retry is not False,
        retry_after_s=error.retry_after_s,
        spend=not isinstance(error, EngineDown | ModelNotLoaded),
        rest=isinstance(error, EngineDown),
    )
