"""The llama.cpp replica: an engine process, seen from the server's event loop."""

from __future__ import annotations

import array
import asyncio
import itertools
import sys
from collections.abc import AsyncGenerator, Callable
from importlib.util import find_spec

from tidemill.backends.llama import messages as m
from tidemill.backends.llama import weights
from tidemill.backends.llama.supervisor import Supervisor
from tidemill.errors import (
    AtCapacity,
    EngineLost,
    EngineUnavailable,
    RequestRefused,
    SettingsError,
    TidemillError,
)
from tidemill.scheduler.steps import Gauges
from tidemill.types import (
    Embedded,
    Embedding,
    EngineSpec,
    Generation,
    ModelCard,
    Piece,
    ReplicaStatus,
)

MOST_IN_HAND = 16_384
"""Requests that one replica holds; more are told to come again."""


class Inbox(asyncio.Queue[m.Event | TidemillError]):
    """What the engine, or its death, has to say about one question."""


class LlamaReplica:
    """Implements ``tidemill.ports.Replica``."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._name = spec.name or weights.served_name(spec.model)
        self._card = ModelCard(id=self._name, chat=not spec.embedding, embeddings=True)
        self._supervisor: Supervisor | None = None
        self._keys = itertools.count(1)
        self._in_hand = 0
        self._inboxes: dict[int, Inbox] = {}
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
        if find_spec("llama_cpp") is None:
            raise SettingsError(
                "The llama engine needs llama-cpp-python: install it with pip install "
                "'tidemill[llama]'."
            )
        path = await asyncio.to_thread(weights.resolve, self._spec.model)
        load = m.Load(spec=self._spec, path=str(path), name=self._name)
        self._supervisor = Supervisor(load, on_report=self._route, on_death=self._lose)
        self._card = (await self._supervisor.start()).card

    async def close(self) -> None:
        """Stop at once; whoever waits gets ``EngineLost``."""
        if self._supervisor is not None:
            await self._supervisor.close()
        self._lose("the engine was stopped")

    async def generate(self, generation: Generation) -> AsyncGenerator[Piece, None]:
        """Pieces of one answer; see ``tidemill.ports.Replica``."""
        key, inbox = await self._ask(lambda key: m.Generate(key=key, generation=generation))
        over = False
        try:
            while not over:
                event = await inbox.get()
                over = not isinstance(event, m.Progress) or event.piece.finish is not None
                yield _progress(event)
        finally:
            self._leave(key, cancel=not over)

    async def embed(self, embedding: Embedding) -> Embedded:
        """Vectors for all inputs, in order, each of length one."""
        ready = self._supervisor.ready if self._supervisor is not None else None
        if ready is not None and embedding.dimensions not in (None, ready.embedding_size):
            raise RequestRefused(
                f"The model '{embedding.model}' makes vectors of {ready.embedding_size} "
                "dimensions only.",
                param="dimensions",
                code="unsupported_value",
            )
        event = await self._answer(
            lambda key: m.Embed(key=key, inputs=embedding.inputs, lane=embedding.lane)
        )
        assert isinstance(event, m.Vectors)
        return Embedded(vectors=tuple(_floats(v) for v in event.vectors), usage=event.usage)

    async def count(self, generation: Generation) -> int:
        """Prompt tokens of a request, template included."""
        event = await self._answer(lambda key: m.Count(key=key, generation=generation))
        assert isinstance(event, m.Counted)
        return event.tokens

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
            waiting=max(0, self._in_hand - g.active - g.parked),
            slots=ready.slots if ready is not None else 0,
            restarts=supervisor.restarts if supervisor is not None else 0,
            parked=g.parked,
            tokens_generated=before.tokens_generated + g.tokens_generated,
            tokens_prefilled=before.tokens_prefilled + g.tokens_prefilled,
            tokens_reused=before.tokens_reused + g.tokens_reused,
        )

    async def _answer(self, question: Callable[[int], m.Question]) -> m.Event | TidemillError:
        """Ask what has one answer."""
        key, inbox = await self._ask(question)
        over = False
        try:
            event = await inbox.get()
            over = True
        finally:
            self._leave(key, cancel=not over)
        _raise(event)
        return event

    async def _ask(self, question: Callable[[int], m.Question]) -> tuple[int, Inbox]:
        """Send a question once there is a process for it; returns where the answer comes."""
        if self._supervisor is None:
            raise EngineUnavailable("The engine was not started.")
        if self._in_hand >= MOST_IN_HAND:
            raise AtCapacity(
                f"The engine of '{self._name}' has {self._in_hand} requests in hand.",
                retry_after_s=5,
            )
        key, inbox = next(self._keys), Inbox()
        try:
            frame = m.frame(question(key))
        except (OverflowError, RecursionError, TypeError, ValueError) as exc:
            # Numbers beyond 64 bits, lone surrogates, a nesting without end.
            raise RequestRefused(f"The request cannot be passed on to the engine: {exc}.") from exc
        self._in_hand += 1
        try:
            await self._supervisor.available()
            # From here to the write nothing is awaited: a death in between would go unnoticed.
            self._inboxes[key] = inbox
            await self._supervisor.send(frame)
        except BaseException:
            self._leave(key, cancel=True)
            raise
        return key, inbox

    def _leave(self, key: int, *, cancel: bool) -> None:
        self._in_hand -= 1
        asked = self._inboxes.pop(key, None) is not None
        if asked and cancel and self._supervisor is not None:
            self._supervisor.tell(m.Cancel(key=key))

    def _route(self, report: m.Report) -> None:
        if not isinstance(report, m.Events):
            return
        self._gauges = report.gauges
        for event in report.events:
            finished = isinstance(event, m.Progress) and event.piece.finish is not None
            if self._supervisor is not None and (finished or isinstance(event, m.Vectors)):
                self._supervisor.deaths.clear()
            if event.key in self._inboxes:
                self._inboxes[event.key].put_nowait(event)

    def _lose(self, reason: str) -> None:
        """The process is gone: everybody who waits for it is told."""
        self._before = Gauges(
            tokens_generated=self._before.tokens_generated + self._gauges.tokens_generated,
            tokens_prefilled=self._before.tokens_prefilled + self._gauges.tokens_prefilled,
            tokens_reused=self._before.tokens_reused + self._gauges.tokens_reused,
        )
        self._gauges = Gauges()
        message = f"The engine of '{self._name}' was lost: {reason.rstrip('.')}."
        for inbox in self._inboxes.values():
            inbox.put_nowait(EngineLost(message))


def _progress(event: m.Event | TidemillError) -> Piece:
    _raise(event)
    assert isinstance(event, m.Progress)
    return event.piece


def _raise(event: m.Event | TidemillError) -> None:
    if isinstance(event, TidemillError):
        raise event
    if isinstance(event, m.Fault):
        raise m.error(event)


def _floats(data: bytes) -> tuple[float, ...]:
    vector = array.array("f", data)
    if sys.byteorder == "big":
        vector.byteswap()
    return tuple(vector)


def replica(spec: EngineSpec) -> LlamaReplica:
    """A replica for ``spec``: the entry point ``llama`` of ``tidemill.engines``."""
    return LlamaReplica(spec)
