"""The llama.cpp replica: an engine process, seen from the server's event loop."""

from __future__ import annotations

import array
import asyncio
import itertools
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from importlib.util import find_spec
from typing import NamedTuple

import msgspec

from tidemill.backends.llama import messages as m
from tidemill.backends.llama import weights
from tidemill.backends.llama.footprint import footprint
from tidemill.backends.llama.supervisor import Supervisor
from tidemill.errors import (
    AtCapacity,
    EngineCrash,
    EngineDown,
    EngineLost,
    RequestRefused,
    SettingsError,
)
from tidemill.scheduler.steps import TOTALS, Gauges
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
STRIKES = 3
"""Deaths of an engine while it was at work on one request that make that request the reason."""


class Lost(NamedTuple):
    """The engine process died before a question was answered."""

    message: str
    suspect: bool
    """It was at work on this question."""


class Inbox(asyncio.Queue[m.Event | Lost]):
    """What the engine, or its death, has to say about one question."""

    def __init__(self, strikes: int) -> None:
        super().__init__()
        self.strikes = strikes
        """Engines that died at work on this."""


class LlamaReplica:
    """Implements ``tidemill.ports.Replica``."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._name = spec.name or weights.served_name(spec.model)
        self._card = ModelCard(id=self._name, chat=not spec.embedding, embeddings=True)
        self._supervisor: Supervisor | None = None
        self._keys = itertools.count(1)
        self._in_hand = 0
        self._closing = False
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

    async def examine(self) -> int:
        """Find the files and read their headers; the bytes that the model will take."""
        _require_llama()
        path = await asyncio.to_thread(weights.resolve, self._spec.model)
        found = await asyncio.to_thread(footprint, self._spec, path)
        self._card = msgspec.structs.replace(
            self._card,
            context_length=found.context,
            chat=not self._spec.embedding and found.template is not None,
            tools=not self._spec.embedding and found.template is not None and found.template.tools,
        )
        return found.memory_bytes

    async def start(self) -> None:
        """Find the weights and load them.

        Raises ``SettingsError`` when there is no such model and ``EngineUnavailable`` when it
        cannot be loaded, with one sentence each.
        """
        _require_llama()
        path = await asyncio.to_thread(weights.resolve, self._spec.model)
        load = m.Load(spec=self._spec, path=str(path), name=self._name)
        self._supervisor = Supervisor(load, on_report=self._route, on_death=self._lose)
        self._card = (await self._supervisor.start()).card

    async def close(self) -> None:
        """Stop at once; whoever waits gets ``EngineLost``."""
        self._closing = True
        if self._supervisor is not None:
            await self._supervisor.close()
        self._lose("the engine was stopped", frozenset())

    async def generate(self, generation: Generation) -> AsyncGenerator[Piece, None]:
        """Pieces of one answer; see ``tidemill.ports.Replica``."""
        asked = self._events(
            lambda key, alone: m.Generate(key=key, generation=generation, alone=alone)
        )
        async with aclosing(asked) as events:
            async for event in events:
                assert isinstance(event, m.Progress)
                yield event.piece

    async def embed(
        self, embedding: Embedding, told: Callable[[int], None] = lambda tokens: None
    ) -> Embedded:
        """Vectors for all inputs, in order, each of length one."""
        ready = self._supervisor.ready if self._supervisor is not None else None
        if ready is not None and embedding.dimensions not in (None, ready.embedding_size):
            raise RequestRefused(
                f"The model '{embedding.model}' makes vectors of {ready.embedding_size} "
                "dimensions only.",
                param="dimensions",
                code="unsupported_value",
            )
        asked = self._events(
            lambda key, alone: m.Embed(key=key, inputs=embedding.inputs, lane=embedding.lane)
        )
        async with aclosing(asked) as events:
            while isinstance(event := await anext(events), m.Computed):
                told(event.tokens)
        assert isinstance(event, m.Vectors)
        return Embedded(vectors=tuple(_floats(v) for v in event.vectors), usage=event.usage)

    async def count(self, asked: Generation | Embedding) -> int:
        """Prompt tokens of a request, template included; of all inputs of an embedding."""

        def question(key: int, alone: bool) -> m.Question:
            if isinstance(asked, Embedding):
                return m.Count(key=key, inputs=asked.inputs)
            return m.Count(key=key, generation=asked)

        async with aclosing(self._events(question)) as events:
            event = await anext(events)
        assert isinstance(event, m.Counted)
        return event.tokens

    def status(self) -> ReplicaStatus:
        """Health and load, without waiting: the load is what the engine said after its last
        step."""
        supervisor = self._supervisor
        reason = "The engine was not started." if supervisor is None else supervisor.down
        ready = supervisor.ready if supervisor is not None else None
        g = self._gauges
        total = _sum(self._before, g)
        return ReplicaStatus(
            healthy=reason is None,
            reason=reason,
            active=g.active,
            waiting=max(0, self._in_hand - g.active - g.parked),
            slots=ready.slots if ready is not None else 0,
            restarts=supervisor.restarts if supervisor is not None else 0,
            parked=g.parked,
            held=g.held,
            arena=g.arena,
            **{name: getattr(total, name) for name in TOTALS},
        )

    async def _events(
        self, question: Callable[[int, bool], m.Question]
    ) -> AsyncGenerator[m.Event, None]:
        """Everything that is answered to ``question(key, alone)``.

        When the process dies before it said anything, the question goes to the next one, and costs
        nobody anything. A process that died at work on it may have died of it: from then on it is
        asked alone, so that the next death has one suspect. Three times is no coincidence.
        """
        strikes = 0
        while True:
            key, inbox = await self._ask(question, strikes)
            over = begun = False
            lost: Lost | None = None
            try:
                while not over:
                    event = await inbox.get()
                    if isinstance(event, Lost):
                        lost, over = event, True
                    elif isinstance(event, m.Fault):
                        over = True
                        raise m.error(event)
                    else:
                        # Only what somebody has read cannot be said again by another process.
                        begun = begun or not isinstance(event, m.Computed)
                        over = _is_last(event)
                        yield event
            finally:
                self._leave(key, cancel=not over)
            if lost is None:
                return
            strikes += lost.suspect
            if strikes >= STRIKES:
                raise EngineCrash(
                    f"The engine of '{self._name}' died {strikes} times while it worked on this "
                    f"request, and it will not be tried again. {lost.message}"
                )
            if begun or self._closing:
                raise EngineLost(lost.message)

    async def _ask(
        self, question: Callable[[int, bool], m.Question], strikes: int
    ) -> tuple[int, Inbox]:
        """Send a question once there is a process for it; returns where the answer comes."""
        if self._supervisor is None:
            raise EngineDown("The engine was not started.")
        if self._in_hand >= MOST_IN_HAND:
            raise AtCapacity(
                f"The engine of '{self._name}' has {self._in_hand} requests in hand.",
                retry_after_s=5,
            )
        key, inbox = next(self._keys), Inbox(strikes)
        try:
            frame = m.frame(question(key, strikes > 0))
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

    def _lose(self, reason: str, suspects: frozenset[int]) -> bool:
        """The process is gone: everybody who waits for it is told. True when it was at work on
        nothing but what an earlier one died of too."""
        self._before = _sum(self._before, self._gauges)
        self._gauges = Gauges()
        message = f"The engine of '{self._name}' was lost: {reason.rstrip('.')}."
        inboxes, self._inboxes = self._inboxes, {}
        for key, inbox in inboxes.items():
            inbox.put_nowait(Lost(message, key in suspects))
        at_work = [inboxes[key].strikes for key in suspects if key in inboxes]
        return bool(at_work) and all(at_work)


def _require_llama() -> None:
    if find_spec("llama_cpp") is None:
        raise SettingsError(
            "The llama engine needs llama-cpp-python: install it with pip install "
            "'tidemill[llama]'."
        )


def _sum(a: Gauges, b: Gauges) -> Gauges:
    """The totals of two processes; no load."""
    return Gauges(**{name: getattr(a, name) + getattr(b, name) for name in TOTALS})


def _is_last(event: m.Event) -> bool:
    if isinstance(event, m.Progress):
        return event.piece.finish is not None
    return not isinstance(event, m.Computed)


def _floats(data: bytes) -> tuple[float, ...]:
    vector = array.array("f", data)
    if sys.byteorder == "big":
        vector.byteswap()
    return tuple(vector)


def replica(spec: EngineSpec) -> LlamaReplica:
    """A replica for ``spec``: the entry point ``llama`` of ``tidemill.engines``."""
    return LlamaReplica(spec)
