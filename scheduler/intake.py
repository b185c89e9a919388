"""Reads a batch's file into its lines: the ``validating`` phase.

The stored bytes pass through the same checker as at upload, now with the batch's endpoint, and
every line becomes a row that says where its bytes are. Reading is resumable: a line that is there
already is left as it is, so a crash in the middle costs one more reading.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from tidemill.crash import crash_point
from tidemill.errors import InvalidFile, TidemillError
from tidemill.jsonl import Checker
from tidemill.ports import Store
from tidemill.scheduler.admission import IntakePool
from tidemill.types import BatchRecord, BatchStatus, FileFacts, FileRecord, Problem

log = structlog.get_logger()

PlaceLate = Callable[[BatchRecord, FileRecord, FileFacts], Awaitable[FileFacts]]
"""Where a file that was just checked runs; raises when nowhere."""

Permits = Callable[[BatchRecord], Awaitable[Callable[[str], bool] | None]]
"""Which models the key of a batch may use; None: all. Raises where it may do nothing any more."""

_VALIDATING = frozenset({BatchStatus.VALIDATING})
# A checked file was within the limits then; its batch must not fail because they shrank since.
_NO_LIMIT = 1 << 62


class Intake:
    """Takes batches through ``validating``."""

    def __init__(
        self,
        store: Store,
        pool: IntakePool,
        *,
        knows: Callable[[str], bool] | None = None,
        max_lines: int = _NO_LIMIT,
        place: PlaceLate | None = None,
        permits: Permits | None = None,
    ) -> None:
        self._store = store
        self.pool = pool
        self._knows = knows
        self._max_lines = max_lines
        self._place = place
        self._permits = permits

    async def read(self, batch: BatchRecord, reserved: int | None) -> BatchRecord | None:
        """Bring a batch's lines in; returns the batch as it then is, or None when it failed.

        One whose file is checked only now may turn out to belong to a provider: it is returned
        with that placement, and without lines.

        ``reserved`` is what the intake pool holds for it; None: nothing yet (after a restart).
        A batch that is cancelled or expires meanwhile is read to its end, because each of its
        lines needs a row.
        """
        file = await self._store.files.get(batch.input_file_id, None)
        if file is None:
            return await self._fail(
                batch,
                reserved or 0,
                Problem(
                    code="invalid_request",
                    message=f"The input file {batch.input_file_id} is gone.",
                    param="input_file_id",
                ),
            )
        if not self.pool.fits_ever(file.facts.lines):
            return await self._fail(
                batch,
                reserved or 0,
                Problem(
                    code="capacity_exceeded",
                    message=f"The batch has {file.facts.lines} lines, more than the "
                    f"{self.pool.capacity} that the intake pool can hold. Split the file.",
                ),
            )
        if reserved is None:
            reserved = file.facts.lines
            self.pool.reserved += reserved  # it had its place before the restart
        try:
            if not file.facts.checked:
                placed = await self._check(batch, file)
                if placed.placement.execution != "local":
                    self.pool.release(reserved)
                    return placed
            total, model = await self._add(batch, file)
        except InvalidFile as error:
            return await self._fail(batch, reserved, *error.problems)
        except TidemillError as error:
            problem = Problem(code=error.code or "batch_failed", message=error.message)
            return await self._fail(batch, reserved, problem)
        await self._store.batches.model(batch.seq, model, total)
        crash_point("batch.read.before_start")
        moved = await self._store.batches.move(batch.seq, _VALIDATING, BatchStatus.IN_PROGRESS)
        self.pool.release(reserved)
        self.pool.add(total)
        return moved or await self._store.batches.get(batch.id, None)

    async def _check(self, batch: BatchRecord, file: FileRecord) -> BatchRecord:
        """A first pass that adds nothing: no line may run, or be in the way, of a bad file."""
        permits = None if self._permits is None else await self._permits(batch)
        checker = self._checker(batch, self._max_lines, self._knows, permits)
        facts = await self._pass(file, checker, None)
        current = await self._store.batches.get(batch.id, None) or batch
        if self._place is None or current.status is not BatchStatus.VALIDATING:
            return current
        facts = await self._place(batch, file, facts)
        await self._store.batches.place(batch.seq, facts.placement, facts)
        return await self._store.batches.get(batch.id, None) or batch

    async def _add(self, batch: BatchRecord, file: FileRecord) -> tuple[int, str | None]:
        checker = self._checker(batch, _NO_LIMIT, None)
        facts = await self._pass(file, checker, batch)
        return facts.lines, facts.models[0] if len(facts.models) == 1 else None

    @staticmethod
    def _checker(
        batch: BatchRecord,
        max_lines: int,
        knows: Callable[[str], bool] | None,
        permits: Callable[[str], bool] | None = None,
    ) -> Checker:
        return Checker(
            max_bytes=_NO_LIMIT,
            max_lines=max_lines,
            knows=knows,
            permits=permits,
            endpoint=batch.endpoint,
        )

    async def _pass(
        self, file: FileRecord, checker: Checker, into: BatchRecord | None
    ) -> FileFacts:
        async for piece in self._store.files.read(file):
            lines = checker.feed(piece).lines
            if into is not None and lines:
                await self._store.lines.add(into.seq, lines)
        rest, facts = checker.finish()
        if into is not None and rest.lines:
            await self._store.lines.add(into.seq, rest.lines)
        return facts

    async def _fail(
        self, batch: BatchRecord, reserved: int, *problems: Problem
    ) -> BatchRecord | None:
        """Fail the batch; one that is being cancelled goes on towards its end instead."""
        self.pool.release(reserved)
        moved = await self._store.batches.move(
            batch.seq, _VALIDATING, BatchStatus.FAILED, problems=problems
        )
        if moved is not None:
            log.info("batch failed validation", batch=batch.id, problems=len(problems))
            return None
        return await self._store.batches.get(batch.id, None)
