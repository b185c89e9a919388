"""A provider's ordinary routes: interactive requests, and batch lines that it does not batch.

A cloud model that cannot be batched runs here line by line, behind the provider's concurrency and
its ``Retry-After``, at the standard price. Bodies pass unchanged but for the model's name.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
import msgspec

from tidemill import estimates, wire
from tidemill.backends import refusals
from tidemill.backends.dialects import Dialect
from tidemill.backends.events import Events, broken
from tidemill.backends.refusals import Failure, Meaning
from tidemill.backends.rewriting import body_defaults, renamed, usage_of
from tidemill.backends.words import sent
from tidemill.errors import (
    BadRequest,
    ModelNotFound,
    ProviderRefused,
    ProviderUnavailable,
    RequestRefused,
    TidemillError,
    refusal,
)
from tidemill.scheduler.retry import Gate, Resting
from tidemill.types import Answer, BatchParams, Lane, ModelCard, Outcome, Refusal, Usage, Waiting

_fields = msgspec.json.Decoder(dict[str, Any])

_NO_ANSWER = "It answered with something that is no answer."
_STREAMING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})


class OrdinaryRoutes:
    """Implements ``ports.Inference`` on one provider."""

    def __init__(self, dialect: Dialect, gate: Gate) -> None:
        self._dialect = dialect
        self._gate = gate
        self.provider = dialect.provider
        self._names = {
            ours: model.standard
            for ours, model in dialect.provider.models.items()
            if model.standard is not None
        }

    def cards(self) -> Sequence[ModelCard]:
        """Its models under our names. What a model can do, the provider knows: all is allowed."""
        return tuple(
            ModelCard(id=name, owned_by=self.provider.name, embeddings=True, tools=True)
            for name in self._names
        )

    def knows(self, model: str) -> bool:
        """True when its ordinary routes serve the model."""
        return model in self._names

    def where(self, model: str) -> str:
        """The provider, whatever the model."""
        return self.provider.name

    async def count(self, endpoint: str, body: bytes) -> int | None:
        """Unknown: only the provider has its tokenizer."""
        return None

    @property
    def capacities(self) -> Mapping[str, int]:
        """Lines that it may be given now."""
        return {self.provider.name: int(self._gate.limit)}

    def place(self, model: str, endpoint: str) -> str:
        """The provider, whatever the line."""
        return self.provider.name

    def waits(self, lines: Mapping[str, Waiting]) -> None:
        """Nothing is to be prepared for a line."""

    async def answer(
        self,
        endpoint: str,
        body: bytes,
        *,
        lane: Lane,
        owner: str,
        defaults: Any = None,
        model: str | None = None,
        booked: Callable[[str, Usage], None] | None = None,
        batch: str | None = None,
    ) -> Outcome:
        """Run one request there; failures are a ``Refusal`` with the provider's own body.

        A provider says what it computed at an answer's end only, so a request whose asker has left
        goes on to its end for ``booked`` to be told. Every line of a batch is asked: what a
        provider computes is what it bills."""
        try:
            ours, fields = self._read(endpoint, body, model, defaults)
        except TidemillError as error:
            return refusal(error)
        if fields.get("stream"):
            return Refusal(
                status_code=400,
                code="streaming_unsupported",
                message="This request cannot stream; remove 'stream' or set it to false.",
                param="body.stream",
            )
        theirs = self._names[ours]
        try:
            async with self._admitted(lane):
                calling = asyncio.ensure_future(self._call(endpoint, theirs, fields))
                try:
                    raw = await asyncio.shield(calling)
                except asyncio.CancelledError:
                    usage = await _left(calling, to_its_end=booked is not None)
                    if booked is not None and usage is not None:
                        booked(ours, usage)
                    raise
                except Exception as exc:  # noqa: BLE001 - read() raises what is no failure of theirs
                    return self._refused(refusals.read(exc), ours)
                self._gate.succeeded()
        except ProviderRefused as resting:
            return refusal(resting)
        try:
            # Providers indent; a result row is one line.
            content = msgspec.json.format(raw.http_response.content, indent=-1)
        except msgspec.DecodeError:
            content = b""
        if not content.startswith(b"{"):
            return self._refused(Failure(meaning=Meaning.TRANSIENT, message=_NO_ANSWER), ours)
        answer = renamed(content, ours) if ours != theirs else content
        return Answer(
            body=answer,
            usage=usage_of(content),
            model=ours,
            request_id=raw.headers.get("x-request-id") or "",
            execution=self.provider.name,
        )

    async def stream(
        self,
        endpoint: str,
        body: bytes,
        *,
        owner: str,
        lane: Lane = Lane.INTERACTIVE,
        model: str | None = None,
        booked: Callable[[str, Usage], None] | None = None,
    ) -> AsyncIterator[bytes]:
        """The provider's events as they come. Raises ``TidemillError`` before the first one; a
        later failure is an event of its own."""
        if endpoint not in _STREAMING:
            raise BadRequest("This endpoint does not stream.", param="stream")
        ours, fields = self._read(endpoint, body, model, None)
        theirs = self._names[ours]
        names = {ours: theirs}
        events = Events(
            ours if ours != theirs else None, wants_usage=_wants_usage(fields), names=names
        )
        if endpoint != "/v1/responses":
            # Always asked for, so that the stream can be booked; shown only to who wanted it.
            options = fields.get("stream_options") or {}
            fields["stream_options"] = {**options, "include_usage": True}
        told = False
        try:
            async with self._admitted(lane):
                try:
                    async with self._streaming(endpoint, theirs, fields) as response:
                        events.credentials = sent(response.http_request.headers)
                        async with aclosing(_said(response, events)) as said:
                            async for event in said:
                                if booked is not None and events.ended and not told:
                                    told = True
                                    booked(ours, events.usage)
                                yield event
                except Exception as exc:
                    failure = refusals.read(exc)
                    self._throttle(failure)
                    error = refusals.error_of(self.provider.name, failure, names)
                    if not events.passed:
                        raise error from exc
                    yield broken(error, endpoint, events.passed)
                    return
                self._gate.succeeded()
        finally:
            if booked is not None and events.passed and not told:
                known = events.usage
                booked(ours, _so_far(endpoint, body, events) if known == Usage() else known)

    # --- one call -----------------------------------------------------------------------------

    @asynccontextmanager
    async def _admitted(self, lane: Lane) -> AsyncIterator[None]:
        """A place among the provider's calls. Raises ``ProviderRefused`` where somebody would wait
        out a long ``Retry-After``: the provider's own answer, without asking it."""
        try:
            async with self._gate.enter(lane):
                yield
        except Resting as resting:
            raise ProviderRefused(
                f"Provider '{self.provider.name}' has said \"too fast\" and is asked nothing for "
                f"another {resting.rest_s:.0f} s.",
                status=429,
                type="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after_s=resting.rest_s,
            ) from resting

    def _read(
        self, endpoint: str, body: bytes, forced: str | None, defaults: BatchParams | None
    ) -> tuple[str, dict[str, Any]]:
        try:
            fields = _fields.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise RequestRefused(f"The body is not a JSON object: {exc}.") from exc
        ours = forced or fields.get("model")
        if not isinstance(ours, str) or ours not in self._names:
            raise ModelNotFound(
                f"The model '{ours}' does not exist or is not served here.", param="model"
            )
        more = body_defaults(defaults or BatchParams(), endpoint, self.provider.kind)
        limits = {"max_tokens", "max_completion_tokens", "max_output_tokens"}
        for name, value in more.items():
            if not (name in limits and limits & fields.keys()):
                fields.setdefault(name, value)
        fields["model"] = self._names[ours]
        return ours, fields

    async def _call(self, endpoint: str, theirs: str, fields: Mapping[str, Any]) -> Any:
        """Through the SDK, the whole body as it is: its own parameters only name the route."""
        client, body = self._dialect.client, dict(fields)
        if endpoint == "/v1/chat/completions":
            return await client.chat.completions.with_raw_response.create(
                model=theirs, messages=[], extra_body=body
            )
        if endpoint == "/v1/completions":
            return await client.completions.with_raw_response.create(
                model=theirs, prompt="", extra_body=body
            )
        if endpoint == "/v1/embeddings":
            # Without a word about it the SDK would ask for base64 where the client did not.
            body.setdefault("encoding_format", "float")
            return await client.embeddings.with_raw_response.create(
                model=theirs, input="", extra_body=body
            )
        return await client.responses.with_raw_response.create(model=theirs, extra_body=body)

    def _streaming(self, endpoint: str, theirs: str, fields: Mapping[str, Any]) -> Any:
        client, body = self._dialect.client, dict(fields)
        if endpoint == "/v1/chat/completions":
            return client.chat.completions.with_streaming_response.create(
                model=theirs, messages=[], stream=True, extra_body=body
            )
        if endpoint == "/v1/completions":
            return client.completions.with_streaming_response.create(
                model=theirs, prompt="", stream=True, extra_body=body
            )
        return client.responses.with_streaming_response.create(
            model=theirs, stream=True, extra_body=body
        )

    def _throttle(self, failure: Failure) -> None:
        if failure.status == 429:
            self._gate.throttled(failure.retry_after_s)

    def _refused(self, failure: Failure, ours: str) -> Refusal:
        self._throttle(failure)
        error = refusals.error_of(self.provider.name, failure, {ours: self._names[ours]})
        transient = failure.meaning is Meaning.TRANSIENT
        return Refusal(
            status_code=error.status,
            code=error.code or "provider_refused",
            message=error.message,
            param=error.param,
            type=error.type,
            body=wire.encode(wire.error_object(error)),
            request_id=failure.request_id,
            retry=transient,
            retry_after_s=failure.retry_after_s,
            # "Too fast" is ours to mend, by going slower; it must not use up the line's attempts.
            spend=not (transient and failure.status == 429),
        )


async def _said(response: Any, events: Events) -> AsyncGenerator[bytes]:
    """The events of a response; raises ``ProviderUnavailable`` where there are none."""
    async for piece in response.iter_bytes():
        for event in events.feed(piece):
            yield event
    for event in events.finish():
        yield event
    if not events.passed:
        raise ProviderUnavailable(_NO_ANSWER)


async def _left(calling: asyncio.Future[Any], *, to_its_end: bool) -> Usage | None:
    """What a call used that nobody waits for any more: awaited, or given up."""
    if not to_its_end:
        calling.cancel()
    with anyio.CancelScope(shield=True):
        await asyncio.wait((calling,))
    if calling.cancelled() or calling.exception() is not None:
        return None
    return usage_of(calling.result().http_response.content)


def _so_far(endpoint: str, body: bytes, events: Events) -> Usage:
    """An estimate for a stream that ended before its usage was said: the prompt by its bytes, the
    answer by its pieces."""
    return Usage(input=estimates.of_body(body, endpoint)[1].input, output=events.pieces)


def _wants_usage(fields: Mapping[str, Any]) -> bool:
    options = fields.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))
