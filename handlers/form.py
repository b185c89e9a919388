"""An upload's multipart form, read as it streams in: fields in any order, one file, no copy.

Python sends ``purpose`` first, openai-node the file first; what must be known before the file is
stored is its name, and everything else is checked when the form has ended.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from urllib.parse import unquote

from multipart import (
    MultipartError,
    MultipartSegment,
    ParserLimitReached,
    PushMultipartParser,
    parse_options_header,
)

from tidemill.errors import BadRequest
from tidemill.handlers.deps import Incoming, pieces
from tidemill.handlers.expiry import expires_after_s

MAX_FIELD_BYTES = 64 * 1024
MAX_PARTS = 64
MAX_FILENAME = 512

_EXPIRES = re.compile(r"expires_after(?:\[(?P<bracket>\w+)\]|\.(?P<dot>\w+))")
_EXTENDED = re.compile(r"""filename\*\s*=\s*"?(utf-8|iso-8859-1)'[^']*'([^;"]*)""", re.IGNORECASE)
_EXTENSION = re.compile(r"\.[A-Za-z0-9]{1,8}$")


class UploadForm:
    """One form. ``open`` reads up to the file, ``body`` through the rest; then the fields are
    complete and right."""

    def __init__(self, request: Incoming) -> None:
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        if kind != "multipart/form-data":
            raise BadRequest(
                "Files are uploaded as multipart/form-data with the fields 'purpose' and 'file'.",
                code="invalid_content_type",
            )
        try:
            self._parser = PushMultipartParser(
                options.get("boundary", ""), max_segment_count=MAX_PARTS
            )
        except MultipartError as exc:
            raise _malformed(exc) from exc
        self._pieces = pieces(request)
        self._fields: dict[str, str] = {}
        self._events = self._read()
        self._files = 0

    async def open(self) -> str:
        """The file's name. Raises ``BadRequest`` for a form that is wrong so far."""
        async for event in self._events:
            if isinstance(event, MultipartSegment):
                if self._fields.get("purpose") is not None:
                    self._check_purpose()
                return _filename(event)
        raise BadRequest(
            "Missing required parameter: 'file'.", param="file", code="missing_required_parameter"
        )

    async def body(self) -> AsyncIterator[bytes]:
        """The file's bytes. Ends when the whole form was read; raises ``BadRequest`` for a form
        that is cut off or wrong, at its end."""
        async for event in self._events:
            if isinstance(event, bytes):
                yield event
        self._check_purpose()
        self.expiry()

    def expiry(self) -> int | None:
        """Seconds from creation to expiry, where the form says so."""
        anchor, seconds = self._fields.get("anchor"), self._fields.get("seconds")
        if anchor is None and seconds is None:
            return None
        return expires_after_s(
            "expires_after",
            {"anchor": anchor, "seconds": _whole(seconds)},
        )

    def _check_purpose(self) -> None:
        purpose = self._fields.get("purpose")
        if not purpose:
            raise BadRequest(
                "Missing required parameter: 'purpose'.",
                param="purpose",
                code="missing_required_parameter",
            )
        if purpose != "batch":
            raise BadRequest(
                f"Invalid value: '{purpose[:100]}'. Supported values are: 'batch'. Files are kept "
                "here only for batches (purpose).",
                param="purpose",
            )

    async def _read(self) -> AsyncIterator[MultipartSegment | bytes]:
        """The file's segment, then its bytes; fields are put aside on the way."""
        segment: MultipartSegment | None = None
        field = bytearray()
        try:
            async for piece in self._pieces:
                for event in self._parser.parse(piece):
                    if isinstance(event, MultipartSegment):
                        segment = event
                        field.clear()
                        if segment.name == "file":
                            self._files += 1
                            if self._files > 1:
                                raise BadRequest("Only one 'file' can be sent.", param="file")
                            yield segment
                    elif segment is not None and segment.name == "file":
                        if event:
                            yield bytes(event)
                    elif event is not None:
                        field += event
                        if len(field) > MAX_FIELD_BYTES:
                            raise BadRequest("A form field is too long.", code="field_too_long")
                    elif segment is not None:
                        self._keep(segment.name or "", bytes(field))
            self._parser.close()
        except MultipartError as exc:
            raise _malformed(exc) from exc

    def _keep(self, name: str, value: bytes) -> None:
        if found := _EXPIRES.fullmatch(name):
            name = found["bracket"] or found["dot"]
        elif name != "purpose":
            return
        self._fields[name] = value.decode("utf-8", "replace").strip()


def _whole(text: str | None) -> int | str | None:
    """The number that a field spells, or the field."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 19 else text


def _filename(segment: MultipartSegment) -> str:
    """The name as the client knows it. Raises ``BadRequest`` for one that no batch file has.

    A name without any extension passes: the Python SDK calls raw bytes ``upload``.
    """
    name = segment.filename or "upload"
    if found := _EXTENDED.search(segment.header("Content-Disposition", "")):
        name = unquote(found[2], encoding=found[1], errors="replace")  # RFC 5987
    if len(name) > MAX_FILENAME:
        raise BadRequest(
            f"The file name is longer than {MAX_FILENAME} characters.",
            param="file",
            code="filename_too_long",
        )
    if not name.isprintable() and any(ord(char) < 32 or ord(char) == 127 for char in name):
        raise BadRequest("The file name has control characters.", param="file")
    extension = _EXTENSION.search(name)
    if extension and extension[0].lower() != ".jsonl":
        raise BadRequest(
            f"A batch file must be a .jsonl file, and '{name[:100]}' is not.",
            param="file",
            code="invalid_file_format",
        )
    return name


def _malformed(exc: MultipartError) -> BadRequest:
    if isinstance(exc, ParserLimitReached):
        return BadRequest("The multipart form has too many or too long parts.", code="invalid_form")
    return BadRequest(f"The multipart form is broken or cut off: {exc}.", code="invalid_form")
