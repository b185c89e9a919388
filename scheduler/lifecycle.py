"""Takes batches from ``validating`` to their end: reads them in, closes them, expires them.

::

    opened, adopted ──► read ──► turns (lines may start)
    cancelled, past its deadline, drained ──► close ──► end state
    timer: sleeps exactly until the next deadline or retry falls due

The runner starts and settles lines; this is where it learns which batches have any.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping

import anyio
import structlog
from anyio.abc import TaskGroup

from tidemill import clock
from tidemill.crash import crash_point
from tidemill.ports import Executor, Store
from tidemill.scheduler.bell import Bell, Signals
from tidemill.scheduler.intake import Intake
from tidemill.scheduler.lift import Lifts
from tidemill.scheduler.queue import Queues
from tidemill.scheduler.states import CANCELLABLE, ENDS
from tidemill.types import TERMINAL, BatchRecord, BatchStatus, LineState

log = structlog.get_logger()

_CLOSINGS: dict[BatchStatus, tuple[LineState, str, str]] = {
    BatchStatus.CANCELLING: (
        LineState.CANCELLED,
        "batch_cancelled",
        "This request was not executed because the batch was cancelled.",
    ),
    BatchStatus.EXPIRING: (
        LineState.EXPIRED,
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
}
_STORE_RETRY_S = 1.0
"""Pause after the store refused a change (disk full, say); what was to be done is kept."""


HandOver = Callable[[BatchRecord], Awaitable[None]]
"""Takes a batch that turned out to belong to a provider."""


async def persist(step: Callable[[], Awaitable[None]], what: str) -> None:
    """Run an endless loop for ever: what it throws is logged and it begins again.

    A store that cannot be written for a while must not end the server; ``/health`` says so.
    """
    while True:
        try:
            await step()
        except Exception:
            log.exception("interrupted; it will be repeated", what=what)
            await anyio.sleep(_STORE_RETRY_S)


class Lifecycle:
    """Knows all local batches of this server that are not terminal."""

    def __init__(
        self,
        store: Store,
        intake: Intake,
        lease_bell: Bell,
        executor: Executor,
        hand_over: HandOver | None = None,
    ) -> None:
        self._hand_over = hand_over
        self._store = store
        self._intake = intake
        self._lease_bell = lease_bell
        self._place = executor.place
        self.turns = Queues(executor.capacities)
        """Batches whose lines may start."""
        self.in_flight: Counter[int] = Counter()
        """Lines that run now, by batch; kept by the runner."""
        self.rows = Signals()
        """Rings by batch when it has new rows or another status."""
        self.stirred: set[int] = set()
        """Batches that may have got due lines since the runner last cleared their mark."""
        self._lifts = Lifts()
        self._batches: dict[int, BatchRecord] = {}
        self._models: dict[int, list[str]] = {}
        self._reading: set[int] = set()
        self._to_close: set[int] = set()
        self._due: list[float] = []
        self._closing = Bell()
        self._timer = Bell()
        self._tasks: TaskGroup | None = None

    def __len__(self) -> int:
        """Batches that are not terminal."""
        return len(self._batches)

    def __contains__(self, seq: int) -> bool:
        return seq in self._batches

    def lift(self) -> None:
        """Let those go ahead that would miss their deadline at their pace. For before each deal:
        nothing else depends on it."""
        lifted = self._lifts.look(clock.now_f())
        if lifted is not None:
            self.turns.lift(lifted)

    async def models_at(self, seq: int, place: str) -> list[str] | None:
        """The models of a batch that run at a place; None: all of them."""
        batch = self._batches.get(seq)
        if batch is None or batch.model is not None:
            return None
        return [
            model
            for model in await self._models_of(batch)
            if self._place(model, batch.endpoint) == place
        ]

    async def _models_of(self, batch: BatchRecord) -> list[str]:
        if batch.model is not None:
            return [batch.model]
        if batch.seq not in self._models:
            self._models[batch.seq] = await self._store.lines.models(batch.seq)
        return self._models[batch.seq]

    async def start(self, tasks: TaskGroup) -> None:
        """Adopt what the store holds and begin to close and to watch the time."""
        self._tasks = tasks
        due_at = await self._store.lines.next_due_at()
        if due_at is not None:
            heapq.heappush(self._due, due_at)
        for batch in await self._store.batches.active():
            if batch.placement.execution == "local":
                self.adopt(batch, None)
        tasks.start_soon(persist, self._close_loop, "closing batches")
        tasks.start_soon(persist, self._timer_loop, "watching deadlines")

    # --- what happens to a batch

    def adopt(self, batch: BatchRecord, reserved: int | None) -> None:
        """Take on a batch that was opened, or found at start (``reserved=None``)."""
        self._batches[batch.seq] = batch
        closing_unread = batch.status in _CLOSINGS and batch.total == 0
        if batch.status is BatchStatus.VALIDATING or closing_unread:
            self._reading.add(batch.seq)
            assert self._tasks is not None, "the runner runs before batches are opened"
            self._tasks.start_soon(self._read, batch, reserved)
        elif batch.status is BatchStatus.IN_PROGRESS:
            assert self._tasks is not None, "the runner runs before batches are opened"
            self._tasks.start_soon(self._let_run, batch)
        if batch.status in ENDS:
            self._close_soon(batch)
        self._timer.ring()

    def cancelled(self, batch: BatchRecord) -> None:
        """A batch was moved to ``cancelling``."""
        crash_point("batch.cancel.after_commit")
        self._close_soon(batch)

    def settled(
        self, touched: Iterable[int], ready: Iterable[int], ended: Mapping[int, int]
    ) -> None:
        """Lines of ``touched`` batches ran; ``ready`` ones may have no line left; of ``ended`` so
        many lines will not run again."""
        now = clock.now_f()
        for seq, lines in ended.items():
            self._lifts.ended(seq, lines, now)
        self._to_close.update(ready)
        for seq in touched:
            self.rows.ring(seq)
            batch = self._batches.get(seq)
            if batch is not None and batch.status in _CLOSINGS and self.in_flight[seq] <= 0:
                self._to_close.add(seq)
        if self._to_close:
            self._closing.ring()

    def released(self, seqs: Iterable[int], due_at: float, closing: Iterable[int]) -> None:
        """Lines of ``seqs`` wait again until ``due_at``; those of ``closing`` will not run."""
        self.wake_at(due_at)
        for seq in seqs:
            self.stirred.add(seq)
            self.turns.wet(seq)
        self._to_close.update(closing)
        self._closing.ring()

    def wake_at(self, at: float) -> None:
        """Look for due lines again at that time."""
        heapq.heappush(self._due, at)
        self._timer.ring()

    def stir(self) -> None:
        """Every batch may have due lines: retries fell due, or leases lapsed."""
        self.stirred.update(self._batches)
        self.turns.wet_all()
        self._lease_bell.ring()

    async def _read(self, batch: BatchRecord, reserved: int | None) -> None:
        """Bring the batch's lines in, and let it run, fail, or go on being cancelled."""
        while True:
            try:
                after = await self._intake.read(batch, reserved)
                if after is not None and after.placement.execution != "local":
                    assert self._hand_over is not None, "without it nothing is placed late"
                    await self._hand_over(after)
                break
            except Exception:
                log.exception("reading interrupted; it will be repeated", batch=batch.id)
                await anyio.sleep(_STORE_RETRY_S)
        self._reading.discard(batch.seq)
        elsewhere = after is not None and after.placement.execution != "local"
        if after is None or after.status in TERMINAL or elsewhere:
            self._forget(batch.seq)
        elif after.status is BatchStatus.IN_PROGRESS:
            await self._let_run(after)
        else:
            self._close_soon(after)

    async def _let_run(self, batch: BatchRecord) -> None:
        """Put a batch into the turns of the places where it has lines."""
        self._batches[batch.seq] = batch
        while True:
            try:
                models = await self._models_of(batch)
                break
            except Exception:
                log.exception("looking for models; it will be repeated", batch=batch.id)
                await anyio.sleep(_STORE_RETRY_S)
        if self._batches.get(batch.seq) is not batch:
            return  # it was cancelled, or its time was over
        places = {self._place(model, batch.endpoint) for model in models}
        self._lifts.add(batch, clock.now_f())
        self.turns.add(batch.owner, batch.seq, batch.expires_at, places)
        self.rows.ring(batch.seq)
        self._lease_bell.ring()
        self._timer.ring()

    # --- close

    def _close_soon(self, batch: BatchRecord) -> None:
        self._batches[batch.seq] = batch
        self._stop(batch.seq)
        self._to_close.add(batch.seq)
        self._closing.ring()
        self._lease_bell.ring()  # nothing need be loaded for its lines any more

    async def _close_loop(self) -> None:
        while True:
            while self._to_close:
                seq = next(iter(self._to_close))
                self._to_close.discard(seq)
                try:
                    await self._close(seq)
                except BaseException:
                    self._to_close.add(seq)
                    raise
            await self._closing.wait()

    async def _close(self, seq: int) -> None:
        """Bring one batch as far towards its end as it can go now; later settlements call again."""
        known = self._batches.get(seq)
        if known is None or seq in self._reading:
            return  # read first: lines that are not in the store yet need their rows, too
        batch = await self._store.batches.get(known.id, None)
        if batch is None or batch.status in TERMINAL:
            self._forget(seq)
            return
        if batch.status not in ENDS:
            return
        self._batches[seq] = batch
        self._stop(seq)
        if batch.status in _CLOSINGS:
            to, code, message = _CLOSINGS[batch.status]
            while closed := await self._store.lines.close(seq, to, code, message):
                self._intake.pool.remove(closed)
                self.rows.ring(seq)
            if self.in_flight[seq] > 0 or await self._store.lines.running(seq):
                return
        if await self._store.batches.move(seq, frozenset({batch.status}), ENDS[batch.status]):
            log.info("batch ended", batch=batch.id, status=str(ENDS[batch.status]))
            self._forget(seq)

    def _stop(self, seq: int) -> None:
        """No line of it may start any more."""
        self.turns.remove(seq)
        self._lifts.remove(seq)

    def _forget(self, seq: int) -> None:
        self._stop(seq)
        self._batches.pop(seq, None)
        self.in_flight.pop(seq, None)
        self.stirred.discard(seq)
        self._models.pop(seq, None)
        self.rows.ring(seq)
        self._timer.ring()
        self._lease_bell.ring()

    # --- time

    async def _timer_loop(self) -> None:
        while True:
            await self._expire()
            self._retries_due()
            next_at = self._next_at()
            if next_at is None:
                await self._timer.wait()
            else:
                with anyio.move_on_after(max(0.0, next_at - clock.now_f())):
                    await self._timer.wait()

    def _next_at(self) -> float | None:
        deadlines = [
            batch.expires_at for batch in self._batches.values() if batch.status in CANCELLABLE
        ]
        return min([*deadlines, *self._due[:1]], default=None)

    async def _expire(self) -> None:
        now = clock.now_f()
        for batch in list(self._batches.values()):
            if batch.status not in CANCELLABLE or batch.expires_at > now:
                continue
            moved = await self._store.batches.move(batch.seq, CANCELLABLE, BatchStatus.EXPIRING)
            # None: it was cancelled or ended meanwhile, and closing finds out how far it is.
            self._close_soon(moved or await self._store.batches.get(batch.id, None) or batch)

    def _retries_due(self) -> None:
        due = False
        while self._due and self._due[0] <= clock.now_f():
            heapq.heappop(self._due)
            due = True
        if due:
            self.stir()
