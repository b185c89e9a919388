"""The provider path: batches run where the discount is, and the client's script cannot tell.

Ids are ours to the client and map to the provider's (``creation``); what the provider says is kept
(``upstreams``); results come home, or the batch goes on here (``ending``, ``settlement``).
Everything that happens after the create goes through ``look``: one look at a time per batch,
whoever asks for it (a client that polls, a cancel, the reconciler).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

import anyio
import msgspec
import structlog

from tidemill import clock, wire
from tidemill.backends import guard
from tidemill.backends.creation import Creation
from tidemill.backends.dialects import Dialect
from tidemill.backends.eligibility import Eligibility
from tidemill.backends.ending import TRIES, Ending, Here
from tidemill.backends.forwarding import ENDS, Forwarding, ProviderFailed, as_seen
from tidemill.backends.leftovers import Leftovers
from tidemill.backends.refusals import Failure, Meaning, error_of, told
from tidemill.backends.rewriting import body_defaults
from tidemill.backends.settlement import Incomplete, Settler
from tidemill.backends.upstreams import Upstreams
from tidemill.errors import AtCapacity, NotCancellable, OwnershipUnrecorded
from tidemill.ports import Store
from tidemill.scheduler.reconciler import Reconciler
from tidemill.scheduler.retry import Gate, backoff_s, jittered
from tidemill.scheduler.states import CANCELLABLE
from tidemill.types import (
    SERVER,
    TERMINAL,
    Actor,
    BatchRecord,
    BatchStatus,
    FileRecord,
    NewBatch,
    Problem,
    Refusal,
    Upload,
    UpstreamBatch,
)

log = structlog.get_logger()

LEFTOVERS = 0
"""Stands for no batch, but for what the provider still holds of those that have ended."""
_TRIES_TO_REACH = 12
"""Failed creates in a row before a batch that may run here does; about half an hour."""
_LATE_S = 900
"""A provider that ends batches by itself gets this long after the window to do so."""
_POLL_PATIENCE_S = 2.0
"""A client that polls waits this long for the provider, then gets the record as it is."""


class Local(Here, Protocol):
    """The local path, which keeps every upload."""

    async def accept(self, upload: Upload) -> FileRecord:
        """Check and store an upload."""


class ProviderBackend:
    """Implements ``ports.Backend`` on one provider."""

    def __init__(
        self,
        dialect: Dialect,
        store: Store,
        eligibility: Eligibility,
        *,
        gate: Gate,
        here: Local,
        interval_s: float = 300.0,
        refresh_s: float = 5.0,
        fallback_on_quota: bool = False,
        doubt: Callable[[], None] = lambda: None,
    ) -> None:
        """``doubt`` is called when the provider shows that it serves no Batch API any more."""
        self.name = dialect.provider.name
        self.dialect = dialect
        self._store = store
        self._here = here
        self._interval_s = interval_s
        self._refresh_s = refresh_s
        self._reconciler: Reconciler | None = None
        self._names = names = {
            ours: model.batch for ours, model in dialect.provider.models.items() if model.batch
        }
        self._forwarding = Forwarding(dialect, gate)
        self._upstreams = Upstreams(self.name, store)
        self._creation = Creation(dialect, store, self._forwarding, self._upstreams, names)
        self._ending = Ending(
            Settler(store, self._forwarding, dialect.provider),
            store,
            self._upstreams,
            eligibility,
            names,
            here=here,
            fallback_on_quota=fallback_on_quota,
            doubt=doubt,
        )
        self._doubt = doubt
        self._leftovers = Leftovers(self.name, store, self._forwarding, interval_s)

    # --- ports.Backend ------------------------------------------------------------------------

    async def accept(self, upload: Upload) -> FileRecord:
        """Keep our own copy, then hand the file to the provider."""
        file = await self._here.accept(upload)
        await self.take(file)
        return file

    async def take(self, file: FileRecord) -> None:
        """Upload our copy of a file. What the provider refuses for good is forgotten here, too.

        A provider that cannot take it now gets it when the batch is created. Raises the provider's
        own refusal, or ``OwnershipUnrecorded``.
        """
        try:
            await self._creation.upload(file, file.facts.endpoint or "")
        except ProviderFailed as failed:
            unserved = failed.failure.meaning is Meaning.UNSERVED
            if unserved:
                self._doubt()
            stays = unserved and not file.facts.placement.fallback
            if failed.failure.meaning is Meaning.REQUEST or stays:
                await self._store.files.delete(file.id, file.owner, SERVER)
                raise error_of(self.name, failed.failure, self._names) from failed
            log.warning("upload deferred", provider=self.name, file=file.id, why=str(failed))
        except OwnershipUnrecorded:
            await self._store.files.delete(file.id, file.owner, SERVER)
            raise

    async def open(self, new: NewBatch) -> BatchRecord:
        """Create the batch at the provider; the answer waits until its id is committed.

        A provider that cannot be reached gets the batch later: it is then ``validating``. Raises
        the provider's own refusal where the batch may not run here instead.
        """
        body_defaults(new.params, new.endpoint, self.dialect.provider.kind)
        async with self._creation.alone(new.file.seq):
            batch = await self._store.batches.open(new)
            known = await self._upstreams.get(batch.seq)
            if known is not None or batch.status is not BatchStatus.VALIDATING:
                return self.shown(batch)  # the repetition of a create whose answer was lost
            model = new.file.facts.models[0] if len(new.file.facts.models) == 1 else None
            await self._store.batches.model(batch.seq, model, new.file.facts.lines)
            up = await self._intend(batch, clock.now())
            try:
                up = await self._creation.create(batch, up)
            except ProviderFailed as failed:
                return await self._not_created(batch, up, failed.failure)
            except OwnershipUnrecorded:
                await self._creation.withdraw(batch)
                raise
            self._watch(batch.seq, min(self._refresh_s, self._interval_s))
            return self.shown(await self._fresh(batch))

    async def adopt(self, batch: BatchRecord) -> None:
        """Take a batch that was opened elsewhere; the provider gets it at the next look."""
        await self._intend(batch, clock.now())
        self._watch(batch.seq, 0.0)

    async def refresh(self, batch: BatchRecord) -> BatchRecord:
        """The record, looked up at the provider at most once every few seconds, whoever asks."""
        if batch.status in TERMINAL:
            return batch
        looked_at, tries = self._upstreams.looked(batch.seq)
        wait_s = self._backoff_s(tries) if tries else self._refresh_s
        if clock.now_f() - looked_at >= wait_s:
            with anyio.move_on_after(_POLL_PATIENCE_S):
                await self._look_now(batch.seq)
        return self.shown(await self._fresh(batch))

    async def cancel(self, batch: BatchRecord, by: Actor | None = None) -> BatchRecord:
        """Ask the provider first: what has ended there cannot be cancelled here.

        While the provider cannot be reached the batch is ``cancelling`` here, and is cancelled
        there as soon as it answers.
        """
        batch = await self._fresh(batch)
        if batch.placement.backend != self.name:
            return await self._here.cancel(batch, by)
        if batch.status in TERMINAL:
            raise NotCancellable(f"Cannot cancel a batch with status '{batch.status}'.")
        if batch.status not in CANCELLABLE:
            return self.shown(batch)
        up = await self._upstreams.get(batch.seq)
        if up is not None and up.id is not None:
            try:
                up = as_seen(up, await self._forwarding.cancel(up.id))
                await self._upstreams.note(up)
            except ProviderFailed as failed:
                if failed.failure.status == 409:
                    await self._look_now(batch.seq)
                    fresh = await self._fresh(batch)
                    if fresh.placement.backend != self.name:
                        return await self._here.cancel(fresh, by)
                    shown = wire.shown_status(fresh.status)
                    raise NotCancellable(
                        f"Cannot cancel a batch with status '{shown}'."
                    ) from failed
                log.warning("cancel deferred", provider=self.name, batch=batch.id, why=str(failed))
        await self._store.batches.move(batch.seq, CANCELLABLE, BatchStatus.CANCELLING, by=by)
        fresh = await self._fresh(batch)
        if fresh.placement.backend != self.name:  # it came here meanwhile
            return await self._here.cancel(fresh, by)
        self._watch(batch.seq, min(self._refresh_s, self._interval_s))
        return self.shown(fresh)

    def content(
        self, file: FileRecord, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[bytes]:
        """Bytes of our own copy: of the input as it was sent, of the results as they were settled,
        so that a provider's expiry loses nothing."""
        return self._store.files.read(file, start, stop)

    def shown(self, batch: BatchRecord) -> BatchRecord:
        """The record with the provider's counts and phase, as last seen; asks nobody."""
        return self._upstreams.shown(batch)

    # --- looking ------------------------------------------------------------------------------

    async def start(self, reconciler: Reconciler) -> None:
        """Take up what the store holds; from then on the reconciler calls ``look``."""
        self._reconciler = reconciler
        unsettled = await self._store.upstream.unsettled()
        known = {up.batch_seq for up in unsettled if up.provider == self.name}
        soon_s = min(self._refresh_s, self._interval_s)
        for batch in await self._store.batches.active():
            if batch.placement.backend != self.name:
                continue
            if batch.seq not in known:  # died between our row and the intent
                await self._intend(batch, batch.created_at)
                known.add(batch.seq)
        for batch_seq in known:  # also those that ended here before that was said of their provider
            self._watch(batch_seq, jittered(soon_s, by=1.0))
        self._watch(LEFTOVERS, jittered(self._interval_s, by=0.5))

    async def look(self, batch_seq: int) -> float | None:
        """Bring one batch up to date; returns seconds until the next look, None when it ended."""
        if batch_seq == LEFTOVERS:
            return jittered(await self._leftovers.clear())
        up = await self._upstreams.get(batch_seq)
        if up is None or up.settled_at is not None:
            return None
        batch = await self._store.batches.get(up.batch_id, None)
        if batch is None or batch.status in TERMINAL or batch.placement.backend != self.name:
            return await self._let_go(up)
        late_at = batch.expires_at + _LATE_S
        if self.dialect.expires_batches and up.id is not None and clock.now() >= late_at:
            moved = await self._store.batches.move(batch.seq, CANCELLABLE, BatchStatus.EXPIRING)
            batch = moved or await self._fresh(batch)
        stopped = await self._stopped(batch)
        try:
            up = await self._seen_now(batch, up, unwanted=stopped is not None)
            if up.status in ENDS:
                ended = await self._ending.settle(await self._fresh(batch), up, stopped)
                return None if ended else self._interval_s
        except (ProviderFailed, Incomplete) as problem:
            return await self._again(await self._fresh(batch), up, problem)
        age_s = clock.now() - up.intended_at
        return jittered(min(self._interval_s, max(10.0, age_s / 4)))

    async def _let_go(self, up: UpstreamBatch) -> float | None:
        """Nothing more is wanted of it: it may have ended here while its provider was not in the
        settings, and runs there still."""
        if up.id is not None and up.status not in ENDS:
            try:
                await self._forwarding.cancel(up.id)
            except ProviderFailed as failed:
                if failed.failure.meaning in (Meaning.TRANSIENT, Meaning.CREDENTIAL):
                    return self._interval_s
        await self._upstreams.settled(up)
        return None

    async def _stopped(self, batch: BatchRecord) -> Refusal | None:
        """Why its key lets it run no further."""
        file = await self._store.files.get(batch.input_file_id, None)
        models = () if file is None else file.facts.models
        return await guard.stopped(self._store.accounts, batch, models, self.name)

    async def _seen_now(
        self, batch: BatchRecord, up: UpstreamBatch, *, unwanted: bool
    ) -> UpstreamBatch:
        if up.id is None:
            if unwanted or batch.status is BatchStatus.CANCELLING:
                found = await self._creation.find(batch, up)
                if found is None:
                    return msgspec.structs.replace(up, status="cancelled")
                up = found
            else:
                async with self._creation.alone(batch.input_file_seq):
                    # It may have been created while this look waited for its turn.
                    up = await self._upstreams.get(batch.seq) or up
                    if up.id is None:
                        up = await self._creation.create(batch, up, again=True)
        assert up.id is not None
        unwanted |= batch.status in (BatchStatus.CANCELLING, BatchStatus.EXPIRING)
        if unwanted and up.status not in {"cancelling", *ENDS}:
            try:
                answer = await self._forwarding.cancel(up.id)
            except ProviderFailed as failed:
                if failed.failure.status != 409:
                    raise
                answer = await self._forwarding.retrieve(up.id)
        else:
            answer = await self._forwarding.retrieve(up.id)
        up = msgspec.structs.replace(as_seen(up, answer), tries=up.tries)
        if up.status not in ENDS:
            up = msgspec.structs.replace(up, tries=0)
        await self._upstreams.note(up)
        if up.status in ("in_progress", "finalizing"):
            validating = frozenset({BatchStatus.VALIDATING})
            await self._store.batches.move(batch.seq, validating, BatchStatus.IN_PROGRESS)
        return up

    async def _again(
        self, batch: BatchRecord, up: UpstreamBatch, problem: ProviderFailed | Incomplete
    ) -> float | None:
        """After a look that failed: when to look again, or what becomes of the batch."""
        current = await self._upstreams.get(batch.seq) or up
        up = msgspec.structs.replace(current, tries=current.tries + 1, looked_at=clock.now())
        await self._upstreams.note(up)
        wait_s = self._backoff_s(up.tries)
        if isinstance(problem, Incomplete):
            log.warning("results incomplete", batch=batch.id, why=str(problem), tries=up.tries)
            return wait_s
        failure = problem.failure
        log.warning("look failed", provider=self.name, batch=batch.id, why=failure.message)
        passing = failure.meaning in (Meaning.TRANSIENT, Meaning.CREDENTIAL)
        if up.id is None and failure.certain and not passing:
            problems = (_problem_of(failure), *failure.problems)
            return await self._give_up(batch, up, "failed", problems)
        if failure.meaning is Meaning.GONE and up.status not in ENDS and up.tries >= TRIES:
            gone = Problem(
                code="batch_not_found",
                message=f"The provider no longer knows this batch: {failure.message}",
            )
            return await self._give_up(batch, up, "failed", (gone,))
        if up.id is None and clock.now() >= batch.expires_at:
            return await self._give_up(batch, up, "expired", ())
        may_run_here = batch.placement.fallback and self._here.fits(batch.total)
        if up.id is None and may_run_here and up.tries >= _TRIES_TO_REACH:
            why = told(failure, await self._ending.names(batch, up)).message
            await self._ending.run_here(batch, up, f"it could not be reached ({why})")
            return None
        if failure.retry_after_s is not None:
            wait_s = max(wait_s, min(failure.retry_after_s, self._interval_s))
        return wait_s

    async def _give_up(
        self, batch: BatchRecord, up: UpstreamBatch, status: str, problems: tuple[Problem, ...]
    ) -> float | None:
        up = msgspec.structs.replace(up, status=status, problems=problems)
        return None if await self._ending.settle(batch, up) else self._interval_s

    async def _not_created(
        self, batch: BatchRecord, up: UpstreamBatch, failure: Failure
    ) -> BatchRecord:
        """After a create that failed: run here, try later, or pass the refusal on."""
        batch, up = await self._fresh(batch), await self._upstreams.get(batch.seq) or up
        problems = (_problem_of(failure), *failure.problems)
        await self._ending.learn(batch, up, failure.meaning, problems)
        failure = told(failure, await self._ending.names(batch, up))
        if (
            batch.placement.fallback
            and self._ending.reruns(failure.meaning)
            and self._here.fits(batch.total)
        ):
            return await self._run_here(batch, up, failure.message)
        if failure.meaning is Meaning.TRANSIENT:
            log.warning("create deferred", provider=self.name, batch=batch.id, why=failure.message)
            self._watch(batch.seq, failure.retry_after_s or self._backoff_s(1))
            return self.shown(await self._fresh(batch))
        await self._creation.withdraw(batch)
        raise error_of(self.name, failure)

    async def _run_here(self, batch: BatchRecord, up: UpstreamBatch, why: str) -> BatchRecord:
        """Run a batch here whose create waits for its answer, if there is room for it now."""
        try:
            reserved = self._here.reserve(batch.total)
        except AtCapacity:
            await self._creation.withdraw(batch)
            raise
        try:
            await self._ending.run_here(batch, up, why)
        finally:
            self._here.release(reserved)
        return await self._fresh(batch)

    # --- small things -------------------------------------------------------------------------

    async def _intend(self, batch: BatchRecord, at: int) -> UpstreamBatch:
        up = UpstreamBatch(
            batch_seq=batch.seq, batch_id=batch.id, provider=self.name, intended_at=at
        )
        await self._store.upstream.keep_batch(up)
        return up

    async def _fresh(self, batch: BatchRecord) -> BatchRecord:
        return await self._store.batches.get(batch.id, None) or batch

    def _backoff_s(self, tries: int) -> float:
        first_s = min(2.0, max(0.02, self._refresh_s))
        return backoff_s(tries, first_s=first_s, longest_s=self._interval_s)

    def _watch(self, batch_seq: int, in_s: float) -> None:
        if self._reconciler is not None:
            self._reconciler.watch(batch_seq, self.name, in_s)

    async def _look_now(self, batch_seq: int) -> None:
        if self._reconciler is not None:
            await self._reconciler.look_now(batch_seq, self.name)


def _problem_of(failure: Failure) -> Problem:
    return Problem(
        code=failure.code or "provider_refused", message=failure.message, param=failure.param
    )
