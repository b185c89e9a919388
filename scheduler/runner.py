"""Runs the lines of local batches: lease, execute, settle; and again, as the bell rings.

One runner serves one store from one event loop. Two loops share its state:

    lease loop    bell ──► deal free slots among owners ──► lease ──► one task a line
    settle loop   finished lines ──► one commit for all that wait ──► rows, retries, last-line rule

``lifecycle`` brings batches in, closes them, and watches the time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import anyio
import structlog
from anyio.abc import TaskGroup, TaskStatus

from tidemill import clock, ids, telemetry, wire
from tidemill.crash import crash_point
from tidemill.ports import Executor, Store
from tidemill.scheduler.admission import DrainRate, IntakePool, SchedulingPool
from tidemill.scheduler.bell import Bell
from tidemill.scheduler.intake import Intake, Permits, PlaceLate
from tidemill.scheduler.lifecycle import HandOver, Lifecycle, persist
from tidemill.scheduler.retry import Rests
from tidemill.types import (
    Answer,
    BatchRecord,
    Lease,
    Outcome,
    Refusal,
    Settlement,
    Usage,
)

log = structlog.get_logger()

_AT_ONCE = 256
"""Lines leased or settled in one go: more would keep the event loop from everybody else for longer
than an interactive request should wait."""


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
        place: PlaceLate | None = None,
        hand_over: HandOver | None = None,
        permits: Permits | None = None,
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
        self._bell, self._finished = Bell(), Bell()
        intake = Intake(
            store,
            self.intake_pool,
            knows=knows,
            max_lines=max_lines,
            place=place,
            permits=permits,
        )
        self._batches = Lifecycle(store, intake, self._bell, executor, hand_over)
        self.rows = self._batches.rows
        self._leases: dict[int, Lease] = {}
        self._places: dict[int, str] = {}
        self._active: Counter[str] = Counter()
        self._rests = Rests()
        self._outcomes: list[tuple[Lease, Outcome]] = []
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
        self._batches.adopt(batch, reserved)

    def cancelled(self, batch: BatchRecord) -> None:
        """A batch was moved to ``cancelling``."""
        self._batches.cancelled(batch)

    def look_again(self) -> None:
        """A place may take lines that took none before."""
        self._bell.ring()

    # --- running

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Adopt what the store holds, then run until cancelled or drained."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            self.intake_pool.add(await self._store.lines.queued())
            await self._batches.start(tasks)
            tasks.start_soon(persist, self._settle_loop, "settling lines")
            tasks.start_soon(persist, self._heartbeat, "keeping leases alive")
            async with anyio.create_task_group() as lines:
                self._lines = lines
                tasks.start_soon(persist, self._lease_loop, "leasing lines")
                task_status.started()
                await anyio.sleep_forever()

    def stop_leasing(self) -> None:
        """Start no line and keep nobody waiting for rows from now on; ``drain`` follows."""
        self._draining = True
        self.rows.close()

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

    # --- lease

    async def _lease_loop(self) -> None:
        while True:
            async with self._leasing:
                while not self._draining:
                    most = self.pool.capacity
                    total = min(most, self._concurrency or most)
                    self._batches.lift()
                    self._executor.waits(self._batches.turns.waiting())
                    wants = self._rests.awake(self._executor.capacities, clock.now_f())
                    shares = self._batches.turns.deal(total, wants, self._active)
                    if not shares:
                        break
                    for place, seq, n in shares:
                        await self._lease(place, seq, n)
            await self._bell.wait()

    async def _lease(self, place: str, seq: int, n: int) -> None:
        self._batches.stirred.discard(seq)
        until_at = int(clock.now_f() + self._lease_s) + 1
        n = min(n, _AT_ONCE)
        models = await self._batches.models_at(seq, place)
        leases = await self._store.lines.lease(seq, n, self._holder, until_at, models)
        if len(leases) < n and seq not in self._batches.stirred:
            self._batches.turns.dry(seq, place)
        if not leases:
            return
        self.intake_pool.remove(len(leases))
        self.pool.enter(len(leases))
        self._active[place] += len(leases)
        self._batches.in_flight[seq] += len(leases)
        assert self._lines is not None
        for lease in leases:
            self._leases[lease.token] = lease
            self._places[lease.token] = place
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
            while self._outcomes:
                outcomes = self._outcomes[:_AT_ONCE]
                del self._outcomes[:_AT_ONCE]
                try:
                    async with self._settling:
                        await self._settle(outcomes)
                except BaseException:
                    self._outcomes = outcomes + self._outcomes
                    raise
            await self._finished.wait()

    async def _settle(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> None:
        now = clock.now_f()
        settlements: list[Settlement] = []
        again: dict[tuple[float, bool], list[Lease]] = defaultdict(list)
        for lease, outcome in outcomes:
            self._note_rest(lease, outcome, now)
            if isinstance(outcome, Refusal) and self._may_retry(lease, outcome, now):
                due_at = now + self._backoff_s(lease, outcome)
                again[(round(due_at, 1) if outcome.spend else 0.0, outcome.spend)].append(lease)
            else:
                settlements.append(_settlement(lease, outcome, int(now)))
        settled = await self._store.lines.settle(settlements) if settlements else []
        for (due_at, spend), leases in again.items():
            closing = await self._store.lines.release(leases, due_at=due_at, spend=spend)
            self.intake_pool.add(len(leases))
            self._batches.released({lease.batch_seq for lease in leases}, due_at, closing)
        touched = Counter(lease.batch_seq for lease, _ in outcomes)
        for lease, _ in outcomes:
            self._leases.pop(lease.token, None)
            self._active[self._places.pop(lease.token)] -= 1
        self.pool.leave(len(outcomes))
        self._batches.in_flight.subtract(touched)
        self.rate.add(len(settlements))
        succeeded = sum(settlement.ok for settlement in settlements)
        telemetry.lines_settled(succeeded, len(settlements) - succeeded)
        # Nothing accepted: an earlier try of this settlement got through, and its report was lost.
        ready = {r.batch_seq for r in settled if r.drained or not r.accepted}
        self._batches.settled(touched, ready, {r.batch_seq: r.accepted for r in settled})
        if not self._leases:
            self._idle.set()
        self._bell.ring()

    def _note_rest(self, lease: Lease, outcome: Outcome, now: float) -> None:
        """A place that is down is asked again after a while, with as many lines as it wants, rather
        than with every line that waits."""
        place = self._places[lease.token]
        if isinstance(outcome, Refusal) and outcome.rest:
            self._batches.wake_at(self._rests.add(place, now))
        elif isinstance(outcome, Answer):
            self._rests.end(place)

    def _may_retry(self, lease: Lease, refusal: Refusal, now: float) -> bool:
        if not refusal.spend:
            return True
        return refusal.retry and lease.attempt < self._attempts and now < lease.expires_at

    @staticmethod
    def _backoff_s(lease: Lease, refusal: Refusal) -> float:
        if refusal.retry_after_s is not None:
            return refusal.retry_after_s
        return float(min(60.0, 0.5 * 2.0 ** (lease.attempt - 1)))

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
                self._batches.stir()


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
