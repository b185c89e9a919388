"""Runs the lines of local batches: lease, execute, settle; and again, as the bell rings.

One runner serves one store from one event loop. Four small loops share its state:

    lease loop    bell ──► deal free slots among owners ──► lease ──► one task a line
    settle loop   finished lines ──► one commit for all that wait ──► rows, retries, last-line rule
    close loop    cancelled, expired, drained batches ──► their end state
    timer loop    sleeps exactly until the next deadline or retry falls due
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import anyio
import structlog
from anyio.abc import TaskGroup, TaskStatus

from tidemill import clock, ids, telemetry, wire
from tidemill.crash import crash_point
from tidemill.ports import Executor, Store
from tidemill.scheduler.admission import DrainRate, IntakePool, SchedulingPool
from tidemill.scheduler.bell import Bell, Signals
from tidemill.scheduler.intake import Intake
from tidemill.scheduler.queue import Turns
from tidemill.scheduler.states import ENDS
from tidemill.types import (
    TERMINAL,
    Answer,
    BatchRecord,
    BatchStatus,
    Lease,
    LineState,
    Outcome,
    Refusal,
    Settlement,
    Usage,
)

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


class Runner:
    """Owns all local batches of one server while it runs."""

    def __init__(
        self,
        store: Store,
        executor: Executor,
        *,
        max_pool_size: int,
        max_intake_capacity: int,
        max_line_attempts: int = 3,
        lease_s: float = 60.0,
        concurrency: int = 0,
        knows: Callable[[str], bool] | None = None,
        max_lines: int = 1 << 62,
    ) -> None:
        self._store = store
        self._executor = executor
        self._attempts = max_line_attempts
        self._lease_s = lease_s
        self._concurrency = concurrency
        self._holder = ids.row_id()
        self.rate = DrainRate()
        self.intake_pool = IntakePool(max_intake_capacity, self.rate)
        self.pool = SchedulingPool(max_pool_size)
        self._intake = Intake(store, self.intake_pool, knows=knows, max_lines=max_lines)
        self.rows = Signals()
        self._bell = Bell()
        self._timer = Bell()
        self._finished = Bell()
        self._closing = Bell()
        self._turns = Turns()
        self._stirred: set[int] = set()
        self._batches: dict[int, BatchRecord] = {}
        self._flight: Counter[int] = Counter()
        self._leases: dict[int, Lease] = {}
        self._outcomes: list[tuple[Lease, Outcome]] = []
        self._to_close: set[int] = set()
        self._reading: set[int] = set()
        self._due: list[float] = []
        self._draining = False
        self._idle = anyio.Event()
        self._tasks: TaskGroup | None = None
        self._lines: TaskGroup | None = None
        self._settling, self._leasing = anyio.Lock(), anyio.Lock()

    # --- what the rest of the server says to it

    @property
    def active_batches(self) -> int:
        """Batches that are not terminal."""
        return len(self._batches)

    def opened(self, batch: BatchRecord, reserved: int) -> None:
        """A batch was committed; ``reserved`` lines of the intake pool are held for it."""
        if batch.seq in self._batches:  # the answer to a repeated create
            self.intake_pool.release(reserved)
            return
        self._adopt(batch, reserved)

    def cancelled(self, batch: BatchRecord) -> None:
        """A batch was moved to ``cancelling``."""
        crash_point("batch.cancel.after_commit")
        self._close_soon(batch)

    def wake(self) -> None:
        """Something changed outside (an engine came back): look for work again."""
        self._bell.ring()

    # --- running

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Adopt what the store holds, then run until cancelled or drained."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            self.intake_pool.add(await self._store.lines.queued())
            due_at = await self._store.lines.next_due_at()
            if due_at is not None:
                heapq.heappush(self._due, due_at)
            for batch in await self._store.batches.active():
                if batch.placement.execution == "local":
                    self._adopt(batch, None)
            tasks.start_soon(self._settle_loop)
            tasks.start_soon(self._close_loop)
            tasks.start_soon(self._timer_loop)
            tasks.start_soon(self._heartbeat)
            async with anyio.create_task_group() as lines:
                self._lines = lines
                tasks.start_soon(self._lease_loop)
                task_status.started()
                await anyio.sleep_forever()

    def stop_leasing(self) -> None:
        """Start no line from now on; ``drain`` follows."""
        self._draining = True

    async def drain(self, within_s: float) -> None:
        """Start no line any more; let those in flight finish ``within_s``, then give them back.

        A line given back spends no attempt.
        """
        self._draining = True
        async with self._leasing:  # what is being leased is in ``_leases`` before we look
            self._idle = anyio.Event()
        if self._leases:
            with anyio.move_on_after(within_s):
                await self._idle.wait()
        if self._lines is not None:
            self._lines.cancel_scope.cancel()
        async with self._settling:
            if self._outcomes:
                outcomes, self._outcomes = self._outcomes, []
                await self._settle(outcomes)
            unfinished = list(self._leases.values())
            if unfinished:
                await self._store.lines.release(unfinished, spend=False)
                log.info("lines given back", lines=len(unfinished))
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()

    def _adopt(self, batch: BatchRecord, reserved: int | None) -> None:
        self._batches[batch.seq] = batch
        closing_unread = batch.status in _CLOSINGS and batch.total == 0
        if batch.status is BatchStatus.VALIDATING or closing_unread:
            self._reading.add(batch.seq)
            assert self._tasks is not None, "the runner runs before batches are opened"
            self._tasks.start_soon(self._read, batch, reserved)
        elif batch.status is BatchStatus.IN_PROGRESS:
            self._turns.add(batch.owner, batch.seq, batch.expires_at)
            self._bell.ring()
        if batch.status in ENDS:
            self._close_soon(batch)
        self._timer.ring()

    async def _read(self, batch: BatchRecord, reserved: int | None) -> None:
        """Bring the batch's lines in, and let it run, fail, or go on being cancelled."""
        after = await self._intake.read(batch, reserved)
        self._reading.discard(batch.seq)
        if after is None:
            self._forget(batch.seq)
            return
        self._batches[batch.seq] = after
        if after.status is BatchStatus.IN_PROGRESS:
            self._turns.add(after.owner, after.seq, after.expires_at)
            self._bell.ring()
            self._timer.ring()
        else:
            self._close_soon(after)

    # --- lease

    async def _lease_loop(self) -> None:
        while True:
            await self._bell.wait()
            async with self._leasing:
                while not self._draining:
                    most = self._executor.capacity
                    shares = self._turns.deal(self.pool.free(min(most, self._concurrency or most)))
                    if not shares:
                        break
                    for seq, n in shares:
                        await self._lease(seq, n)

    async def _lease(self, seq: int, n: int) -> None:
        self._stirred.discard(seq)
        until_at = int(clock.now_f() + self._lease_s) + 1
        leases = await self._store.lines.lease(seq, n, self._holder, until_at)
        if len(leases) < n and seq not in self._stirred:
            self._turns.dry(seq)
        if not leases:
            return
        self.intake_pool.remove(len(leases))
        self.pool.enter(len(leases))
        self._flight[seq] += len(leases)
        assert self._lines is not None
        for lease in leases:
            self._leases[lease.token] = lease
            self._lines.start_soon(self._run_line, lease)

    async def _run_line(self, lease: Lease) -> None:
        crash_point("line.run.before_execute")
        try:
            outcome = await self._executor.execute(lease)
        except Exception as exc:
            log.exception("line failed unexpectedly", batch=lease.batch_id, line=lease.no)
            outcome = Refusal(
                status_code=500,
                code="internal_error",
                type="server_error",
                message=f"The server failed on this line ({type(exc).__name__}).",
            )
        crash_point("line.run.after_execute")
        self._outcomes.append((lease, outcome))
        self._finished.ring()

    # --- settle

    async def _settle_loop(self) -> None:
        while True:
            await self._finished.wait()
            while self._outcomes:
                outcomes, self._outcomes = self._outcomes, []
                try:
                    async with self._settling:
                        await self._settle(outcomes)
                except Exception:
                    log.exception("settlement failed; it will be repeated", lines=len(outcomes))
                    self._outcomes = outcomes + self._outcomes
                    await anyio.sleep(1.0)

    async def _settle(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> None:
        now = clock.now_f()
        settlements: list[Settlement] = []
        again: dict[tuple[float, bool], list[Lease]] = defaultdict(list)
        for lease, outcome in outcomes:
            if isinstance(outcome, Refusal) and self._may_retry(lease, outcome, now):
                due_at = now + self._backoff_s(lease, outcome)
                again[(round(due_at, 1) if outcome.spend else 0.0, outcome.spend)].append(lease)
            else:
                settlements.append(_settlement(lease, outcome, int(now)))
        settled = await self._store.lines.settle(settlements) if settlements else []
        for (due_at, spend), leases in again.items():
            closing = await self._store.lines.release(leases, due_at=due_at, spend=spend)
            self._released(leases, due_at, closing)
        touched = Counter(lease.batch_seq for lease, _ in outcomes)
        for lease, _ in outcomes:
            self._leases.pop(lease.token, None)
        self.pool.leave(len(outcomes))
        self._flight.subtract(touched)
        self.rate.add(len(settlements))
        succeeded = sum(settlement.ok for settlement in settlements)
        telemetry.lines_settled(succeeded, len(settlements) - succeeded)
        for report in settled:
            self.rows.ring(report.batch_seq)
            if report.drained:
                self._turns.remove(report.batch_seq)
                self._to_close.add(report.batch_seq)
        for seq in touched:
            batch = self._batches.get(seq)
            if batch is not None and batch.status in _CLOSINGS and self._flight[seq] <= 0:
                self._to_close.add(seq)
        if self._to_close:
            self._closing.ring()
        if not self._leases:
            self._idle.set()
        self._bell.ring()

    def _may_retry(self, lease: Lease, refusal: Refusal, now: float) -> bool:
        if not refusal.spend:
            return True
        return refusal.retry and lease.attempt < self._attempts and now < lease.expires_at

    @staticmethod
    def _backoff_s(lease: Lease, refusal: Refusal) -> float:
        if refusal.retry_after_s is not None:
            return refusal.retry_after_s
        return float(min(60.0, 0.5 * 2.0 ** (lease.attempt - 1)))

    def _released(self, leases: Sequence[Lease], due_at: float, closing: Sequence[int]) -> None:
        self.intake_pool.add(len(leases))
        heapq.heappush(self._due, due_at)
        self._timer.ring()
        for seq in {lease.batch_seq for lease in leases}:
            self._stirred.add(seq)
            self._turns.wet(seq)
        self._to_close.update(closing)

    # --- close

    def _close_soon(self, batch: BatchRecord) -> None:
        self._batches[batch.seq] = batch
        self._turns.remove(batch.seq)
        self._to_close.add(batch.seq)
        self._closing.ring()

    async def _close_loop(self) -> None:
        while True:
            await self._closing.wait()
            while self._to_close:
                await self._close(self._to_close.pop())

    async def _close(self, seq: int) -> None:
        """Bring one batch as far towards its end as it can go now; later settlements call again."""
        known = self._batches.get(seq)
        if known is None or seq in self._reading:
            return  # read first: lines that are not in the store yet need their rows, too
        batch = await self._store.batches.get(known.id, None)
        if batch is None or batch.status not in ENDS:
            return
        self._batches[seq] = batch
        if batch.status in _CLOSINGS:
            to, code, message = _CLOSINGS[batch.status]
            while closed := await self._store.lines.close(seq, to, code, message):
                self.intake_pool.remove(closed)
                self.rows.ring(seq)
            if self._flight[seq] > 0 or await self._store.lines.running(seq):
                return
        if await self._store.batches.move(seq, frozenset({batch.status}), ENDS[batch.status]):
            log.info("batch ended", batch=batch.id, status=str(ENDS[batch.status]))
            self._forget(seq)

    def _forget(self, seq: int) -> None:
        self._turns.remove(seq)
        self._batches.pop(seq, None)
        self._flight.pop(seq, None)
        self.rows.ring(seq)
        self._timer.ring()

    # --- time

    async def _timer_loop(self) -> None:
        while True:
            next_at = self._next_at()
            if next_at is None:
                await self._timer.wait()
            else:
                with anyio.move_on_after(max(0.0, next_at - clock.now_f())):
                    await self._timer.wait()
            await self._expire()
            self._retries_due()

    def _next_at(self) -> float | None:
        deadlines = [
            batch.expires_at
            for batch in self._batches.values()
            if batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
        ]
        return min([*deadlines, *self._due[:1]], default=None)

    async def _expire(self) -> None:
        now = clock.now_f()
        for batch in list(self._batches.values()):
            open_states = frozenset({BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS})
            if batch.status not in open_states or batch.expires_at > now:
                continue
            moved = await self._store.batches.move(batch.seq, open_states, BatchStatus.EXPIRING)
            if moved is not None:
                self._close_soon(moved)
            else:  # it was cancelled or ended meanwhile
                fresh = await self._store.batches.get(batch.id, None)
                if fresh is None or fresh.status in TERMINAL:
                    self._forget(batch.seq)
                else:
                    self._close_soon(fresh)

    def _retries_due(self) -> None:
        now = clock.now_f()
        due = False
        while self._due and self._due[0] <= now:
            heapq.heappop(self._due)
            due = True
        if due:
            self._stirred.update(self._batches)
            self._turns.wet_all()
            self._bell.ring()

    async def _heartbeat(self) -> None:
        """Keep our leases alive, and take back those of holders that died (other servers)."""
        while True:
            await anyio.sleep(self._lease_s / 3)
            if self._leases:
                until_at = int(clock.now_f() + self._lease_s) + 1
                await self._store.lines.extend(self._holder, until_at)
            lapsed = await self._store.lines.reclaim(clock.now())
            if lapsed:
                log.warning("lapsed leases taken back", lines=lapsed)
                self.intake_pool.add(lapsed)
                self._stirred.update(self._batches)
                self._turns.wet_all()
                self._bell.ring()


def _settlement(lease: Lease, outcome: Outcome, now: int) -> Settlement:
    answered = isinstance(outcome, Answer)
    return Settlement(
        batch_seq=lease.batch_seq,
        no=lease.no,
        token=lease.token,
        ok=answered,
        row=wire.result_row(lease.custom_id, outcome),
        usage=outcome.usage if isinstance(outcome, Answer) else Usage(),
        model=outcome.model if isinstance(outcome, Answer) else "",
        execution=outcome.execution if isinstance(outcome, Answer) else "local",
        owner=lease.owner,
        key_id=lease.key_id,
        custom_id=lease.custom_id,
        finished_at=now,
    )
