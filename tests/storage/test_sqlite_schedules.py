"""Random schedules of everything that can happen to batches, against a model of what should.

The law: once a batch has ended, each custom id is in exactly one of its two result files, and
``completed + failed == total``. At every step the counters equal the rows, the usage sums equal the
ledger, and the incremental files equal the store.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from tests.storage.world import (
    ANSWER,
    OWNER,
    REFUSAL,
    Hand,
    Input,
    S,
    content,
    fresh,
    new_batch,
    settlement,
    upload,
)
from tidemill.scheduler.states import CANCELLABLE, ENDS, OPEN
from tidemill.storage import SqliteStore, open_store
from tidemill.storage.connections import open_reader
from tidemill.types import TERMINAL, BatchRecord, BatchStatus, FileFacts, Lease, LineState, Usage

L = LineState

_LEASE_S = 10


@dataclass
class Line:
    """What the model knows about one line."""

    custom_id: str
    state: LineState = L.QUEUED
    token: int = 0
    attempt: int = 0
    until: int = 0
    due: float = 0


@dataclass
class Batch:
    """What the model knows about one batch."""

    record: BatchRecord
    source: Input
    status: BatchStatus = S.VALIDATING
    lines: dict[int, Line] = field(default_factory=dict)
    rerun: int = 0

    def of(self, *states: LineState) -> list[Line]:
        return [line for line in self.lines.values() if line.state in states]

    def drain(self) -> None:
        """The last-line rule."""
        if self.status is S.IN_PROGRESS and not self.of(L.QUEUED, L.RUNNING):
            self.status = S.FINALIZING


class Schedules(RuleBasedStateMachine):
    """One store, a clock, and whoever comes."""

    batches = Bundle("batches")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        # Memory where there is such a folder: this is about order, not about the disk.
        memory = Path("/dev/shm")
        folder = memory if memory.is_dir() else None
        self.path = Path(tempfile.mkdtemp(prefix="tidemill-schedules-", dir=folder))
        self.clock = Hand()
        self.model: dict[int, Batch] = {}
        self.store = self._open()

    def teardown(self) -> None:
        try:
            for batch in self.model.values():
                self._bring_to_an_end(batch)
            self.what_is_stored_is_what_should_be()
        finally:
            self.loop.run(self.store.close())
            self.loop.close()
            shutil.rmtree(self.path)

    def _open(self) -> SqliteStore:
        store = open_store(self.path, clock=self.clock, tidy=False)
        self.loop.run(store.start())
        return store

    # --- what happens

    @rule(target=batches, n=st.integers(1, 6))
    def open(self, n: int) -> int:
        async def act() -> Batch:
            source = Input(n)
            file = await upload(self.store, source.pieces, facts=FileFacts(lines=n))
            return Batch(await self.store.batches.open(new_batch(file)), source)

        batch = self.loop.run(act())
        self.model[batch.record.seq] = batch
        return batch.record.seq

    def _add(self, batch: Batch, n: int) -> None:
        lines = batch.source.lines[:n]
        self.loop.run(self.store.lines.add(batch.record.seq, lines))
        for line in lines:
            batch.lines.setdefault(line.no, Line(line.custom_id))

    @rule(seq=batches, n=st.integers(0, 6))
    def add(self, seq: int, n: int) -> None:
        batch = self.model[seq]
        if batch.status in (S.VALIDATING, S.CANCELLING, S.EXPIRING):
            self._add(batch, n)

    @rule(seq=batches)
    def validated(self, seq: int) -> None:
        batch = self.model[seq]
        if batch.status is not S.VALIDATING:
            return
        self._add(batch, 6)
        self.loop.run(self.store.batches.model(seq, "m", len(batch.lines)))
        assert self._move(batch, frozenset({S.VALIDATING}), S.IN_PROGRESS)

    @rule(target=leases, seq=batches, n=st.integers(1, 4), holder=st.sampled_from("ab"))
    def lease(self, seq: int, n: int, holder: str) -> Any:
        batch = self.model[seq]
        until = int(self.clock.now) + _LEASE_S
        taken = self.loop.run(self.store.lines.lease(seq, n, holder, until))
        due = [
            no
            for no, line in sorted(batch.lines.items())
            if line.state is L.QUEUED and line.due <= self.clock.now
        ]
        expected = due[:n] if batch.status is S.IN_PROGRESS else []
        assert [one.no for one in taken] == expected
        texts = {
            line.no: text for line, text in zip(batch.source.lines, batch.source.texts, strict=True)
        }
        for one in taken:
            line = batch.lines[one.no]
            line.state, line.token, line.attempt = L.RUNNING, one.token, line.attempt + 1
            line.until, line.due = until, 0
            assert (one.attempt, one.line) == (line.attempt, texts[one.no])
        return multiple(*taken)

    def _holds(self, one: Lease) -> bool:
        line = self.model[one.batch_seq].lines[one.no]
        return line.state is L.RUNNING and line.token == one.token

    @rule(some=st.lists(st.tuples(leases, st.booleans()), max_size=6))
    def settle(self, some: list[tuple[Lease, bool]]) -> None:
        reports = self.loop.run(
            self.store.lines.settle(
                [settlement(one, ANSWER if ok else REFUSAL) for one, ok in some]
            )
        )
        accepted: Counter[int] = Counter()
        for one, ok in some:
            batch = self.model[one.batch_seq]
            if self._holds(one) and batch.status not in TERMINAL:
                batch.lines[one.no].state = L.SUCCEEDED if ok else L.FAILED
                accepted[one.batch_seq] += 1
        assert {r.batch_seq: r.accepted for r in reports} == {
            one.batch_seq: accepted[one.batch_seq] for one, _ in some
        }
        for report in reports:
            batch = self.model[report.batch_seq]
            batch.drain()
            left = batch.of(L.QUEUED, L.RUNNING)
            assert report.drained == (report.accepted > 0 and not left and batch.status in ENDS)

    @rule(some=st.lists(leases, min_size=2, max_size=6))
    def storm(self, some: list[Lease]) -> None:
        """Everybody reports everything at once, twice; the reports say who was first."""

        async def act() -> list[list[Any]]:
            calls = [[settlement(one)] for one in some for _ in range(2)]
            return await asyncio.gather(*(self.store.lines.settle(call) for call in calls))

        reports = self.loop.run(act())
        accepted: Counter[tuple[int, int]] = Counter()
        for one, (report,) in zip([one for one in some for _ in range(2)], reports, strict=True):
            accepted[one.batch_seq, one.token] += report.accepted
        for one in some:
            batch = self.model[one.batch_seq]
            open_now = self._holds(one) and batch.status not in TERMINAL
            assert accepted[one.batch_seq, one.token] == (1 if open_now else 0) or any(
                other is not one and other.token == one.token for other in some
            )
        for one in some:
            batch = self.model[one.batch_seq]
            if self._holds(one) and batch.status not in TERMINAL:
                batch.lines[one.no].state = L.SUCCEEDED
        for one in some:
            self.model[one.batch_seq].drain()

    @rule(some=st.lists(leases, max_size=4), wait=st.integers(0, 5), spend=st.booleans())
    def release(self, some: list[Lease], wait: int, spend: bool) -> None:
        due = self.clock.now + wait if wait else 0
        closing = self.loop.run(self.store.lines.release(some, due_at=due, spend=spend))
        for one in some:
            if self._holds(one):
                line = self.model[one.batch_seq].lines[one.no]
                line.state, line.due = L.QUEUED, due
                line.attempt -= 0 if spend else 1
        assert set(closing) == {
            one.batch_seq
            for one in some
            if self.model[one.batch_seq].status in (S.CANCELLING, S.EXPIRING)
        }

    @rule(seconds=st.integers(1, 15))
    def time_passes(self, seconds: int) -> None:
        self.clock.now += seconds
        now = int(self.clock.now)
        n = self.loop.run(self.store.lines.reclaim(now))
        assert n == self._requeue(lambda line: line.until < now)

    def _requeue(self, lapsed: Any) -> int:
        n = 0
        for batch in self.model.values():
            for line in batch.of(L.RUNNING):
                if lapsed(line):
                    line.state, line.due = L.QUEUED, 0
                    n += 1
                    batch.rerun += batch.status is S.IN_PROGRESS
        return n

    @rule()
    def restart(self) -> None:
        """As after a kill: nothing is handed over but what is on the disk."""
        self.loop.run(self.store.close())
        self.store = self._open()
        self._requeue(lambda line: True)

    def _move(self, batch: Batch, frm: frozenset[BatchStatus], to: BatchStatus) -> bool:
        moved = self.loop.run(self.store.batches.move(batch.record.seq, frm, to))
        assert (moved is not None) == (batch.status in frm)
        if moved is not None:
            batch.status = to
        return moved is not None

    @rule(seq=batches, to=st.sampled_from([S.CANCELLING, S.EXPIRING]))
    def stop(self, seq: int, to: BatchStatus) -> None:
        self._move(self.model[seq], CANCELLABLE, to)

    @rule(seq=batches)
    def give_up(self, seq: int) -> None:
        self._move(self.model[seq], frozenset({S.VALIDATING, S.IN_PROGRESS}), S.FAILED)

    @rule(seq=batches, n=st.integers(1, 4))
    def close(self, seq: int, n: int) -> None:
        batch = self.model[seq]
        if batch.status not in (S.CANCELLING, S.EXPIRING):
            return
        to = L.CANCELLED if batch.status is S.CANCELLING else L.EXPIRED
        waiting = [no for no, line in sorted(batch.lines.items()) if line.state is L.QUEUED][:n]
        assert self.loop.run(self.store.lines.close(seq, to, "code", "m", n)) == len(waiting)
        for no in waiting:
            batch.lines[no].state = to

    @rule(seq=batches)
    def end(self, seq: int) -> None:
        batch = self.model[seq]
        to = ENDS.get(batch.status)
        if to is not None and not batch.of(L.QUEUED, L.RUNNING):
            assert self._move(batch, frozenset({batch.status}), to)

    def _bring_to_an_end(self, batch: Batch) -> None:
        seq = batch.record.seq
        if batch.status in (S.VALIDATING, S.IN_PROGRESS):
            self.stop(seq, S.EXPIRING)
        if batch.status in OPEN:
            self.clock.now += _LEASE_S + 1
            self.time_passes(1)
            self.close(seq, 100)
            self.end(seq)
        assert batch.status in TERMINAL

    # --- what is true at every step

    @invariant()
    def what_is_stored_is_what_should_be(self) -> None:
        self.loop.run(self._check())

    async def _check(self) -> None:
        queued = 0
        for batch in self.model.values():
            await self._check_batch(batch)
            if batch.status in OPEN:
                queued += len(batch.of(L.QUEUED))
        assert await self.store.lines.queued() == queued
        conn = open_reader(self.path)
        try:
            wrong = conn.execute(_COUNTERS_THAT_ARE_NOT_THEIR_ROWS).fetchall()
        finally:
            conn.close()
        assert [dict(row) for row in wrong] == []

    async def _check_batch(self, batch: Batch) -> None:
        record = await fresh(self.store, batch.record)
        succeeded = len(batch.of(L.SUCCEEDED))
        failed = len(batch.of(L.FAILED, L.CANCELLED, L.EXPIRED))
        assert (record.status, record.completed, record.failed) == (batch.status, succeeded, failed)
        assert record.lines_rerun == batch.rerun
        assert record.usage == Usage(
            input=7 * succeeded, cached=2 * succeeded, output=5 * succeeded
        )
        assert await self.store.lines.running(record.seq) == len(batch.of(L.RUNNING))
        rows = await self.store.lines.rows(record.seq, 0, 1000)
        streams = {
            kind: b"".join(row.row + b"\n" for row in rows if row.kind == kind)
            for kind in ("output", "error")
        }
        for kind, end in (("output", "jsonl"), ("error", "errors.jsonl")):
            file = self.path / "incremental" / f"{record.id}.{end}"
            assert (file.read_bytes() if file.exists() else b"") == streams[kind]
        if batch.status in TERMINAL:
            await self._check_end(batch, record, streams)

    async def _check_end(
        self, batch: Batch, record: BatchRecord, streams: dict[str, bytes]
    ) -> None:
        found: Counter[str] = Counter()
        for kind, id in (("output", record.output_file_id), ("error", record.error_file_id)):
            data = b""
            if id is not None:
                file = await self.store.files.get(id, OWNER)
                assert file is not None
                data = await content(self.store, file)
                assert data
            assert data == streams[kind]
            found.update(json.loads(row)["custom_id"] for row in data.split(b"\n")[:-1])
        ended = batch.of(L.SUCCEEDED, L.FAILED, L.CANCELLED, L.EXPIRED)
        assert found == Counter(line.custom_id for line in ended)
        if batch.status is not S.FAILED:
            assert len(ended) == len(batch.lines) == record.total
            assert record.completed + record.failed == record.total


_COUNTERS_THAT_ARE_NOT_THEIR_ROWS = """
SELECT b.id FROM batches AS b
WHERE (b.queued, b.running, b.completed, b.failed) <> (
    SELECT coalesce(sum(state = 'queued'), 0), coalesce(sum(state = 'running'), 0),
        coalesce(sum(state = 'succeeded'), 0),
        coalesce(sum(state IN ('failed', 'cancelled', 'expired')), 0)
    FROM lines WHERE batch_seq = b.seq)
OR (b.completed, b.failed, b.output_bytes, b.error_bytes) <> (
    SELECT coalesce(sum(kind = 'output'), 0), coalesce(sum(kind = 'error'), 0),
        coalesce(sum((kind = 'output') * (length(row) + 1)), 0),
        coalesce(sum((kind = 'error') * (length(row) + 1)), 0)
    FROM results WHERE batch_seq = b.seq)
OR (b.input_tokens, b.cached_tokens, b.output_tokens, b.reasoning_tokens) <> (
    SELECT coalesce(sum(input), 0), coalesce(sum(cached), 0), coalesce(sum(output), 0),
        coalesce(sum(reasoning), 0)
    FROM usage WHERE batch_seq = b.seq)
"""


Schedules.TestCase.settings = settings(
    max_examples=15,
    stateful_step_count=40,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSchedules = Schedules.TestCase
