"""Calls to one provider's Files and Batches, and nothing else: no store, no states.

Every call goes through the official SDK, once: whether to try again is decided above. What fails
comes out as ``ProviderFailed`` with the failure read.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from functools import partial
from typing import IO, Any, TypeVar

import msgspec

from tidemill import clock, wire
from tidemill.backends import refusals
from tidemill.backends.dialects import Dialect
from tidemill.backends.refusals import Failure, Meaning
from tidemill.backends.rewriting import Outbound
from tidemill.backends.words import sent, without_credential
from tidemill.lines import Splitter
from tidemill.scheduler.retry import Gate
from tidemill.types import BatchRecord, Lane, Refusal, UpstreamBatch

T = TypeVar("T")

ENDS = frozenset({"completed", "failed", "expired", "cancelled"})
"""The provider's words for a batch that has ended."""
METADATA_KEY = "tidemill_batch"
"""Carries our batch id upstream, so that a batch whose answer was lost can be found again."""
_MAX_METADATA = 16
_PAGE = 100
_SEARCH_PAGES = 20
_CLOCK_SKEW_S = 300
_PATIENCE_S = 60.0
"""Longest wait for an answer that carries no file."""


class ProviderFailed(Exception):
    """A call that failed; ``failure`` says what it means."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def _object(raw: Any) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(raw.http_response.content)
    except msgspec.DecodeError:
        value = None
    if not isinstance(value, dict):
        failure = Failure(
            meaning=Meaning.TRANSIENT, message="The provider answered with something else."
        )
        raise ProviderFailed(failure)
    if "errors" in value:  # its only words; ids may look like anything
        value["errors"] = without_credential(value["errors"], sent(raw.http_request.headers))
    return value


class Forwarding:
    """One provider's Files and Batches."""

    def __init__(self, dialect: Dialect, gate: Gate) -> None:
        self._dialect = dialect
        self._client = dialect.client
        self._gate = gate
        self._patience_s = min(_PATIENCE_S, dialect.provider.timeout_s)
        self._credentials: list[str] = []

    async def _told(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make one call inside the gate, before batch lines and after interactive requests."""
        async with self._gate.enter(Lane.JOB):
            try:
                answer = await call()
            except Exception as exc:
                raise self._failed(exc) from exc
            self._gate.succeeded()
            return answer

    async def _opened(self, call: Callable[[], Awaitable[T]], about: str = "") -> T:
        """One call of a route that is there wherever there is a Batch API. ``about`` is what its
        body names: a 404 that speaks of that is no missing route."""
        try:
            return await self._told(call)
        except ProviderFailed as failed:
            if about and about in failed.failure.message:
                raise
            raise ProviderFailed(refusals.unserved(failed.failure)) from failed

    async def upload(
        self, filename: str, body: AsyncIterator[bytes], outbound: Outbound
    ) -> tuple[str, int | None]:
        """Send a file, its lines rewritten on the way; returns the provider's id and expiry.

        The rewritten bytes go through a temporary file: the length is then known before the first
        byte is sent, and memory stays flat.
        """
        extra: dict[str, Any] = {}
        if self._dialect.file_expiry_s is not None:
            seconds = self._dialect.file_expiry_s
            extra["expires_after"] = {"anchor": "created_at", "seconds": seconds}
        if not filename.endswith(".jsonl"):
            filename = "input.jsonl"  # OpenAI takes no other
        with tempfile.TemporaryFile() as spool:
            await _spool(body, outbound, spool)
            spool.seek(0)
            raw = await self._opened(
                lambda: self._client.files.with_raw_response.create(
                    file=(filename, spool), purpose="batch", **extra
                )
            )
        file = _object(raw)
        id, expires_at = file.get("id"), file.get("expires_at")
        if not isinstance(id, str) or not id:
            raise ProviderFailed(
                Failure(meaning=Meaning.TRANSIENT, message="The provider gave the file no id.")
            )
        return id, expires_at if isinstance(expires_at, int) else None

    async def delete_file(self, id: str) -> None:
        """Delete a file there."""
        await self._told(
            lambda: self._client.files.with_raw_response.delete(id, timeout=self._patience_s)
        )

    async def create(self, batch: BatchRecord, file_id: str) -> dict[str, Any]:
        """Create a batch; returns the provider's object."""
        metadata = dict(batch.metadata or {})
        while len(metadata) >= _MAX_METADATA:
            metadata.popitem()
        metadata[METADATA_KEY] = batch.id
        raw = await self._opened(
            lambda: self._client.batches.with_raw_response.create(
                completion_window="24h",
                endpoint=self._dialect.spelled(batch.endpoint),  # type: ignore[arg-type]
                input_file_id=file_id,
                metadata=metadata,
                # Another Tidemill gives the first batch again; others ignore the header.
                extra_headers={"Idempotency-Key": batch.id},
                timeout=self._patience_s,
            ),
            about=file_id,
        )
        created = _object(raw)
        if _text(created.get("id")) is None:
            raise ProviderFailed(
                Failure(meaning=Meaning.TRANSIENT, message="The provider gave the batch no id.")
            )
        return created

    async def find(self, batch_id: str, since_at: int) -> dict[str, Any] | None:
        """The provider's batch that carries our id, among those made since ``since_at``."""
        listing: Callable[..., Any] = self._client.batches.with_raw_response.list
        after: str | None = None
        for _ in range(_SEARCH_PAGES):
            cursor: dict[str, Any] = {} if after is None else {"after": after}
            raw = await self._opened(
                partial(listing, limit=_PAGE, timeout=self._patience_s, **cursor)
            )
            page = _object(raw)
            data = [item for item in page.get("data") or [] if isinstance(item, dict)]
            for item in data:
                if (item.get("metadata") or {}).get(METADATA_KEY) == batch_id:
                    return item
            oldest = data[-1].get("created_at") if data else None
            past = isinstance(oldest, int) and oldest < since_at - _CLOCK_SKEW_S
            if not data or not page.get("has_more") or past:
                return None
            after = data[-1].get("id")
        return None

    async def retrieve(self, id: str) -> dict[str, Any]:
        """A batch as the provider has it."""
        return _object(
            await self._told(
                lambda: self._client.batches.with_raw_response.retrieve(
                    id, timeout=self._patience_s
                )
            )
        )

    async def cancel(self, id: str) -> dict[str, Any]:
        """Ask the provider to cancel."""
        return _object(
            await self._told(
                lambda: self._client.batches.with_raw_response.cancel(id, timeout=self._patience_s)
            )
        )

    async def content(self, file_id: str) -> AsyncGenerator[bytes]:
        """A file's bytes as they come; close it when you stop early: it holds its place of the
        gate until then."""
        async with self._gate.enter(Lane.JOB):
            try:
                async with self._client.files.with_streaming_response.content(file_id) as response:
                    self._credentials = sent(response.http_request.headers)
                    async for piece in response.iter_bytes():
                        yield piece
            except Exception as exc:
                raise self._failed(exc) from exc
            self._gate.succeeded()

    def discreet(self, refusal: Refusal) -> Refusal:
        """A refusal out of a file that was read, without the credential that read it."""
        body = refusal.body
        if body is not None and any(one.encode() in body for one in self._credentials):
            body = wire.encode(without_credential(msgspec.json.decode(body), self._credentials))
        message = without_credential(refusal.message, self._credentials)
        return msgspec.structs.replace(refusal, message=message, body=body)

    def _failed(self, exc: Exception) -> ProviderFailed:
        failure = refusals.read(exc)
        if failure.status == 429 and failure.meaning is Meaning.TRANSIENT:
            self._gate.throttled(failure.retry_after_s)
        return ProviderFailed(failure)


async def _spool(body: AsyncIterator[bytes], outbound: Outbound, spool: IO[bytes]) -> None:
    splitter = Splitter()
    async for piece in body:
        for text in splitter.feed(piece):
            spool.write(outbound.line(text.data) + b"\n")
    for text in splitter.finish():
        spool.write(outbound.line(text.data) + b"\n")


def as_seen(known: UpstreamBatch, answer: dict[str, Any]) -> UpstreamBatch:
    """What we knew of a batch, with what the provider says now.

    Absent, null and empty values are normalised: OpenAI gives ``""`` for a file that is not there,
    Azure null counts and errors without line or param. An id that is on record stays: it is the one
    that was asked for, whatever stands in the answer.
    """
    counts = answer.get("request_counts")
    counts = counts if isinstance(counts, dict) else {}
    status = _text(answer.get("status")) or known.status
    return msgspec.structs.replace(
        known,
        id=known.id or _text(answer.get("id")),
        status=status,
        completed=max(known.completed, _whole(counts.get("completed"))),
        failed=max(known.failed, _whole(counts.get("failed"))),
        output_id=_text(answer.get("output_file_id")) or known.output_id,
        error_id=_text(answer.get("error_file_id")) or known.error_id,
        problems=refusals.problems_of(answer.get("errors")) or known.problems,
        looked_at=clock.now(),
        ended_at=_whole(answer.get(f"{status}_at")) if status in ENDS else 0,
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
