"""The local path: files checked and kept here, batches run here by the runner."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from tidemill import access, wire
from tidemill.backends.settlement import add_lines
from tidemill.errors import AtCapacity, NotCancellable
from tidemill.estimates import Examination, Tally
from tidemill.jsonl import Checker
from tidemill.ports import FileDraft, Store
from tidemill.scheduler.runner import Runner
from tidemill.scheduler.states import CANCELLABLE
from tidemill.types import (
    TERMINAL,
    Actor,
    BatchRecord,
    BatchStatus,
    FileFacts,
    FileRecord,
    NewBatch,
    Placement,
    Principal,
    Upload,
)

Place = Callable[[FileFacts, Upload], Awaitable[FileFacts]]
"""Decides where a checked file's batch runs; raises when nowhere."""


SAMPLE = 32
"""Bodies per model that an examination keeps, for counting their tokens."""


class LocalBackend:
    """Implements ``ports.Backend`` on the store and the runner."""

    name = "local"

    def __init__(
        self,
        store: Store,
        runner: Runner,
        *,
        knows: Callable[[str], bool],
        max_bytes: int,
        max_lines: int,
        max_answer: int = 0,
        place: Place | None = None,
    ) -> None:
        self._store = store
        self._runner = runner
        self._knows = knows
        self._max_bytes = max_bytes
        self._max_lines = max_lines
        self._max_answer = max_answer
        self._place = place

    async def accept(self, upload: Upload) -> FileRecord:
        """Check and store an upload in one pass; a refused or broken one leaves nothing behind."""
        checker = self._checker(upload)
        draft = await self._store.files.draft(upload.new)
        try:
            return await self._receive(upload, checker, draft)
        except BaseException:
            await draft.discard()
            raise

    async def examine(self, upload: Upload) -> Examination:
        """Check an upload and place it, as ``accept`` does, and keep nothing."""
        checker = self._checker(upload)
        tally = Tally(None, unsaid=self._max_answer, sample=SAMPLE)
        size = 0
        async for piece in upload.body:
            size += len(piece)
            checker.feed(piece)
            tally.feed(piece)
        _, facts = checker.finish()
        if self._place is not None:
            facts = await self._place(facts, upload)
        demand = tally.finish()
        samples = {model: tuple(bodies) for model, bodies in tally.samples.items()}
        return Examination(facts=facts, size=size, demand=demand, samples=samples)

    def _checker(self, upload: Upload) -> Checker:
        return Checker(
            max_bytes=self._max_bytes,
            max_lines=self._max_lines,
            knows=self._knows,
            permits=_permits(upload.principal),
            check=upload.validation == "upload",
        )

    async def _receive(self, upload: Upload, checker: Checker, draft: FileDraft) -> FileRecord:
        async for piece in upload.body:
            for chunk in checker.feed(piece).chunks:
                await draft.append(chunk)
        rest, facts = checker.finish()
        for chunk in rest.chunks:
            await draft.append(chunk)
        if self._place is not None:
            facts = await self._place(facts, upload)
        return await draft.commit(
            facts, expires_after_s=upload.expiry() if upload.expiry is not None else None
        )

    async def open(self, new: NewBatch) -> BatchRecord:
        """Create the batch; its lines are read in the background (``validating``)."""
        try:
            reserved = self._runner.intake_pool.reserve(new.file.facts.lines)
        except AtCapacity:
            # A repeated create needs no room: its batch is what fills the pool.
            first = await self._store.batches.repeated(new)
            if first is None:
                raise
            return first
        try:
            batch = await self._store.batches.open(new)
        except BaseException:
            self._runner.intake_pool.release(reserved)
            raise
        if batch.status in TERMINAL:  # the answer to a repeated create: there is nothing to run
            self._runner.intake_pool.release(reserved)
        else:
            self._runner.opened(batch, reserved)
        return batch

    async def refresh(self, batch: BatchRecord) -> BatchRecord:
        """The record is always current here."""
        return batch

    async def cancel(self, batch: BatchRecord, by: Actor | None = None) -> BatchRecord:
        """Start no further line; lines in flight finish and are kept."""
        moved = await self._store.batches.move(
            batch.seq, CANCELLABLE, BatchStatus.CANCELLING, by=by
        )
        if moved is not None:
            self._runner.cancelled(moved)
            return moved
        current = await self._store.batches.get(batch.id, None) or batch
        if current.status is BatchStatus.CANCELLING:
            self._runner.cancelled(current)  # it may have been moved on its way here
            return current
        shown = wire.shown_status(current.status)
        raise NotCancellable(f"Cannot cancel a batch with status '{shown}'.")

    async def cancel_stranded(
        self, batch: BatchRecord, why: str, by: Actor | None = None
    ) -> BatchRecord:
        """Bring a batch here that nobody else can end, and cancel it. Raises ``Incomplete`` when
        its input is gone."""
        batches = self._store.batches
        models = await add_lines(self._store, batch)
        # First cancelled, then here: none of its lines may start.
        await batches.move(batch.seq, CANCELLABLE, BatchStatus.CANCELLING, by=by)
        batch = await batches.get(batch.id, None) or batch
        if batch.status is BatchStatus.CANCELLING:
            await batches.place(batch.seq, Placement(reason=why))
            batch = await batches.get(batch.id, None) or batch
            self.take_over(batch, len(models) - batch.completed - batch.failed)
        return await self.cancel(batch, by)

    def content(
        self, file: FileRecord, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[bytes]:
        """Bytes of an input or result file."""
        return self._store.files.read(file, start, stop)

    # --- batches that come from a provider

    def fits(self, lines: int) -> bool:
        """False when so many lines are more than can ever wait here."""
        return self._runner.intake_pool.fits_ever(lines)

    def reserve(self, lines: int) -> int:
        """Room for a batch about to be created; returns what was taken. Raises ``AtCapacity``."""
        return self._runner.intake_pool.reserve(lines)

    def release(self, reserved: int) -> None:
        """Give it back."""
        self._runner.intake_pool.release(reserved)

    def take_over(self, batch: BatchRecord, queued: int) -> None:
        """Run a batch here from now on; ``queued`` of its lines wait."""
        self._runner.intake_pool.add(queued)
        self._runner.opened(batch, 0)


def _permits(who: Principal) -> Callable[[str], bool] | None:
    """Whether a key may use a model anywhere at all; where is decided once the file is known."""
    return partial(access.permits, who.limits) if who.limits else None
