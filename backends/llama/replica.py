"""The llama.cpp replica: an engine process, seen from the server's event loop."""

from __future__ import annotations

import array
import asyncio
import itertools
import sys
from collections.abc import AsyncIterator


from tidemill.backends.llama import messages as m
from tidemill.backends.llama import weights
from tidemill.backends.llama.supervisor import Supervisor
from tidemill.errors import AtCapacity, EngineLost, EngineUnavailable, RequestRefused, TidemillError
from tidemill.scheduler.loop import Gauges
from tidemill.types import (
    Embedded,
    Embedding,
    EngineSpec,
    Generation,
    Lane,
    ModelCard,
    Piece,
    ReplicaStatus,
)

MOST_IN_FLIGHT = 16_384
"""Requests that one replica holds; more are told to come again."""


class LlamaReplica:
    """Implements ``tidemill.ports.Replica``."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._name = spec.name or weights.served_name(spec.model)
        self._card = ModelCard(id=self._name, chat=not spec.embedding, embeddings=True)
        self._supervisor: Supervisor | None = None
        self._keys = itertools.count(1)
        self._inboxes: dict[int, asyncio.Queue[m.Event | TidemillError]] = {}
        self._gauges = Gauges()
        self._before = Gauges()
        """Totals of the processes that died."""

    @property
    def card(self) -> ModelCard:
        """What ``/v1/models`` shows; complete after ``start``."""
        return self._card

    @property
    def pid(self) -> int | None:
        """The engine process; None while there is none that serves."""
        return self._supervisor.pid if self._supervisor is not None else None

    async def start(self) -> None:
        """Find the weights and load them.

        Raises ``SettingsError`` when there is no such model and ``EngineUnavailable`` when it
        cannot be loaded, with one sentence each.
        """
        path = await asyncio.to_thread(weights.resolve, self._spec.model)
        load = m.Load(spec=self._spec, path=str(path), name=self._name)
        self._supervisor = Supervisor(load, on_report=self._route, on_death=self._lose)
        self._card = (await self._supervisor.start()).card

    async def close(self) -> None:
        """Stop at once; whoever waits gets ``EngineLost``."""
        if self._supervisor is not None:
            await self._supervisor.close()
        self._lose("the engine was stopped")

    async def generate(self, generation: Generation) -> AsyncIterator[Piece]:
        """Pieces of one answer; see ``tidemill.ports.Replica``."""
        key, inbox = self._enter()
        finished = False
        try:
            await self._ask(m.Generate(key=key, generation=generation))
            while not finished:
                event = await self._answer(inbox)
                assert isinstance(event, m.Progress)
                finished = event.piece.finish is not None
                yield event.piece
        except TidemillError:
            finished = True  # the engine knows
            raise
        finally:
            self._leave(key, cancel=not finished)

    async def embed(self, embedding: Embedding) -> Embedded:
        """Vectors for all inputs, in order, each of length one."""
        key, inbox = self._enter()
        try:
            size = self._ready().embedding_size
            if embedding.dimensions not in (None, size):
                raise RequestRefused(
                    f"The model '{embedding.model}' makes vectors of {size} dimensions only.",
                    param="dimensions",
                    code="unsupported_value",
                )
            await self._ask(
                m.Embed(
                    key=key,
                    inputs=embedding.inputs,
                    interactive=embedding.lane is Lane.INTERACTIVE,
                )
            )
            event = await self._answer(inbox)
            assert isinstance(event, m.Vectors)
        finally:
            self._leave(key, cancel=inbox.empty())
        return Embedded(vectors=tuple(_floats(v) for v in event.vectors), usage=event.usage)

    async def count(self, generation: Generation) -> int:
        """Prompt tokens of a request, template included."""
        key, inbox = self._enter()
        try:
            await self._ask(m.Count(key=key, generation=generation))
            event = await self._answer(inbox)
            assert isinstance(event, m.Counted)
            return event.tokens
        finally:
            self._leave(key, cancel=False)

    def status(self) -> ReplicaStatus:
        """Health and load, without waiting: the load is what the engine said after its last
        step."""
        supervisor = self._supervisor
        reason = "The engine was not started." if supervisor is None else supervisor.down
        ready = supervisor.ready if supervisor is not None else None
        g, before = self._gauges, self._before
        return ReplicaStatus(
            healthy=reason is None,
            reason=reason,
            active=g.active,
            waiting=max(0, len(self._inboxes) - g.active - g.parked),
            slots=ready.slots if ready is not None else 0,
            restarts=supervisor.restarts if supervisor is not None else 0,
            parked=g.parked,
            tokens_generated=before.tokens_generated + g.tokens_generated,
            tokens_prefilled=before.tokens_prefilled + g.tokens_prefilled,
        )

    def _enter(self) -> tuple[int, asyncio.Queue[m.Event | TidemillError]]:
        if len(self._inboxes) >= MOST_IN_FLIGHT:
            raise AtCapacity(
                f"The engine of '{self._name}' has {len(self._inboxes)} requests in hand.",
                retry_after_s=5,
            )
        key = next(self._keys)
        inbox: asyncio.Queue[m.Event | TidemillError] = asyncio.Queue()
        self._inboxes[key] = inbox
        return key, inbox

    def _leave(self, key: int, *, cancel: bool) -> None:
        self._inboxes.pop(key, None)
        if cancel and self._supervisor is not None:
            self._supervisor.tell(m.Cancel(key=key))

    async def _ask(self, question: m.Question) -> None:
        if self._supervisor is None:
            raise EngineUnavailable("The engine was not started.")
        try:
            await self._supervisor.send(question)
        except (OverflowError, RecursionError, TypeError, ValueError) as exc:
            # Numbers beyond 64 bits, lone surrogates, a nesting without end.
            raise RequestRefused(f"The request cannot be passed on to the engine: {exc}.") from exc

    async def _answer(self, inbox: asyncio.Queue[m.Event | TidemillError]) -> m.Event:
        event = await inbox.get()
        if isinstance(event, TidemillError):
            raise event
        if isinstance(event, m.Fault):
            raise m.error(event)
        return event

    def _ready(self) -> m.Ready:
        ready = self._supervisor.ready if self._supervisor is not None else None
        if ready is None:
            raise EngineUnavailable("The engine was not started.")
        return ready

    def _route(self, report: m.Report) -> None:
        if not isinstance(report, m.Events):
            return
        self._gauges = report.gauges
        for event in report.events:
            if isinstance(event, m.Progress) and event.piece.finish is None:
                pass
            elif self._supervisor is not None:
                self._supervisor.deaths.clear()
            if event.key in self._inboxes:
                self._inboxes[event.key].put_nowait(event)

    def _lose(self, reason: str) -> None:
        """The process is gone: everybody who waits for it is told."""
        self._before = Gauges(
            tokens_generated=self._before.tokens_generated + self._gauges.tokens_generated,
            tokens_prefilled=self._before.tokens_prefilled + self._gauges.tokens_prefilled,
        )
        self._gauges = Gauges()
        lost = EngineLost(f"The engine of '{self._name}' was lost: {reason.rstrip('.')}.")
        for inbox in self._inboxes.values():
            inbox.put_nowait(lost)


def _floats(data: bytes) -> tuple[float, ...]:
    vector = array.array("f", data)
    if sys.byteorder == "big":
        vector.byteswap()
    return tuple(vector)


def replica(spec: EngineSpec) -> LlamaReplica:
    """A replica for ``spec``: the entry point ``llama`` of ``tidemill.engines``."""
    return LlamaReplica(spec)


