"""One model of this server, in memory or not: a ``Replica`` that is loaded when somebody asks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec

from tidemill.backends.inference.pieces import close
from tidemill.errors import EngineDown, ModelNotLoaded, SettingsError, TidemillError
from tidemill.models import Wanted
from tidemill.ports import Clock, Replica
from tidemill.scheduler.residency import Resident
from tidemill.scheduler.retry import backoff_s
from tidemill.scheduler.steps import TOTALS
from tidemill.types import (
    Embedded,
    Embedding,
    EngineSpec,
    Generation,
    Lane,
    ModelCard,
    ModelState,
    Piece,
    ReplicaStatus,
    Waiting,
)

_COME_AGAIN_S = 30
_KEPT_LOADS = 5
_KEPT_S = 60.0
"""After a person used it, a model stays for so many times as long as loading it took, or for so
long, whichever is less: a chat beside a batch for another model must not cost two loads a word."""
_TOTALS = ("restarts", *TOTALS)
"""What only grows, and goes on over unloading."""


class _Waiter:
    """An interactive request that waits for its model."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.over = anyio.Event()
        self.granted = False
        self.error: TidemillError | None = None


class Member:
    """Implements ``ports.Replica``. ``stir`` is called whenever something changed that may let a
    model be loaded or unloaded; what is done about it is ``Fleet``'s."""

    def __init__(
        self,
        wanted: Wanted,
        make: Callable[[EngineSpec], Replica],
        *,
        stir: Callable[[], None],
        patience_s: float,
        now: Clock,
    ) -> None:
        self.preload, self.embedding = wanted.preload, wanted.spec.embedding
        self._entry = wanted.entry
        self.size = 0
        """Bytes; known after ``examine``."""
        self.state: ModelState = "unloaded"
        self.held = False
        """True while it starts no batch line, for the sake of another model."""
        self._spec, self._make, self._stir = wanted.spec, make, stir
        self._patience_s, self._now = patience_s, now
        self.engine = make(wanted.spec)
        """What answers while it is loaded; another one after each unloading."""
        self._card = self.engine.card
        self._before = ReplicaStatus(healthy=True)
        """Totals of the engines that were unloaded."""
        self._busy = 0
        self._waiters: list[_Waiter] = []
        self._used_at = self._kept_until = self._turn_at = self._not_before = 0.0
        self._load_s = 0.0
        self._lines_at: float | None = None
        self._lines: Waiting | None = None
        self._failures = 0
        self._trouble: str | None = None

    @property
    def name(self) -> str:
        """What it is served under."""
        return self._card.id

    @property
    def card(self) -> ModelCard:
        """What ``/v1/models`` shows; known before it is loaded."""
        return msgspec.structs.replace(self._card, state=self.state)

    def resident(self, key: str) -> Resident:
        """As the decision sees it."""
        return Resident(
            key=key,
            size=self.size,
            state=self.state,
            busy=self._busy,
            used_at=self._used_at,
            kept_until=self._kept_until,
            turn_at=self._turn_at,
            asked_at=min((waiter.since for waiter in self._waiters), default=None),
            lines_at=self._lines_at,
            deadline=float("inf") if self._lines is None else self._lines.deadline,
            lifted=self._lines is not None and self._lines.lifted,
            not_before=self._not_before,
        )

    def lines_wait(self, lines: Waiting | None) -> bool:
        """These batch lines wait for it; None: none does. True when that is news."""
        if lines is None:
            self._lines_at = None
        elif self._lines_at is None:
            self._lines_at = self._now()
            if self.state == "loaded" and not (self.held or self._busy):
                self._turn_at = self._lines_at
        news, self._lines = lines != self._lines, lines
        return news

    # --- in and out of memory

    async def examine(self) -> int:
        """Find its files and say what it takes, once. Raises ``SettingsError`` that names the entry
        of the settings."""
        try:
            self.size = await self.engine.examine()
        except SettingsError as exc:
            if not self._entry:
                raise
            raise SettingsError(f"Bad value for setting 'models', {self._entry}: {exc}") from exc
        self._card = self.engine.card
        return self.size

    async def start(self) -> None:
        """Load it. Whoever waits for it is at work when this returns, or has the error when this
        raises; then it is not tried again for a while."""
        self.state, began_at = "loading", self._now()
        try:
            await self.engine.start()
        except BaseException as exc:
            await self.engine.close()
            self.engine = self._make(self._spec)
            self.state = "unloaded"
            if isinstance(exc, Exception):
                self._refuse(exc)
            raise
        self._card = self.engine.card
        self.state, self.held, self._trouble, self._failures = "loaded", False, None, 0
        self._used_at = self._turn_at = self._now()
        self._load_s = self._used_at - began_at
        for waiter in self._waiters:
            self._busy += 1
            waiter.granted = True
            waiter.over.set()
        self._waiters = []

    async def unload(self) -> None:
        """Free its memory; what it counted is kept. Lines that wait for it are now the last ones
        that do."""
        self.state = "unloading"
        if self._lines_at is not None:
            self._lines_at = self._now()
        await self.engine.close()
        self._before = ReplicaStatus(healthy=True, **_totals(self._before, self.engine.status()))
        self.engine = self._make(self._spec)
        self.state, self.held = "unloaded", False

    async def close(self) -> None:
        """Stop at once; whoever waits gets an error."""
        await self.engine.close()

    def _refuse(self, exc: Exception) -> None:
        self._failures += 1
        self._not_before = self._now() + backoff_s(self._failures, longest_s=60.0)
        reason = exc.message if isinstance(exc, TidemillError) else str(exc)
        self._trouble = f"The model could not be loaded: {reason}"
        for waiter in self._waiters:
            waiter.error = EngineDown(self._trouble)
            waiter.over.set()
        self._waiters = []

    # --- at work

    async def generate(self, generation: Generation) -> AsyncGenerator[Piece, None]:
        """Pieces of one answer, once it is in memory; see ``tidemill.ports.Replica``."""
        async with self._at_work(generation.lane) as engine:
            pieces = engine.generate(generation)
            try:
                async for piece in pieces:
                    yield piece
            finally:
                await close(pieces)

    async def embed(
        self, embedding: Embedding, told: Callable[[int], None] = lambda tokens: None
    ) -> Embedded:
        """Vectors for all inputs, once it is in memory."""
        async with self._at_work(embedding.lane) as engine:
            return await engine.embed(embedding, told)

    async def count(self, asked: Generation | Embedding) -> int:
        """Prompt tokens of a request. A model is not loaded for a count: raises
        ``ModelNotLoaded``."""
        async with self._at_work(Lane.BATCH) as engine:
            return await engine.count(asked)

    def status(self) -> ReplicaStatus:
        """Health and load; a model that is not in memory is healthy, unless loading it failed."""
        if self.state == "loaded":
            now = self.engine.status()
        else:
            now = ReplicaStatus(healthy=self._trouble is None, reason=self._trouble)
        return msgspec.structs.replace(
            now,
            waiting=now.waiting + len(self._waiters),
            state=self.state,
            memory_bytes=self.size,
            takes_lines=self.state == "loaded" and not self.held,
            **_totals(now, self._before),
        )

    @asynccontextmanager
    async def _at_work(self, lane: Lane) -> AsyncIterator[Replica]:
        if self.state == "loaded":
            self._busy += 1
        else:
            await self._wait(lane)
        try:
            yield self.engine
        finally:
            self._busy -= 1
            self._used_at = self._now()
            if lane is not Lane.BATCH:
                self._kept_until = self._used_at + min(_KEPT_S, _KEPT_LOADS * self._load_s)
            if not self._busy:
                self._stir()

    async def _wait(self, lane: Lane) -> None:
        """Return when it is loaded, counted as busy. Raises ``ModelNotLoaded`` after a while, for
        batch lines at once: their runner knows when to come again."""
        if lane is not Lane.BATCH:
            waiter = _Waiter(self._now())
            self._waiters.append(waiter)
            self._stir()
            try:
                with anyio.move_on_after(self._patience_s):
                    await waiter.over.wait()
            except BaseException:
                self._busy -= waiter.granted
                raise
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                    self._stir()
            if waiter.error is not None:
                raise waiter.error
            if waiter.granted:
                return
        raise ModelNotLoaded(
            f"The model '{self.name}' is not in memory, and others are at work there; try again.",
            retry_after_s=_COME_AGAIN_S,
        )


def _totals(a: ReplicaStatus, b: ReplicaStatus) -> dict[str, Any]:
    return {name: getattr(a, name) + getattr(b, name) for name in _TOTALS}
