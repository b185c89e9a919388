"""What the two clients share: requests, the retry schedule and the flows, free of any I/O.

A flow is a generator. It yields a ``Call`` or a ``Pause``; whoever drives it performs that and
sends back a ``Reply`` or a ``Lost``. The sync and the async client differ only in that driver::

    flow ── Call ──► driver ── HTTP ──► server
         ◄─ Reply ──        (or Lost: the connection broke)
         ── Pause ─► driver sleeps
"""

from __future__ import annotations

import io
import json
import math
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote

MAX_RETRIES = 5
BACKOFF_CAP_S = 60.0
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
"""Statuses in which a batch no longer changes."""

Json = dict[str, Any]
T = TypeVar("T")


# --- errors -----------------------------------------------------------------------------------


class ClientError(RuntimeError):
    """Base of everything that the client raises by itself."""


class ServerUnreachable(ClientError):
    """No answer: the connection failed as often as the client may try."""


class WaitTimeout(ClientError, TimeoutError):
    """The batch was not done within the time that the caller gave; it goes on at the server."""


class ApiError(ClientError):
    """The server answered with an error; the fields come from its envelope."""

    def __init__(self, reply: Reply) -> None:
        self.body = _object(reply.body)
        """The whole answer; empty when it is no JSON object."""
        error = self.body.get("error")
        error = error if isinstance(error, dict) else {}
        text = reply.body[:200].decode("utf-8", "replace").strip()
        self.status = reply.status
        self.message: str = error.get("message") or text or f"HTTP status {reply.status}"
        self.code: str | None = error.get("code")
        self.param: str | None = error.get("param")
        self.problems: list[Json] = (error.get("errors") or {}).get("data") or []
        """Every problem of a refused input file: ``code, message, line, param``."""
        self.request_id = reply.headers.get("x-request-id")
        super().__init__(f"{self.message} (HTTP {reply.status})")


class RetriesExhausted(ApiError):
    """The server was still at capacity (429) after the last retry."""


def _object(body: bytes) -> Json:
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


# --- what a flow asks for ---------------------------------------------------------------------


@dataclass(frozen=True)
class Upload:
    """A file to send. ``open`` is called for every attempt: a consumed body is never sent again."""

    name: str
    open: Callable[[], BinaryIO]


@dataclass(frozen=True)
class Call:
    """One HTTP exchange. With ``sink`` the body of a success is written there as it comes."""

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    json: Json | None = None
    form: Mapping[str, str] = field(default_factory=dict)
    upload: Upload | None = None
    sink: Path | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Pause:
    """Sleep for so many seconds."""

    seconds: float


@dataclass(frozen=True)
class Reply:
    """An answer. ``headers`` has lower-case names; ``body`` is empty when it went to a sink."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""

    def json(self) -> Json:
        """The body as an object. Raises ``ClientError`` when it is none."""
        try:
            value = json.loads(self.body)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ClientError("The server's answer is not a JSON object; is the base URL right?")
        return value


@dataclass(frozen=True)
class Lost:
    """The connection could not be made or broke before the whole answer was there."""

    reason: str


Flow = Generator["Call | Pause", "Reply | Lost | None", T]


# --- retries ----------------------------------------------------------------------------------


def retry_after(value: str | None, now: datetime) -> float | None:
    """Seconds that a ``Retry-After`` header asks for: a number or an HTTP date (RFC 9110, 10.2.3).

    None when it is absent or means nothing; a date in the past is 0.
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            then = parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = (then.replace(tzinfo=then.tzinfo or UTC) - now).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else None


def backoff(attempt: int) -> float:
    """1, 2, 4, 8, 16 … seconds, at most 60; ``attempt`` counts from 0."""
    return min(float(2**attempt), BACKOFF_CAP_S)


@dataclass(frozen=True)
class Retries:
    """How often a call may be repeated: after a 429, and after a connection that failed."""

    busy: int = MAX_RETRIES
    lost: int = MAX_RETRIES


def send(call: Call, retries: Retries) -> Flow[Reply]:
    """One call with its retries. Raises ``ApiError`` or ``ServerUnreachable``."""
    busy = lost = 0
    while True:
        reply = yield call
        if isinstance(reply, Reply):
            if reply.status < 400:
                return reply
            if reply.status != 429 or reply.headers.get("x-should-retry") == "false":
                raise ApiError(reply)
            if busy == retries.busy:
                raise RetriesExhausted(reply)
            asked = retry_after(reply.headers.get("retry-after"), datetime.now(UTC))
            yield Pause(backoff(busy) if asked is None else asked)
            busy += 1
        else:
            reason = reply.reason if reply is not None else "nothing came back"
            if lost == retries.lost:
                raise ServerUnreachable(f"The server cannot be reached: {reason}")
            yield Pause(backoff(lost))
            lost += 1


# --- flows ------------------------------------------------------------------------------------


def root_url(base_url: str) -> str:
    """The server's root, from a base URL with or without ``/v1``. Raises ``ValueError``."""
    root = base_url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    if not root.startswith(("http://", "https://")):
        raise ValueError(f"The base URL must begin with http:// or https://, not {base_url!r}")
    return root


def file_path(id: str, tail: str = "") -> str:
    """Route of a file."""
    return f"/v1/files/{quote(id, safe='')}{tail}"


def batch_path(id: str, tail: str = "") -> str:
    """Route of a batch."""
    return f"/v1/batches/{quote(id, safe='')}{tail}"


def source(file: str | Path | bytes, filename: str | None) -> Upload:
    """Where an upload's bytes come from. A path is opened anew for each attempt."""
    if isinstance(file, bytes):
        return Upload(filename or "upload.jsonl", lambda: io.BytesIO(file))
    path = Path(file)
    return Upload(filename or path.name, lambda: path.open("rb"))


def upload_call(upload: Upload, purpose: str, expires_after_s: int | None) -> Call:
    """``POST /v1/files``."""
    form = {"purpose": purpose}
    if expires_after_s is not None:
        form["expires_after[anchor]"] = "created_at"
        form["expires_after[seconds]"] = str(expires_after_s)
    return Call("POST", "/v1/files", form=form, upload=upload)


def preflight_call(upload: Upload) -> Call:
    """``POST /v1/batches/preflight`` with a file that is not kept."""
    return Call("POST", "/v1/batches/preflight", form={"purpose": "batch"}, upload=upload)


def create_call(input_file_id: str, endpoint: str, window: str, fields: Mapping[str, Any]) -> Call:
    """``POST /v1/batches``. The key lets a repetition, whose answer was lost, find its batch."""
    body = {
        "input_file_id": input_file_id,
        "endpoint": endpoint,
        "completion_window": window,
        **{name: value for name, value in fields.items() if value is not None},
    }
    return Call(
        "POST", "/v1/batches", json=body, headers={"Idempotency-Key": secrets.token_hex(16)}
    )


def page_call(path: str, **query: str | int | None) -> Call:
    """A list; parameters that are None are left out."""
    return Call("GET", path, params={k: str(v) for k, v in query.items() if v is not None})


def health(retries: Retries) -> Flow[Json]:
    """``GET /health``, whose 503 is an answer and no error."""
    try:
        reply = yield from send(Call("GET", "/health"), retries)
    except ApiError as exc:
        if exc.status == 503:
            return exc.body
        raise
    return reply.json()


def wait(
    id: str,
    poll_interval: float,
    timeout: float | None,
    clock: Callable[[], float],
    on_poll: Callable[[Json], None] | None,
    retries: Retries,
) -> Flow[Json]:
    """Poll until the batch has ended. Raises ``WaitTimeout``."""
    started = clock()
    while True:
        reply = yield from send(Call("GET", batch_path(id)), retries)
        batch = reply.json()
        if on_poll is not None:
            on_poll(batch)
        if batch.get("status") in ENDED:
            return batch
        left = math.inf if timeout is None else started + timeout - clock()
        if left <= 0:
            raise WaitTimeout(
                f"Batch {id} is still {batch.get('status')} after {timeout:g} s; it goes on."
            )
        yield Pause(min(poll_interval, left))


def save_results(
    batch: Json, output: Path, errors: Path | None, retries: Retries
) -> Flow[list[Path]]:
    """Download the batch's result files; returns the paths that were written.

    A batch without any success leaves an empty output file, so that the next step of a script
    finds one; the error file is written only where there are errors.
    """
    written = []
    for key, path in (("output_file_id", output), ("error_file_id", errors)):
        if path is None:
            continue
        if batch.get(key):
            yield from send(Call("GET", file_path(batch[key], "/content"), sink=path), retries)
            written.append(path)
        elif key == "output_file_id":
            with sink_file(path):
                written.append(path)
    return written


def submit(
    upload: Call,
    create: Callable[[str], Call],
    output: Path,
    errors: Path | None,
    poll_interval: float,
    timeout: float | None,
    clock: Callable[[], float],
    on_poll: Callable[[Json], None] | None,
    retries: Retries,
) -> Flow[Json]:
    """Upload, create, wait, download. A batch that failed as a whole writes nothing."""
    file = (yield from send(upload, retries)).json()
    batch = (yield from send(create(file["id"]), retries)).json()
    batch = yield from wait(batch["id"], poll_interval, timeout, clock, on_poll, retries)
    if batch["status"] != "failed":
        yield from save_results(batch, output, errors, retries)
    return batch


# --- rows while they come ---------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Some result rows, the cursor behind them, and whether there will be no more."""

    rows: list[bytes]
    after: str
    last: bool


def rows_page(id: str, after: str, wait_s: int, retries: Retries) -> Flow[Rows]:
    """Rows after a cursor. The server waits up to ``wait_s`` for the first one; without it, what
    there is now ends at the first empty page."""
    query = {"after": after, "wait": str(wait_s)}
    reply = yield from send(Call("GET", batch_path(id, "/results"), params=query), retries)
    rows = [row for row in reply.body.split(b"\n") if row]
    ended = not wait_s or reply.headers.get("x-tidemill-status") in ENDED
    return Rows(rows, reply.headers.get("x-tidemill-next", after), ended and not rows)


# --- files on this side -----------------------------------------------------------------------


@contextmanager
def sink_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name only when it is whole."""
    part = path.with_name(path.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("wb") as file:
        yield file
    part.replace(path)
