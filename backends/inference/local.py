"""``LocalInference``: one OpenAI-shaped request on this server's replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import anyio
import msgspec

from tidemill import wire
from tidemill.backends.inference import chat, completions, embeddings, responses, responses_stream
from tidemill.backends.inference.decoding import decode, missing
from tidemill.backends.inference.duplicates import Duplicates
from tidemill.backends.inference.pieces import close, merged, unfinished, wholes
from tidemill.backends.inference.plan import NO_PARAMS, Ask
from tidemill.backends.inference.shapes import event
from tidemill.errors import (
    BadRequest,
    ModelNotFound,
    NotFound,
    RequestRefused,
    TidemillError,
    refusal,
)
from tidemill.ports import Replica
from tidemill.settings import Settings
from tidemill.types import (
    Answer,
    BatchParams,
    Generation,
    Lane,
    ModelCard,
    Outcome,
    Piece,
    Refusal,
    ReplicaStatus,
    Usage,
    Waiting,
)

EMBEDDINGS = "/v1/embeddings"
_HERE = "local"
_REFUSED_AT_ONCE = 64

_COMPLETING: dict[str, Any] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/responses": responses,
}
"""Per endpoint the module with ``body_decoder, plan, answer, cost``."""

_STREAMING: dict[str, Any] = {**_COMPLETING, "/v1/responses": responses_stream}
"""Per endpoint the module with ``stream``."""

Booked = Callable[[str, Usage], None]
"""Told model and usage once: before the events that end a stream, or when it breaks off."""

_FIELDS: dict[str, dict[str, str]] = {
    "/v1/responses": {"messages": "input", "response_format": "text.format"},
}
"""Engines name the fields of chat and completions; per endpoint, what the client calls them."""

_STREAMED_LINE = Refusal(
    status_code=400,
    code="streaming_unsupported",
    message="A batch line cannot stream; remove 'stream' or set it to false.",
    param="body.stream",
)


class LocalInference:
    """The ``Inference`` of this server.

    ``replicas`` are engines under any keys: each serves the name on its card. A chat engine and an
    embeddings engine may share a name. ``waits`` is told the keys of those that lines wait for.
    """

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        settings: Settings | None = None,
        waits: Callable[[Mapping[str, Waiting]], None] = lambda lines: None,
    ) -> None:
        self._replicas, self._waits = replicas, waits
        # One name may have two engines: the one that cannot chat is there for the vectors.
        cards = {key: replica.card for key, replica in replicas.items()}
        chatting = sorted(cards, key=lambda key: cards[key].chat)
        self._completing = {cards[key].id: key for key in chatting}
        self._embedding = {
            cards[key].id: key for key in reversed(chatting) if cards[key].embeddings
        }
        self._limit = settings.max_decoding_length if settings is not None else 0
        self.duplicates = (
            Duplicates() if settings is None or settings.answer_duplicates_once else None
        )
        # What holds where a batch says nothing.
        self._params = (
            BatchParams(deterministic=True)
            if settings is not None and settings.deterministic
            else NO_PARAMS
        )

    def cards(self) -> Sequence[ModelCard]:
        """Models served here, in configured order; one card per name."""
        cards: dict[str, ModelCard] = {}
        for replica in self._replicas.values():
            name = replica.card.id
            completing = self._replicas[self._completing[name]]
            cards[name] = msgspec.structs.replace(
                completing.card, embeddings=name in self._embedding
            )
        return tuple(cards.values())

    def knows(self, model: str) -> bool:
        """True when a request for this model can run here."""
        return model in self._completing

    def where(self, model: str) -> str:
        """Here."""
        return _HERE

    async def count(self, endpoint: str, body: bytes) -> int | None:
        """Prompt tokens of a request; None for what cannot run, or not now."""
        embed = endpoint == EMBEDDINGS
        try:
            kind = embeddings if embed else _kind(endpoint)
            request = decode(kind.body_decoder, body)
            replica, ask = self._ask(request.model, None, Lane.BATCH, "", None, embed=embed)
            if embed:
                return await replica.count(embeddings.plan(request, ask))
            prompts = kind.plan(request, ask)[:: _choices(request)]
            return sum([await replica.count(prompt) for prompt in prompts])
        except (TidemillError, RecursionError):
            return None

    @property
    def capacities(self) -> Mapping[str, int]:
        """Lines that keep each engine busy: those that run and as many next in line; and how many
        may be refused at once, because no engine serves their model. Lines that wait for the answer
        of an equal one keep nobody busy."""
        return {_HERE: _REFUSED_AT_ONCE} | {
            f"{_HERE}/{key}": _room(replica.status(), self._waiting(replica))
            for key, replica in self._replicas.items()
        }

    def _waiting(self, replica: Replica) -> int:
        return 0 if self.duplicates is None else self.duplicates.waiting[replica]

    def place(self, model: str, endpoint: str) -> str:
        """The engine that answers a line."""
        key = (self._embedding if endpoint == EMBEDDINGS else self._completing).get(model)
        return _HERE if key is None else f"{_HERE}/{key}"

    def waits(self, lines: Mapping[str, Waiting]) -> None:
        """Pass on for which engines lines wait."""
        places = {f"{_HERE}/{key}": key for key in self._replicas}
        self._waits({places[at]: some for at, some in lines.items() if at in places})

    async def answer(
        self,
        endpoint: str,
        body: bytes,
        *,
        lane: Lane,
        owner: str,
        defaults: Any = None,
        model: str | None = None,
        booked: Booked | None = None,
        batch: str | None = None,
    ) -> Outcome:
        """Run one request to its end; failures are a ``Refusal``.

        ``model`` wins over the body's. ``stream: true`` is refused: see ``stream``. With ``booked``
        the engine tells as it goes, so that a request that is cancelled is told by its tokens.
        ``batch``: of its lines that ask for the same, one is computed; they are likely to be alike.
        """
        try:
            if endpoint == EMBEDDINGS:
                return await self._embed(body, lane, owner, model, booked)
            kind = _kind(endpoint)
            request = decode(kind.body_decoder, body)
            if request.stream:
                return _STREAMED_LINE
            replica, ask = self._ask(
                request.model,
                model,
                lane,
                owner,
                defaults,
                stream=booked is not None,
                batch=batch or "",
            )
            generations = kind.plan(request, ask)
            parts: list[list[Piece]] = [[] for _ in generations]
            try:
                if batch is None or self.duplicates is None:
                    pieces = await wholes(replica, generations, parts)
                else:
                    pieces = await self.duplicates.wholes(batch, replica, generations, parts)
            except TidemillError as error:
                raise _as_asked(endpoint, error) from error.__cause__
            except asyncio.CancelledError:
                if booked is not None and any(parts):
                    with anyio.CancelScope(shield=True):
                        ended = {i: its[-1] for i, its in enumerate(parts) if _has_ended(its)}
                        seen = [len(its) for its in parts]
                        cost = await _cost(replica, generations, seen, kind, request, ended)
                        booked(ask.model, cost)
                raise
            raw, usage = kind.answer(request, ask, pieces)
        except TidemillError as error:
            return refusal(error)
        except RecursionError:
            return refusal(_too_deep())
        return Answer(body=raw, usage=usage, model=ask.model)

    async def _embed(
        self, body: bytes, lane: Lane, owner: str, model: str | None, booked: Booked | None
    ) -> Outcome:
        request = decode(embeddings.body_decoder, body)
        replica, ask = self._ask(request.model, model, lane, owner, None, embed=True)
        computed = [0]
        try:
            embedded = await replica.embed(embeddings.plan(request, ask), computed.append)
        except asyncio.CancelledError:
            if booked is not None and computed[-1]:
                booked(ask.model, Usage(input=computed[-1]))
            raise
        raw, usage = embeddings.answer(request, ask, embedded)
        return Answer(body=raw, usage=usage, model=ask.model)

    async def stream(
        self,
        endpoint: str,
        body: bytes,
        *,
        owner: str,
        lane: Lane = Lane.INTERACTIVE,
        model: str | None = None,
        booked: Booked | None = None,
    ) -> AsyncIterator[bytes]:
        """Server-sent events for a request with ``stream: true``.

        Raises ``TidemillError`` before the first event; a later failure is an event of its own.
        Closing the iterator frees the engine's slots.
        """
        kind = _kind(endpoint)
        request = decode(kind.body_decoder, body)
        replica, ask = self._ask(request.model, model, lane, owner, None, stream=True)
        try:
            generations = kind.plan(request, ask)
        except RecursionError as exc:
            raise _too_deep() from exc
        ended: dict[int, Piece] = {}
        seen = [0] * len(generations)
        pieces = merged(replica, generations)
        events = _STREAMING[endpoint].stream(request, ask, _counted(pieces, seen, endpoint), ended)
        begun = told = False
        try:
            async for one in events:
                begun = True
                if booked is not None and not told and len(ended) == len(generations):
                    told = True
                    booked(ask.model, kind.cost(request, ended))
                yield one
        except TidemillError as error:
            if not begun:
                raise
            yield event(wire.error_object(error))
        finally:
            # Whoever hangs up cancels this, too; it is booked all the same.
            with anyio.CancelScope(shield=True):
                await close(events)
                await close(pieces)
                if begun and booked is not None and not told:
                    cost = await _cost(replica, generations, seen, kind, request, ended)
                    booked(ask.model, cost)

    def _ask(
        self,
        named: str | None,
        forced: str | None,
        lane: Lane,
        owner: str,
        defaults: BatchParams | None,
        *,
        stream: bool = False,
        batch: str = "",
        embed: bool = False,
    ) -> tuple[Replica, Ask]:
        name = forced or named
        if not name:
            raise missing("model")
        key = (self._embedding if embed else self._completing).get(name)
        if key is None:
            if not self.knows(name):
                raise ModelNotFound(
                    f"The model '{name}' does not exist or is not served here.", param="model"
                )
            raise RequestRefused(
                f"The model '{name}' does not make embeddings.",
                param="model",
                code="unsupported_model",
            )
        params = self._params if defaults is None else defaults
        if params.deterministic is None and self._params.deterministic:
            params = msgspec.structs.replace(params, deterministic=True)
        replica = self._replicas[key]
        return replica, Ask(name, replica.card, lane, owner, params, self._limit, stream, batch)


def _room(status: ReplicaStatus, waiting: int) -> int:
    """``waiting`` lines come on top, up to three times as many as would run: each holds memory."""
    takes = status.state == "loaded" and status.takes_lines
    busy = max(1, 2 * status.slots)
    return busy + min(waiting, 3 * busy) if takes else 0


def _kind(endpoint: str) -> Any:
    kind = _COMPLETING.get(endpoint)
    if kind is None:
        if endpoint == EMBEDDINGS:
            raise BadRequest("Embeddings are not streamed.", param="stream")
        raise NotFound(f"Nothing answers at '{endpoint}'.")
    return kind


def _too_deep() -> RequestRefused:
    return RequestRefused("The body is nested too deeply.", code="invalid_json")


def _as_asked(endpoint: str, error: TidemillError) -> TidemillError:
    """The engine's error, with the field under the name that the client gave it."""
    if error.param is not None:
        error.param = _FIELDS.get(endpoint, {}).get(error.param, error.param)
    return error


async def _counted(
    pieces: AsyncIterator[tuple[int, Piece]], seen: list[int], endpoint: str
) -> AsyncIterator[tuple[int, Piece]]:
    """Count pieces per choice. Raises ``EngineLost`` when they stop before every choice ended."""
    left = len(seen)
    try:
        async for index, piece in pieces:
            seen[index] += 1
            left -= piece.finish is not None
            yield index, piece
    except TidemillError as error:
        raise _as_asked(endpoint, error) from error.__cause__
    if left:
        raise unfinished()


def _has_ended(parts: Sequence[Piece]) -> bool:
    return bool(parts) and parts[-1].finish is not None


async def _cost(
    replica: Replica,
    generations: Sequence[Generation],
    seen: Sequence[int],
    kind: Any,
    request: Any,
    ended: dict[int, Piece],
) -> Usage:
    """Usage of a request. Where its reader left early, an answer's tokens are its pieces, and each
    prompt that has begun to be answered is counted anew."""
    if len(ended) == len(generations):
        usage: Usage = kind.cost(request, ended)
        return usage
    open_ones = [index for index in range(len(generations)) if index not in ended]
    answered = sum(seen[index] for index in open_ones)
    known = [piece.usage for piece in ended.values() if piece.usage is not None]
    n = _choices(request)
    begun = {index - index % n for index in range(len(seen)) if seen[index]} or {0}
    try:
        prompts = sum([await replica.count(generations[index]) for index in begun])
    except TidemillError:
        # The engine is gone, and with it what the prompts had cost.
        prompts = 0
    return Usage(input=prompts, output=answered + sum(u.output for u in known))


def _choices(request: Any) -> int:
    """Answers to each prompt of a request; a response has one."""
    return getattr(request, "n", None) or 1
