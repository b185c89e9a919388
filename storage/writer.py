"""The one thread that writes.

Callers hand it functions; all that wait when a transaction begins share it, and its one fsync.
Each runs in a savepoint of its own, so that one caller's error hurts nobody else::

    BEGIN ─ SAVEPOINT a ─ RELEASE ─ SAVEPOINT b ─ ROLLBACK TO ─ … ─ COMMIT ─ append ─ answer

A caller hears of success only after the COMMIT, and after what must follow it (the incremental
files). Python's sqlite3 drops the GIL at every step of a statement, and a busy event loop may keep
it for milliseconds each time: statements here work on whole sets, and the settlements of a group
are merged into one call.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast

import structlog

from tidemill.crash import crash_point
from tidemill.errors import InvariantBroken, StoreUnavailable, TidemillError
from tidemill.ports import Clock
from tidemill.prices import Catalogue
from tidemill.storage.connections import open_writer

T = TypeVar("T")
A = TypeVar("A")

_GROUP = 512
"""Most callers of one transaction: bounds how long the first of them waits."""

_RETRY_AFTER_S = 30.0
"""A disk that is full stays so until somebody makes room."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Appended:
    """Rows that a transaction added to a result stream: ``data`` begins at byte ``start``."""

    batch_id: str
    kind: Literal["output", "error"]
    start: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Finished:
    """No more rows come to a batch's result streams."""

    batch_id: str


@dataclass(frozen=True, slots=True)
class Removed:
    """A result stream is no longer shown."""

    batch_id: str
    kind: str


Change = Appended | Finished | Removed
"""What a commit means for the incremental files."""


class Tx:
    """A caller's part of a transaction."""

    __slots__ = ("after", "changes", "conn", "now", "prices")

    def __init__(self, conn: sqlite3.Connection, now: float, prices: Catalogue) -> None:
        self.conn = conn
        self.prices = prices
        """In force for what is booked in this transaction."""
        self.now = now
        """The clock's time when the transaction began, epoch seconds with fraction."""
        self.changes: list[Change] = []
        """What the incremental files follow once this is committed."""
        self.after: list[str] = []
        """Crash points to pass once this is committed."""

    @property
    def now_s(self) -> int:
        """The same in whole seconds."""
        return int(self.now)

    def run(self, sql: str, parameters: Sequence[Any] | dict[str, Any] = ()) -> sqlite3.Cursor:
        """Execute a statement."""
        return self.conn.execute(sql, parameters)

    def one(self, sql: str, parameters: Sequence[Any] | dict[str, Any] = ()) -> Any:
        """The first row, or None."""
        return self.conn.execute(sql, parameters).fetchone()

    def value(self, sql: str, parameters: Sequence[Any] | dict[str, Any] = ()) -> Any:
        """The first column of the first row."""
        return self.conn.execute(sql, parameters).fetchone()[0]


class Merge(Generic[A, T]):
    """A write whose callers are joined: ``fn`` gets the arguments of all of them at once and
    returns one result each, in order."""

    def __init__(self, fn: Callable[[Tx, list[A]], list[T]]) -> None:
        self.fn = fn


@dataclass(slots=True, eq=False)
class _Job:
    fn: Callable[[Tx], Any] | None
    future: asyncio.Future[Any] | None
    """None: nobody waits for the answer."""
    alone: bool = False
    merge: Merge[Any, Any] | None = None
    argument: Any = None
    result: Any = None
    error: BaseException | None = None
    changes: list[Change] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


class Writer:
    """Owns the writing connection; ``start`` and ``stop`` frame its thread."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        committed: Callable[[list[Change]], None],
        prices: Catalogue | None = None,
    ) -> None:
        self._path = path
        self._clock = clock
        self._committed = committed
        self._prices = prices or Catalogue()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._conn: sqlite3.Connection | None = None
        self._closed = True
        self._gate = threading.Lock()
        self._probing = False
        self._trouble: str | None = None
        """Why a caller of the running transaction could not write."""
        self.failure: str | None = None
        """Why the last transaction failed; None after one that did not."""

    def start(self) -> None:
        """Open the connection and start the thread."""
        self._conn = open_writer(self._path)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tidemill-writer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish what is queued, end the thread, fold the log into the database. Blocks."""
        with self._gate:
            if self._thread is None:
                return
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join()
        self._thread = None
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    def healthy(self) -> str | None:
        """None, or why the store cannot be written. While it cannot, each call tries again."""
        if self._thread is None or not self._thread.is_alive():
            return self.failure or "the store's write thread is not running"
        if self.failure is not None and not self._probing:
            self._probing = True
            self._put(_Job(_probe, None))
        return self.failure

    async def run(self, fn: Callable[[Tx], T], *, alone: bool = False) -> T:
        """Run ``fn`` inside a transaction; its result after the COMMIT.

        ``alone`` begins a new transaction, after everything before it is committed and appended.
        Raises what ``fn`` raised (its changes are undone), or ``StoreUnavailable`` when the
        transaction could not be committed. A caller that is cancelled does not undo its write.
        """
        future = asyncio.get_running_loop().create_future()
        self._put(_Job(fn, future, alone))
        return cast(T, await future)

    async def join(self, merge: Merge[A, T], argument: A) -> T:
        """Run ``merge`` for this and all other arguments that wait; this caller's result after the
        COMMIT. Raises as ``run``."""
        future = asyncio.get_running_loop().create_future()
        self._put(_Job(None, future, merge=merge, argument=argument))
        return cast(T, await future)

    # --- callers' side above, the thread below -------------------------------------------------

    def _put(self, job: _Job) -> None:
        with self._gate:
            if self._closed:
                raise StoreUnavailable("The store is closed.")
            self._jobs.put(job)

    def _run(self) -> None:
        carried: _Job | None = None
        while True:
            first = carried or self._jobs.get()
            carried = None
            if first is None:
                return
            group = [first]
            stop = False
            while len(group) < _GROUP and not self._jobs.empty():
                job = self._jobs.get_nowait()
                if job is None:
                    stop = True
                    break
                if job.alone:
                    carried = job
                    break
                group.append(job)
            try:
                self._transaction(group)
            except BaseException as exc:  # noqa: BLE001 — this thread must outlive any caller
                self.failure = f"the store's write thread met {exc!r}"
                _log.exception("store.writer_failed")
                for job in group:
                    job.error = job.error or StoreUnavailable("The store could not be written.")
            self._answer(group)
            if stop:
                self._jobs.put(None)

    def _transaction(self, group: list[_Job]) -> None:
        conn = self._conn
        assert conn is not None
        self._trouble = None
        try:
            conn.execute("BEGIN IMMEDIATE")
            done = self._work(conn, group)
            conn.execute("COMMIT")
        except sqlite3.Error as exc:
            if conn.in_transaction:
                conn.execute("ROLLBACK")
            self._fail(group, exc)
            return
        self.failure = self._trouble
        for job in done:
            for name in job.after:
                crash_point(name)
        changes = [change for job in done for change in job.changes]
        if changes:
            self._committed(changes)

    def _work(self, conn: sqlite3.Connection, group: list[_Job]) -> list[_Job]:
        """Run every job of the group inside the open transaction; returns those that worked."""
        now = self._clock()
        done: list[_Job] = []
        merged: set[int] = set()
        for job in group:
            if id(job) in merged:
                continue
            same = [job]
            if job.merge is not None:
                same = [other for other in group if other.merge is job.merge]
                merged.update(id(other) for other in same)
            if self._attempt(conn, now, same):
                done.extend(same)
            elif len(same) > 1:
                # One of them is at fault: alone, it hurts nobody else.
                done.extend(one for one in same if self._attempt(conn, now, [one]))
        return done

    def _attempt(self, conn: sqlite3.Connection, now: float, jobs: list[_Job]) -> bool:
        tx = Tx(conn, now, self._prices)
        conn.execute("SAVEPOINT caller")
        try:
            if jobs[0].merge is not None:
                results = jobs[0].merge.fn(tx, [job.argument for job in jobs])
            else:
                assert jobs[0].fn is not None
                results = [jobs[0].fn(tx)]
        except Exception as exc:
            if not conn.in_transaction:
                # SQLite undid the whole transaction (disk full, I/O error): nobody has succeeded.
                raise
            conn.execute("ROLLBACK TO caller")
            conn.execute("RELEASE caller")
            for job in jobs:
                job.error = _translated(exc)
            if isinstance(jobs[0].error, StoreUnavailable):
                self._trouble = f"the store cannot be written: {exc}"
            return False
        conn.execute("RELEASE caller")
        for job, result in zip(jobs, results, strict=True):
            job.error, job.result = None, result
        jobs[0].changes, jobs[0].after = tx.changes, tx.after
        return True

    def _fail(self, group: list[_Job], exc: sqlite3.Error) -> None:
        self.failure = f"the store cannot be written: {exc}"
        _log.error("store.commit_failed", error=str(exc), callers=len(group))
        for job in group:
            job.error = job.error or _translated(exc)

    def _answer(self, group: list[_Job]) -> None:
        """Wake the callers, once per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Job]] = {}
        for job in group:
            if job.fn is _probe:
                self._probing = False
            if job.future is not None:
                by_loop.setdefault(job.future.get_loop(), []).append(job)
        for loop, jobs in by_loop.items():
            if not loop.is_closed():
                try:
                    loop.call_soon_threadsafe(_resolve, jobs)
                except RuntimeError:
                    _log.warning("store.caller_gone", callers=len(jobs))


def _resolve(jobs: list[_Job]) -> None:
    for job in jobs:
        if job.future is None or job.future.done():
            continue
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)


def _probe(tx: Tx) -> None:
    """Change a byte of the database, to see whether it can be changed."""
    tx.run(
        "INSERT INTO facts (kind, key, value, set_at) VALUES ('store', 'probe', x'00', :now)"
        " ON CONFLICT (kind, key) DO UPDATE SET set_at = excluded.set_at",
        {"now": tx.now_s},
    )


def _translated(exc: BaseException) -> BaseException:
    """SQLite's errors as ours; everything else as it is."""
    if isinstance(exc, sqlite3.IntegrityError):
        error: TidemillError = InvariantBroken(f"The store refused a change: {exc}.")
    elif isinstance(exc, sqlite3.Error):
        error = StoreUnavailable(
            f"The store cannot be written: {exc}.", retry_after_s=_RETRY_AFTER_S
        )
    else:
        return exc
    error.__cause__ = exc
    return error
