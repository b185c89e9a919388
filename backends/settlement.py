"""Brings a forwarded batch's results home: rows, usage, counts and the end state.

Both result files are read as streams and settled a few hundred rows at a time. A line is settled
once however often its row is read, so that a settlement that breaks off is simply begun again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

import msgspec
import structlog

from tidemill import clock, wire
from tidemill.backends.forwarding import Forwarding, ProviderFailed
from tidemill.backends.refusals import Meaning
from tidemill.backends.rewriting import custom_id_and_outcome, done_at, in_our_name
from tidemill.jsonl import Checker
from tidemill.lines import Splitter, Text
from tidemill.ports import Store
from tidemill.providers import Provider
from tidemill.types import (
    Answer,
    BatchRecord,
    BatchStatus,
    LineState,
    Outcome,
    Refusal,
    Settlement,
    UpstreamBatch,
    Usage,
)

log = structlog.get_logger()

_ROWS = 400
"""Rows per commit."""
_NO_LIMIT = 1 << 62
_SKEW_S = 300

_OPEN = frozenset({BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS})
CLOSINGS: dict[BatchStatus, tuple[LineState, str, str]] = {
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
_MISSING = Refusal(
    code="result_missing", message="The provider's results have no row for this request."
)


class Incomplete(Exception):
    """The provider's results are not all there, or not readable; reading again may help."""


async def add_lines(store: Store, batch: BatchRecord) -> dict[str, str]:
    """Bring a forwarded batch's lines into the store, as a local batch has them from the start.

    Returns the model of each line by ``custom_id``. Raises ``Incomplete`` when our copy of the
    input is gone.
    """
    file = await store.files.get(batch.input_file_id, None)
    if file is None:
        raise Incomplete(f"the input file {batch.input_file_id} is gone")
    checker = Checker(_NO_LIMIT, _NO_LIMIT, None, endpoint=batch.endpoint)
    models: dict[str, str] = {}
    async for piece in store.files.read(file):
        lines = checker.feed(piece).lines
        await store.lines.add(batch.seq, lines)
        models.update((line.custom_id, line.model) for line in lines)
    rest, facts = checker.finish()
    await store.lines.add(batch.seq, rest.lines)
    models.update((line.custom_id, line.model) for line in rest.lines)
    model = facts.models[0] if len(facts.models) == 1 else None
    await store.batches.model(batch.seq, model, len(models))
    return models


class Settler:
    """Settles the batches of one provider."""

    def __init__(self, store: Store, forwarding: Forwarding, provider: Provider) -> None:
        self._store = store
        self._forwarding = forwarding
        self._provider = provider

    async def add_lines(self, batch: BatchRecord) -> dict[str, str]:
        """As the function of this name."""
        return await add_lines(self._store, batch)

    async def rows(
        self,
        batch: BatchRecord,
        up: UpstreamBatch,
        models: Mapping[str, str],
        *,
        ids: Mapping[str, str],
        unrun: bool,
        final: bool,
    ) -> int:
        """Settle what both result files say; returns how many lines were answered in them.

        ``models`` has each line's model by ``custom_id``, ``ids`` the provider's ids by ours.
        ``unrun`` False leaves the lines that the provider did not run in the queue. ``final``
        makes do with what can be had: rows that are no rows and files that are gone are passed
        over. Else raises ``ProviderFailed`` when a file cannot be read, ``Incomplete`` for a row.
        """
        answered = 0
        for file_id in (up.output_id, up.error_id):
            if file_id is None:
                continue
            try:
                answered += await self._file(batch, up, models, ids, file_id, unrun, final)
            except ProviderFailed as failed:
                if not final or failed.failure.meaning is not Meaning.GONE:
                    raise
                log.error("results are gone", batch=batch.id, why=str(failed))
        return answered

    async def _file(
        self,
        batch: BatchRecord,
        up: UpstreamBatch,
        models: Mapping[str, str],
        ids: Mapping[str, str],
        file_id: str,
        unrun: bool,
        final: bool,
    ) -> int:
        answered = 0
        settled: list[Settlement] = []
        async with aclosing(self._texts(file_id)) as texts:
            async for text in texts:
                try:
                    custom_id, outcome = _read(text)
                except Incomplete as exc:
                    if not final:
                        raise
                    log.error("row passed over", batch=batch.id, why=str(exc))
                    continue
                ours = models.get(custom_id)
                if ours is None:
                    log.warning("row of no line", batch=batch.id, custom_id=custom_id)
                    continue
                ran = isinstance(outcome, Answer) or outcome.status_code is not None
                if not ran and not unrun:
                    continue
                answered += isinstance(outcome, Answer)
                settled.append(self._settlement(batch, up, ids, custom_id, ours, outcome))
                if len(settled) >= _ROWS:
                    await self._store.upstream.settle(settled)
                    settled = []
        if settled:
            await self._store.upstream.settle(settled)
        return answered

    async def end(
        self, batch: BatchRecord, up: UpstreamBatch, stopped: Refusal | None = None
    ) -> BatchRecord:
        """Close the lines that no row was found for and bring the batch to its end state.

        Lines that were ``stopped`` say why; as where lines are stopped here, the batch completes.
        Returns the batch as it is then. A failed batch without any row just fails; all others
        have every line in one of the two files.
        """
        batch = await self._fresh(batch)
        if batch.status in _OPEN and up.status == "failed":
            if batch.completed + batch.failed:
                await self._close(
                    batch,
                    LineState.CANCELLED,
                    "batch_failed",
                    "This request was not executed because the batch failed at its provider.",
                )
            batch = await self._fresh(batch)
            frm = frozenset({BatchStatus.FINALIZING, *_OPEN})
            moved = await self._store.batches.move(
                batch.seq, frm, BatchStatus.FAILED, problems=up.problems
            )
            return moved or await self._fresh(batch)
        if batch.status in _OPEN:
            why = stopped or _MISSING
            await self._close(batch, LineState.CANCELLED, why.code, why.message)
            batch = await self._fresh(batch)
        if batch.status in CLOSINGS:
            await self._close(batch, *CLOSINGS[batch.status])
        ends = {
            BatchStatus.FINALIZING: BatchStatus.COMPLETED,
            BatchStatus.CANCELLING: BatchStatus.CANCELLED,
            BatchStatus.EXPIRING: BatchStatus.EXPIRED,
        }
        if (to := ends.get(batch.status)) is None:
            return batch
        moved = await self._store.batches.move(batch.seq, frozenset({batch.status}), to)
        return moved or await self._fresh(batch)

    async def begin(
        self, batch: BatchRecord, up: UpstreamBatch, *, stopped: bool = False
    ) -> BatchRecord:
        """Move our batch into the state from which it reaches the provider's end state, or, where
        it was ``stopped``, completion."""
        store = self._store.batches
        towards = {"expired": BatchStatus.EXPIRING, "cancelled": BatchStatus.CANCELLING}
        to = BatchStatus.IN_PROGRESS
        if not stopped:
            to = towards.get(up.status, to)
        frm = frozenset({BatchStatus.VALIDATING}) if to is BatchStatus.IN_PROGRESS else _OPEN
        moved = await store.move(batch.seq, frm, to)
        return moved or await self._fresh(batch)

    async def _close(self, batch: BatchRecord, to: LineState, code: str, message: str) -> None:
        while await self._store.lines.close(batch.seq, to, code, message):
            pass

    async def _fresh(self, batch: BatchRecord) -> BatchRecord:
        return await self._store.batches.get(batch.id, None) or batch

    async def _texts(self, file_id: str) -> AsyncGenerator[Text]:
        splitter = Splitter()
        async with aclosing(self._forwarding.content(file_id)) as pieces:
            async for piece in pieces:
                for text in splitter.feed(piece):
                    yield text
        for text in splitter.finish():
            yield text

    def _settlement(
        self,
        batch: BatchRecord,
        up: UpstreamBatch,
        ids: Mapping[str, str],
        custom_id: str,
        ours: str,
        outcome: Outcome,
    ) -> Settlement:
        model = self._provider.models.get(ours)
        theirs = ours if model is None or model.batch is None else model.batch
        outcome = in_our_name(outcome, ours, theirs, ids)
        if isinstance(outcome, Refusal):
            outcome = self._forwarding.discreet(outcome)
        answered = isinstance(outcome, Answer)
        earliest, latest = up.intended_at - _SKEW_S, clock.now()
        if earliest <= up.ended_at < latest:
            latest = up.ended_at  # results may be read long after the work was done
        return Settlement(
            batch_seq=batch.seq,
            no=0,
            token=0,
            ok=answered,
            row=wire.result_row(custom_id, outcome),
            usage=outcome.usage if isinstance(outcome, Answer) else Usage(),
            model=ours,
            owner=batch.owner,
            key_id=batch.key_id,
            custom_id=custom_id,
            finished_at=done_at(outcome.body, earliest, latest)
            if isinstance(outcome, Answer)
            else latest,
            execution=self._provider.name,
            tier="batch",
        )


def _read(text: Text) -> tuple[str, Outcome]:
    try:
        return custom_id_and_outcome(text.data)
    except msgspec.DecodeError as exc:
        raise Incomplete(f"row {text.no} of a result file is not readable: {exc}") from exc
