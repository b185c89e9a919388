"""``/batches``: create, list, retrieve, cancel. Where a batch runs is its backend's business."""

from __future__ import annotations

import re
from typing import Any

from litestar import get, post
from litestar.params import FromPath

from tidemill import wire
from tidemill.access import BATCH
from tidemill.errors import BadRequest, NotFound
from tidemill.handlers import allowance, creation, estimation
from tidemill.handlers.deps import (
    Connection,
    Incoming,
    actor,
    body,
    principal,
    services,
    whole_number,
)
from tidemill.handlers.files import execution_asked, provider_asked
from tidemill.types import BatchRecord, FileRecord, NewBatch, Page

MAX_BODY_BYTES = 1024 * 1024
MAX_IDEMPOTENCY_KEY = 255

_ID = re.compile(r"batch_[A-Za-z0-9_-]{1,200}")
_FILE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,200}")


@post("/batches", status_code=200, opt={"scope": BATCH})
async def create_batch(request: Incoming) -> dict[str, Any]:
    """Open a batch on an uploaded file; it is checked and run after the answer."""
    who = await principal(request)
    given = services(request)
    asked = creation.parse(await body(request, MAX_BODY_BYTES))
    idempotency_key = _idempotency_key(request)
    file = None
    if _FILE_ID.fullmatch(asked.input_file_id):
        file = await given.store.files.get(asked.input_file_id, who.owner)
    if file is None:
        raise BadRequest(
            f"Cannot find file {asked.input_file_id[:200]}, or this key does not have access to "
            "it.",
            param="file_id",
            code="invalid_request",
        )
    _check_file(file, asked.endpoint)
    given.backends.agree(file, who, execution_asked(request), provider_asked(request))
    allowance.batch(given, who, file)
    hold = await estimation.reservation(
        given,
        file,
        asked.endpoint,
        asked.params,
        hold=asked.hold,
        max_cost=asked.max_cost,
    )
    backend = given.backends.named(file.facts.placement.backend)
    batch = await backend.open(
        NewBatch(
            owner=who.owner,
            key_id=who.key_id,
            file=file,
            endpoint=asked.endpoint,
            completion_window=asked.completion_window,
            window_s=given.settings.window_seconds,
            metadata=asked.metadata,
            params=asked.params,
            output_expires_after_s=asked.output_expires_after_s,
            idempotency_key=idempotency_key,
            retried=_retried(request),
            allow_duplicate=given.settings.allow_duplicate_batches,
            max_cost=asked.max_cost,
            hold=hold,
            by=await actor(request),
        )
    )
    return wire.batch_object(batch)


@get("/batches", opt={"scope": BATCH})
async def list_batches(request: Incoming) -> dict[str, Any]:
    """The owner's batches, newest first."""
    who = await principal(request)
    page = Page(
        after=request.query_params.get("after") or None,
        limit=whole_number(request, "limit", 20, 1, 100),
    )
    given = services(request)
    batches, more = await given.store.batches.page(who.owner, page)
    shown = [wire.batch_object(given.backends.shown(batch)) for batch in batches]
    return wire.list_object(shown, more)


@get("/batches/{batch_id:str}", opt={"scope": BATCH})
async def retrieve_batch(request: Incoming, batch_id: FromPath[str]) -> dict[str, Any]:
    """One batch as it is now."""
    batch = await owned_batch(request, batch_id)
    backend = services(request).backends.named(batch.placement.backend)
    return wire.batch_object(await backend.refresh(batch))


@post("/batches/{batch_id:str}/cancel", status_code=200, opt={"scope": BATCH})
async def cancel_batch(request: Incoming, batch_id: FromPath[str]) -> dict[str, Any]:
    """Begin to cancel. The body is empty, whatever its content type says, and is not read."""
    batch = await owned_batch(request, batch_id)
    backend = services(request).backends.named(batch.placement.backend)
    return wire.batch_object(await backend.cancel(batch, await actor(request)))


ROUTES = (create_batch, list_batches, retrieve_batch, cancel_batch)


async def owned_batch(request: Incoming, batch_id: str) -> BatchRecord:
    """The batch, if it is the asker's. Raises ``NotFound``: a foreign batch looks like none."""
    who = await principal(request)
    if _ID.fullmatch(batch_id):
        batch = await services(request).store.batches.get(batch_id, who.owner)
        if batch is not None:
            return batch
    raise NotFound(f"No such Batch object: {batch_id[:200]}", param="id")


def _check_file(file: FileRecord, endpoint: str) -> None:
    if file.purpose != "batch" or file.kind != "input":
        raise BadRequest(
            f"The file {file.id} has the purpose '{file.purpose}'; a batch needs one with the "
            "purpose 'batch'.",
            param="input_file_id",
            code="invalid_purpose",
        )
    if file.facts.endpoint not in (None, endpoint):
        raise BadRequest(
            f"The requests of file {file.id} go to '{file.facts.endpoint}', not to '{endpoint}'.",
            param="endpoint",
            code="invalid_url",
        )


def _idempotency_key(connection: Connection) -> str | None:
    key = connection.headers.get("idempotency-key")
    if key is not None and len(key) > MAX_IDEMPOTENCY_KEY:
        raise BadRequest(
            f"The Idempotency-Key is longer than {MAX_IDEMPOTENCY_KEY} characters.",
            param="Idempotency-Key",
        )
    return key or None


def _retried(connection: Connection) -> bool:
    """True when an SDK says that it sends this again because an answer was lost."""
    count = connection.headers.get("x-stainless-retry-count", "")
    return count.isascii() and count.isdigit() and count.strip("0") != ""
