"""``/files``: upload, list, retrieve, delete. The content is served in ``content.py``."""

from __future__ import annotations

import re
from typing import Any, Literal

from litestar import MediaType, Response, delete, get, post
from litestar.params import FromPath

from tidemill import wire
from tidemill.access import BATCH
from tidemill.errors import BadRequest, NotFound, TooLarge
from tidemill.handlers import allowance
from tidemill.handlers.deps import (
    Connection,
    Incoming,
    actor,
    principal,
    services,
    whole_number,
)
from tidemill.handlers.form import UploadForm
from tidemill.types import Execution, FileRecord, NewFile, Page, Placement, Upload

_ID = re.compile(r"file-[A-Za-z0-9_-]{1,200}")
_FORM_OVERHEAD = 1024 * 1024

_EXECUTIONS: dict[str, Execution] = {
    "auto": "auto",
    "local": "local",
    "logos": "local",
    "provider": "provider",
}


@post("/files", status_code=200, opt={"scope": BATCH})
async def upload_file(request: Incoming) -> Response[dict[str, Any]]:
    """Take an input file in as it streams, check it, and decide where its batch will run."""
    who = await principal(request)
    given = services(request)
    limit = given.settings.max_batch_file_bytes
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit + _FORM_OVERHEAD:
        raise TooLarge(
            f"The file is larger than the limit of {limit} bytes; split it into several files.",
            param="file",
        )
    room = await allowance.upload(given, who)
    form = UploadForm(request)
    execution, validation = (
        execution_asked(request),
        _validation(request, given.settings.validation),
    )
    filename = await form.open()
    file = await given.backends.accept(
        Upload(
            new=NewFile(
                owner=who.owner, filename=filename, by=await actor(request), quota=room.quota
            ),
            body=room.within(form.body()),
            principal=who,
            execution=execution,
            provider=provider_asked(request),
            validation=validation,
            expiry=form.expiry,
        )
    )
    return Response(
        wire.file_object(file),
        status_code=200,
        headers={"X-Tidemill-Placement": _placement(file.facts.placement)},
        media_type=MediaType.JSON,
    )


@get("/files", opt={"scope": BATCH})
async def list_files(request: Incoming) -> dict[str, Any]:
    """The owner's files, newest first."""
    who = await principal(request)
    query = request.query_params
    order = query.get("order") or "desc"
    if order not in ("asc", "desc"):
        raise BadRequest(
            "Invalid value for 'order'. Supported values are: 'asc', 'desc'.", param="order"
        )
    page = Page(
        after=query.get("after") or None,
        limit=whole_number(request, "limit", 10_000, 1, 10_000),
        order="asc" if order == "asc" else "desc",
        purpose=query.get("purpose") or None,
    )
    files, more = await services(request).store.files.page(who.owner, page)
    return wire.list_object([wire.file_object(file) for file in files], more)


@get("/files/{file_id:str}", opt={"scope": BATCH})
async def retrieve_file(request: Incoming, file_id: FromPath[str]) -> dict[str, Any]:
    """One file, as its upload answered it."""
    return wire.file_object(await owned_file(request, file_id))


@delete("/files/{file_id:str}", status_code=200, opt={"scope": BATCH})
async def delete_file(request: Incoming, file_id: FromPath[str]) -> dict[str, Any]:
    """Forget a file and its bytes; results of its batches stay."""
    who = await principal(request)
    files, by = services(request).store.files, await actor(request)
    if not _ID.fullmatch(file_id) or not await files.delete(file_id, who.owner, by):
        raise no_such_file(file_id)
    return {"id": file_id, "object": "file", "deleted": True}


ROUTES = (upload_file, list_files, retrieve_file, delete_file)


async def owned_file(request: Incoming, file_id: str) -> FileRecord:
    """The file, if it is the asker's. Raises ``NotFound``: a foreign file looks like none."""
    who = await principal(request)
    if _ID.fullmatch(file_id):
        file = await services(request).store.files.get(file_id, who.owner)
        if file is not None:
            return file
    raise no_such_file(file_id)


def no_such_file(file_id: str) -> NotFound:
    """The 404 of every file route."""
    return NotFound(f"No such File object: {file_id[:200]}", param="id")


def _header(connection: Connection, *names: str) -> str | None:
    return next((value for name in names if (value := connection.headers.get(name))), None)


def provider_asked(connection: Connection) -> str | None:
    """The provider that a request names; None: none."""
    return _header(connection, "X-Tidemill-Provider", "X-Logos-Provider")


def execution_asked(connection: Connection) -> Execution:
    """Where a request wants its batch to run. Raises ``BadRequest``."""
    text = _header(connection, "X-Tidemill-Execution", "X-Logos-Batch-Execution") or "auto"
    found = _EXECUTIONS.get(text.strip().lower())
    if found is None:
        raise BadRequest(
            f"Invalid value: '{text[:100]}'. Supported values are: 'auto', 'local', 'provider'.",
            param="X-Tidemill-Execution",
        )
    return found


def _validation(
    connection: Connection, default: Literal["upload", "batch"]
) -> Literal["upload", "batch"]:
    text = (_header(connection, "X-Tidemill-Validation") or default).strip().lower()
    if text == "batch":
        return "batch"
    if text == "upload":
        return "upload"
    raise BadRequest(
        f"Invalid value: '{text[:100]}'. Supported values are: 'upload', 'batch'.",
        param="X-Tidemill-Validation",
    )


def _placement(placement: Placement) -> str:
    """``local; reason="…"``: a structured header, so only printable ASCII in the string."""
    text = "".join(c if " " <= c <= "~" and c not in '"\\' else "?" for c in placement.reason)
    where = "local" if placement.execution == "local" else f"provider; name={placement.backend}"
    return f'{where}; reason="{text}"'
