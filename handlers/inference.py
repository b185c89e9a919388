"""``/v1/chat/completions``, ``/v1/completions``, ``/v1/embeddings`` and ``/v1/responses``."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from typing import Any, TypeVar

import anyio
import msgspec
from litestar import Request, Response, post
from litestar.response.base import ASGIResponse
from litestar.response.streaming import ASGIStreamingResponse
from litestar.types import Receive, Scope, Send

from tidemill import access, clock, wire
from tidemill.access import INFERENCE
from tidemill.errors import ProviderNotPermitted
from tidemill.handlers import allowance
from tidemill.handlers.deps import Services, body, principal, services
from tidemill.handlers.files import provider_asked
from tidemill.types import Answer, Outcome, Principal, Usage, UsageRow

T = TypeVar("T")
JSON = "application/json"


class _Peek(msgspec.Struct):
    stream: bool | None = None


_peek = msgspec.json.Decoder(_Peek)


@post("/chat/completions", status_code=200, opt={"scope": INFERENCE})
async def chat_completions(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Answer a conversation."""
    return await serve("/v1/chat/completions", request)


@post("/completions", status_code=200, opt={"scope": INFERENCE})
async def completions(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Continue a text."""
    return await serve("/v1/completions", request)


@post("/embeddings", status_code=200, opt={"scope": INFERENCE})
async def embeddings(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Turn texts into vectors."""
    return await serve("/v1/embeddings", request)


@post("/responses", status_code=200, opt={"scope": INFERENCE})
async def responses(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Answer a conversation in the shape of the Responses API."""
    return await serve("/v1/responses", request)


ROUTES = (chat_completions, completions, embeddings, responses)


async def serve(
    endpoint: str, request: Request[Any, Any, Any], *, model: str | None = None
) -> Response[bytes]:
    """Authenticate, read the body within ``max_body_bytes``, run.

    ``endpoint`` is canonical; ``model`` (a deployment in the URL) wins over the body's. Raises
    ``TidemillError`` for a missing key and a body that is too large.
    """
    await principal(request)
    raw = await body(request, services(request).settings.max_body_bytes)
    return await run(endpoint, raw, request, model=model)


async def run(
    endpoint: str,
    raw: bytes,
    request: Request[Any, Any, Any],
    *,
    model: str | None = None,
) -> Response[bytes]:
    """Run the body ``raw`` for whoever asks, streamed or not, and book what it cost.

    Where the request names a provider, nobody else is asked. A client that hangs up frees the
    engine's slot. Raises ``TidemillError`` when a stream fails
    before its first event; a failure without a stream is answered here.
    """
    who = await principal(request)
    given = _asked_of(services(request), who, provider_asked(request))
    lane = await allowance.interactive(given, who, endpoint, raw, model)
    purchase = allowance.Purchase(given, who, endpoint, raw, model)
    while not await purchase.begin():
        if not await _until_gone(request, _true_after(purchase.freed())):
            return _gone()
    bill = _Bill(given, who, purchase)
    streamed: Response[bytes] | None = None
    try:
        if not _streams(raw):
            outcome: Outcome | None = await _until_gone(
                request,
                given.inference.answer(
                    endpoint, raw, lane=lane, owner=who.owner, model=model, booked=bill.note
                ),
            )
            if isinstance(outcome, Answer):
                bill.note(outcome.model, outcome.usage)
            return _gone() if outcome is None else _answered(outcome)
        events = given.inference.stream(
            endpoint, raw, lane=lane, owner=who.owner, model=model, booked=bill.note
        )
        first: bytes | None = None
        try:
            first = await _until_gone(request, anext(events))
        finally:
            if first is None:
                await _close(events)
        if first is None:
            return _gone()
        streamed = EventStream(_from_first(first, events, bill), bill)
        return streamed
    finally:
        if streamed is None:  # else it is settled when the stream ends
            with anyio.CancelScope(shield=True):
                await bill.settle()


def _asked_of(given: Services, who: Principal, provider: str | None) -> Services:
    """The services as they are for a request that names its provider."""
    if provider is None:
        return given
    routes = None if given.providers is None else given.providers.ordinary(provider)
    if routes is None or not access.uses(who.limits, provider):
        raise ProviderNotPermitted(provider)
    return msgspec.structs.replace(given, inference=routes)


def _answered(outcome: Outcome) -> Response[bytes]:
    if isinstance(outcome, Answer):
        return Response(outcome.body, media_type=JSON)
    after = outcome.retry_after_s
    return Response(
        outcome.body or wire.encode(wire.refusal_body(outcome)),
        media_type=JSON,
        # A line that never ran has no status; here somebody waits for one.
        status_code=outcome.status_code or 400,
        headers={} if after is None else {"retry-after": str(min(60, max(1, math.ceil(after))))},
    )


def _streams(raw: bytes) -> bool:
    """What the body says about streaming; a broken body is told apart by whoever runs it."""
    try:
        return bool(_peek.decode(raw).stream)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


async def _until_gone(request: Request[Any, Any, Any], work: Awaitable[T]) -> T | None:
    """What the work gives, or None when the client hung up first; the work is then cancelled."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            continue

    working = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(hung_up())
    try:
        await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        listening.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)
    return None if working.cancelled() else working.result()


async def _true_after(work: Awaitable[None]) -> bool:
    await work
    return True


def _gone() -> Response[bytes]:
    """Nobody reads this; the status is for the log."""
    return Response(b"", status_code=499)


async def _close(events: AsyncIterator[bytes]) -> None:
    aclose = getattr(events, "aclose", None)
    if aclose is not None:
        await aclose()


class _Bill:
    """What one interactive request cost, booked once."""

    def __init__(self, given: Services, who: Principal, purchase: allowance.Purchase) -> None:
        self._given = given
        self._who = who
        self._purchase = purchase
        self._row: UsageRow | None = None

    @property
    def due(self) -> bool:
        """What was used is known and not booked."""
        return self._row is not None

    def note(self, model: str, usage: Usage) -> None:
        """Take down model and usage."""
        self._row = UsageRow(
            owner=self._who.owner,
            key_id=self._who.key_id,
            model=model,
            execution=self._given.inference.where(model),
            tier="standard",
            usage=usage,
            batch_id=None,
            custom_id=None,
            at=clock.now(),
        )

    async def settle(self) -> None:
        """Book it, if anything was used, and give back what was reserved for it."""
        row, self._row = self._row, None
        if row is not None and row.usage == Usage():
            row = None
        if row is not None:
            allowance.answered(self._given, self._who, row.usage.input + row.usage.output)
        await self._purchase.settle(row)


async def _from_first(
    first: bytes, events: AsyncIterator[bytes], bill: _Bill
) -> AsyncGenerator[bytes, None]:
    """A stream whose first event was awaited already; closing it closes the rest.

    Its end is shown once it is booked, as an answer that is not streamed: a reader of the whole
    finds it in the ledger, also when the server dies right then.
    """
    try:
        event: bytes | None = first
        while event is not None:
            if bill.due:
                with anyio.CancelScope(shield=True):
                    await bill.settle()
            yield event
            event = await anext(events, None)
    finally:
        await _close(events)


class EventStream(Response[bytes]):
    """Server-sent events; when they end, however they end, the engine is let go and booked."""

    def __init__(self, events: AsyncGenerator[bytes, None], bill: _Bill) -> None:
        super().__init__(b"", status_code=200, media_type="text/event-stream")
        self._events = events
        self._bill = bill

    def to_asgi_response(self, app: Any, request: Any, **options: Any) -> ASGIResponse:
        """Litestar's hook: the response that is sent."""
        given = options.get("headers") or {}
        return _Events(
            events=self._events,
            bill=self._bill,
            headers={
                **given,
                **self.headers,
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
            },
        )


class _Events(ASGIStreamingResponse):
    def __init__(
        self,
        *,
        events: AsyncGenerator[bytes, None],
        bill: _Bill,
        headers: dict[str, Any],
    ) -> None:
        super().__init__(
            iterator=events,
            headers=headers,
            media_type="text/event-stream",
            status_code=200,
        )
        self._events = events
        self._bill = bill

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send, and let go: a reader that left would otherwise leave the generator suspended."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            with anyio.CancelScope(shield=True):
                await self._events.aclose()
                await self._bill.settle()
