"""The provider path: batches run where the discount is, and the client's script cannot tell.

Ids are ours to the client and map to the provider's. What is committed first decides what a crash
leaves behind::

    our batch row ──► intent ──► create upstream ──► its id ──► answer
                                        │
                    died here: found by the id in its metadata, and adopted

Everything that happens later goes through ``look``: one look at a time per batch, whoever asks
for it (a client that polls, a cancel, the reconciler).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import structlog

from tidemill import clock, wire
from tidemill.backends.dialects import Dialect
from tidemill.backends.eligibility import MIXED, Eligibility
from tidemill.backends.forwarding import Forwarding, ProviderFailed, as_seen
from tidemill.backends.refusals import (
    Failure,
    Meaning,
    error_of,
    meaning_of_problems,
    named_models,
)
from tidemill.backends.rewriting import Outbound, body_defaults, in_our_words
from tidemill.backends.settlement import Incomplete, Settler
from tidemill.crash import crash_point
from tidemill.errors import NotCancellable, OwnershipUnrecorded, TidemillError
from tidemill.ports import Store
from tidemill.scheduler.reconciler import Reconciler
from tidemill.scheduler.retry import Gate, backoff_s, jittered
from tidemill.scheduler.states import CANCELLABLE
from tidemill.types import (
    TERMINAL,
    BatchParams,
    BatchRecord,
    BatchStatus,
    FileRecord,
    NewBatch,
    Placement,
    Problem,
    Upload,
    UpstreamBatch,
    UpstreamFile,
)

log = structlog.get_logger()

Keep = Callable[[Upload], Awaitable[FileRecord]]
Takeover = Callable[[BatchRecord, int], None]
"""Told of a batch that runs here from now on, and how many of its lines are queued."""

ENDS = frozenset({"completed", "failed", "expired", "cancelled"})
_TRIES_TO_REACH = 12
"""Failed creates in a row before a batch that may run here does; about half an hour."""
_TRIES = 6
"""How often a 404 for a batch, or results with missing rows, are asked for again."""
_POLL_PATIENCE_S = 2.0
"""A client that polls waits this long for the provider, then gets the record as it is."""
_LATCH_S = 900
_EXPIRY_MARGIN_S = 600


class ProviderBackend:
    """Implements ``ports.Backend`` on one provider."""

    def __init__(
        self,
        dialect: Dialect,
        store: Store,
        eligibility: Eligibility,
        *,
        gate: Gate,
        keep: Keep,
        takeover: Takeover,
        interval_s: float = 300.0,
        refresh_s: float = 5.0,
        fallback_on_quota: bool = False,
    ) -> None:
        self.name = dialect.provider.name
        self.dialect = dialect
        self._store = store
        self._eligibility = eligibility
        self._forwarding = Forwarding(dialect, gate)
        self._settler = Settler(store, self._forwarding, dialect.provider)
        self._keep = keep
        self._takeover = takeover
        self._interval_s = interval_s
        self._refresh_s = refresh_s
        self._fallback_on_quota = fallback_on_quota
        self._names = {
            ours: model.batch for ours, model in dialect.provider.models.items() if model.batch
        }
        self._creating: dict[int, tuple[anyio.Lock, int]] = {}
        self._seen: dict[int, UpstreamBatch] = {}
        self._reconciler: Reconciler | None = None

    # --- ports.Backend ------------------------------------------------------------------------

    async def accept(self, upload: Upload) -> FileRecord:
        """Keep our own copy, then hand the file to the provider."""
        file = await self._keep(upload)
        await self.take(file)
        return file

    async def take(self, file: FileRecord) -> None:
        """Upload our copy of a file. What the provider refuses for good is forgotten here, too.

        A provider that cannot take it now gets it when the batch is created. Raises the provider's
        own refusal, or ``OwnershipUnrecorded``.
        """
        try:
            await self._upload(file, file.facts.endpoint or "", BatchParams())
        except ProviderFailed as failed:
            if failed.failure.meaning is Meaning.REQUEST:
                await self._store.files.delete(file.id, file.owner)
                raise error_of(self.name, failed.failure) from failed
            log.warning("upload deferred", provider=self.name, file=file.id, why=str(failed))
        except OwnershipUnrecorded:
            await self._store.files.delete(file.id, file.owner)
            raise

    async def open(self, new: NewBatch) -> BatchRecord:
        """Create the batch at the provider; the answer waits until its id is committed.

        A provider that cannot be reached gets the batch later: it is then ``validating``. Raises
        the provider's own refusal where the batch may not run here instead.
        """
        body_defaults(new.params, new.endpoint, self.dialect.provider.kind)
        async with self._alone(new.file.seq):
            batch = await self._store.batches.open(new)
            known = await self._store.upstream.batch(batch.seq)
            if known is not None or batch.status is not BatchStatus.VALIDATING:
                return self.shown(batch)  # the repetition of a create whose answer was lost
            model = new.file.facts.models[0] if len(new.file.facts.models) == 1 else None
            await self._store.batches.model(batch.seq, model, new.file.facts.lines)
            up = UpstreamBatch(
                batch_seq=batch.seq,
                batch_id=batch.id,
                provider=self.name,
                intended_at=clock.now(),
            )
            await self._store.upstream.keep_batch(up)
            try:
                up = await self._create(batch, up)
            except ProviderFailed as failed:
                return await self._not_created(batch, up, failed.failure)
            except OwnershipUnrecorded:
                await self._store.upstream.withdraw(batch.seq)
                raise
            self._watch(batch.seq, min(self._refresh_s, self._interval_s))
            return self.shown(await self._fresh(batch))

    async def refresh(self, batch: BatchRecord) -> BatchRecord:
        """The record, looked up at the provider at most once every few seconds, whoever asks."""
        if batch.status in TERMINAL:
            return batch
        up = self._seen.get(batch.seq) or await self._store.upstream.batch(batch.seq)
        if up is None or clock.now() - up.looked_at >= self._refresh_s:
            with anyio.move_on_after(_POLL_PATIENCE_S):
                await self._look_now(batch.seq)
        return self.shown(await self._fresh(batch))

    async def cancel(self, batch: BatchRecord) -> BatchRecord:
        """Ask the provider first: what has ended there cannot be cancelled here.

        While the provider cannot be reached the batch is ``cancelling`` here, and is cancelled
        there as soon as it answers.
        """
        batch = await self._fresh(batch)
        if batch.status in TERMINAL:
            raise NotCancellable(f"Cannot cancel a batch with status '{batch.status}'.")
        if batch.status not in CANCELLABLE:
            return self.shown(batch)
        up = await self._store.upstream.batch(batch.seq)
        if up is not None and up.id is not None:
            try:
                up = as_seen(up, await self._forwarding.cancel(up.id))
                await self._note(up)
            except ProviderFailed as failed:
                if failed.failure.status == 409:
                    await self._look_now(batch.seq)
                    fresh = await self._fresh(batch)
                    shown = wire.shown_status(fresh.status)
                    raise NotCancellable(
                        f"Cannot cancel a batch with status '{shown}'."
                    ) from failed
                log.warning("cancel deferred", provider=self.name, batch=batch.id, why=str(failed))
        moved = await self._store.batches.move(batch.seq, CANCELLABLE, BatchStatus.CANCELLING)
        self._watch(batch.seq, min(self._refresh_s, self._interval_s))
        return self.shown(moved or await self._fresh(batch))

    def content(
        self, file: FileRecord, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[bytes]:
        """Bytes of our own copy: of the input as it was sent, of the results as they were settled,
        so that a provider's expiry loses nothing."""
        return self._store.files.read(file, start, stop)

    def shown(self, batch: BatchRecord) -> BatchRecord:
        """The record with the provider's counts and phase, as last seen; asks nobody."""
        up = self._seen.get(batch.seq)
        if up is None or batch.status in TERMINAL or batch.placement.backend != self.name:
            return batch
        completed = max(batch.completed, min(up.completed, batch.total))
        failed = max(batch.failed, min(up.failed, batch.total - completed))
        batch = msgspec.structs.replace(batch, completed=completed, failed=failed)
        ending = up.status == "finalizing" or up.status in ENDS
        if ending and batch.status is BatchStatus.IN_PROGRESS:
            return msgspec.structs.replace(
                batch, status=BatchStatus.FINALIZING, finalizing_at=up.looked_at
            )
        return batch

    # --- looking ------------------------------------------------------------------------------

    async def start(self, reconciler: Reconciler) -> None:
        """Take up what the store holds; from then on the reconciler calls ``look``."""
        self._reconciler = reconciler
        known = {up.batch_seq for up in await self._store.upstream.unsettled()}
        for batch in await self._store.batches.active():
            if batch.placement.backend != self.name:
                continue
            if batch.seq not in known:  # died between our row and the intent
                await self._store.upstream.keep_batch(
                    UpstreamBatch(
                        batch_seq=batch.seq,
                        batch_id=batch.id,
                        provider=self.name,
                        intended_at=batch.created_at,
                    )
                )
            self._watch(batch.seq, jittered(min(self._refresh_s, self._interval_s), by=1.0))

    async def look(self, batch_seq: int) -> float | None:
        """Bring one batch up to date; returns seconds until the next look, None when it ended."""
        up = await self._store.upstream.batch(batch_seq)
        if up is None or up.settled_at is not None:
            return None
        batch = await self._store.batches.get(up.batch_id, None)
        if batch is None or batch.status in TERMINAL or batch.placement.backend != self.name:
            await self._settled(up)
            return None
        try:
            up = await self._seen_now(batch, up)
            if up.status in ENDS:
                await self._settle(await self._fresh(batch), up)
                return None
        except (ProviderFailed, Incomplete) as problem:
            return await self._again(await self._fresh(batch), up, problem)
        age_s = clock.now() - up.intended_at
        return jittered(min(self._interval_s, max(10.0, age_s / 4)))

    async def _seen_now(self, batch: BatchRecord, up: UpstreamBatch) -> UpstreamBatch:
        if up.id is None:
            if batch.status is BatchStatus.CANCELLING:
                found = await self._forwarding.find(batch.id, up.intended_at)
                if found is None:
                    return msgspec.structs.replace(up, status="cancelled")
                up = await self._record(batch, as_seen(up, found))
            else:
                async with self._alone(batch.input_file_seq):
                    up = await self._create(batch, up, search=True)
        assert up.id is not None
        if batch.status is BatchStatus.CANCELLING and up.status not in {"cancelling", *ENDS}:
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
        await self._note(up)
        if up.status in ("in_progress", "finalizing"):
            validating = frozenset({BatchStatus.VALIDATING})
            await self._store.batches.move(batch.seq, validating, BatchStatus.IN_PROGRESS)
        return up

    async def _again(
        self, batch: BatchRecord, up: UpstreamBatch, problem: ProviderFailed | Incomplete
    ) -> float | None:
        """After a look that failed: when to look again, or what becomes of the batch."""
        current = await self._store.upstream.batch(batch.seq) or up
        up = msgspec.structs.replace(current, tries=current.tries + 1, looked_at=clock.now())
        await self._note(up)
        wait_s = backoff_s(up.tries, first_s=2.0, longest_s=self._interval_s)
        if isinstance(problem, Incomplete):
            log.warning("results incomplete", batch=batch.id, why=str(problem), tries=up.tries)
            return wait_s
        failure = problem.failure
        log.warning("look failed", provider=self.name, batch=batch.id, why=failure.message)
        if (
            up.id is None
            and failure.certain
            and failure.meaning
            not in (
                Meaning.TRANSIENT,
                Meaning.CREDENTIAL,
            )
        ):
            problems = (_problem_of(failure), *failure.problems)
            return await self._give_up(batch, up, "failed", problems)
        if failure.meaning is Meaning.GONE and up.status not in ENDS and up.tries >= _TRIES:
            gone = Problem(
                code="batch_not_found",
                message=f"The provider no longer knows this batch: {failure.message}",
            )
            return await self._give_up(batch, up, "failed", (gone,))
        if up.id is None and clock.now() >= batch.expires_at:
            return await self._give_up(batch, up, "expired", ())
        if up.id is None and batch.placement.fallback and up.tries >= _TRIES_TO_REACH:
            await self._run_here(batch, up, f"it could not be reached ({failure.message})")
            return None
        if failure.retry_after_s is not None:
            wait_s = max(wait_s, min(failure.retry_after_s, self._interval_s))
        return wait_s

    async def _give_up(
        self, batch: BatchRecord, up: UpstreamBatch, status: str, problems: tuple[Problem, ...]
    ) -> float | None:
        await self._settle(batch, msgspec.structs.replace(up, status=status, problems=problems))
        return None

    # --- creating -----------------------------------------------------------------------------

    async def _upload(
        self, file: FileRecord, endpoint: str, params: BatchParams, *, anew: bool = False
    ) -> str:
        """The provider's id of a file, uploading it unless a copy is there.

        A batch with parameters of its own gets a copy of its own, with them in its lines.
        """
        defaults = body_defaults(params, endpoint, self.dialect.provider.kind)
        if not defaults and not anew:
            known = await self._store.upstream.file(file.seq, self.name)
            if known is not None and (
                known.expires_at is None or known.expires_at > clock.now() + _EXPIRY_MARGIN_S
            ):
                return known.id
        spelled = self.dialect.spelled(endpoint)
        outbound = Outbound(
            {ours: self._names[ours] for ours in file.facts.models if ours in self._names},
            url=None if spelled == endpoint else spelled,
            defaults=defaults,
        )
        id, expires_at = await self._forwarding.upload(
            file.filename, self._store.files.read(file), outbound
        )
        if not defaults:
            copy = UpstreamFile(
                file_seq=file.seq,
                provider=self.name,
                id=id,
                created_at=clock.now(),
                expires_at=expires_at,
            )
            try:
                await self._store.upstream.keep_file(copy)
            except TidemillError as exc:
                await self._undo(self._forwarding.delete_file(id), "file", id)
                raise _unrecorded() from exc
        return id

    async def _create(
        self, batch: BatchRecord, up: UpstreamBatch, *, search: bool = False
    ) -> UpstreamBatch:
        """Create the batch at the provider and record its id.

        With ``search`` it is looked for first: an earlier attempt's answer may have been lost.
        Raises ``ProviderFailed`` and ``OwnershipUnrecorded``.
        """
        found = await self._forwarding.find(batch.id, up.intended_at) if search else None
        if found is None:
            found = await self._create_or_find(batch, up)
        crash_point("provider.create.after_answer")
        return await self._record(batch, as_seen(up, found))

    async def _create_or_find(self, batch: BatchRecord, up: UpstreamBatch) -> dict[str, Any]:
        file = await self._store.files.get(batch.input_file_id, None)
        if file is None:
            raise ProviderFailed(
                Failure(meaning=Meaning.REQUEST, status=400, message="The input file is gone.")
            )
        file_id = await self._upload(file, batch.endpoint, batch.params)
        try:
            return await self._forwarding.create(batch, file_id)
        except ProviderFailed as failed:
            if file_id in failed.failure.message:
                # The provider has lost or expired its copy; ours is still here.
                file_id = await self._upload(file, batch.endpoint, batch.params, anew=True)
                return await self._forwarding.create(batch, file_id)
            if failed.failure.certain:
                raise
            # It may have been created although no answer came.
            found = await self._forwarding.find(batch.id, up.intended_at)
            if found is None:
                raise
            return found

    async def _record(self, batch: BatchRecord, up: UpstreamBatch) -> UpstreamBatch:
        """Commit the provider's id; when that fails the provider's batch is cancelled."""
        assert up.id is not None
        try:
            await self._note(up)
        except TidemillError as exc:
            await self._undo(self._forwarding.cancel(up.id), "batch", up.id)
            raise _unrecorded() from exc
        return up

    async def _undo(self, call: Awaitable[Any], what: str, id: str) -> None:
        try:
            await call
        except ProviderFailed as failed:
            log.error("orphan upstream", provider=self.name, what=what, id=id, why=str(failed))

    async def _not_created(
        self, batch: BatchRecord, up: UpstreamBatch, failure: Failure
    ) -> BatchRecord:
        """After a create that failed: run here, try later, or pass the refusal on."""
        await self._learn(batch, failure.meaning, (_problem_of(failure), *failure.problems))
        if batch.placement.fallback and self._reruns(failure.meaning):
            await self._run_here(batch, up, self._ours(failure.message))
            return await self._fresh(batch)
        if failure.meaning is Meaning.TRANSIENT:
            log.warning("create deferred", provider=self.name, batch=batch.id, why=failure.message)
            self._watch(batch.seq, failure.retry_after_s or 2.0)
            return self.shown(await self._fresh(batch))
        await self._store.upstream.withdraw(batch.seq)
        raise error_of(
            self.name, msgspec.structs.replace(failure, message=self._ours(failure.message))
        )

    # --- ending -------------------------------------------------------------------------------

    async def _settle(self, batch: BatchRecord, up: UpstreamBatch) -> None:
        """Bring the results home once; whoever comes second finds the latch taken."""
        if not await self._store.upstream.latch(batch.seq, clock.now() + _LATCH_S):
            return
        try:
            await self._end(batch, up)
        finally:
            with anyio.CancelScope(shield=True):
                await self._store.upstream.latch(batch.seq, 0)

    async def _end(self, batch: BatchRecord, up: UpstreamBatch) -> None:
        up = msgspec.structs.replace(
            up,
            problems=tuple(
                msgspec.structs.replace(problem, message=self._ours(problem.message))
                for problem in up.problems
            ),
        )
        if up.status == "failed":
            meaning = meaning_of_problems(up.problems)
            await self._learn(batch, meaning, up.problems)
            if (
                batch.placement.fallback
                and batch.status in CANCELLABLE
                and meaning is not None
                and self._reruns(meaning)
            ):
                await self._run_here(batch, up, up.problems[0].message)
                return
        final = up.tries >= _TRIES
        if up.status != "failed" or up.output_id or up.error_id:
            batch = await self._settler.begin(batch, up)
            models = await self._settler.add_lines(batch)
            answered = await self._settler.rows(batch, up, models, unrun=True, final=final)
            batch = await self._fresh(batch)
            left = batch.total - batch.completed - batch.failed
            if up.status == "completed" and left and not final:
                raise Incomplete(f"{left} of {batch.total} lines have no row")
            if answered:
                await self._unlearn(models.values())
        ended = await self._settler.end(batch, up)
        await self._settled(up)
        log.info("batch ended", batch=batch.id, provider=self.name, status=str(ended.status))

    async def _run_here(self, batch: BatchRecord, up: UpstreamBatch, why: str) -> None:
        """The same batch of the same file goes on here; what the provider finished is kept."""
        models = await self._settler.add_lines(batch)
        validating = frozenset({BatchStatus.VALIDATING})
        await self._store.batches.move(batch.seq, validating, BatchStatus.IN_PROGRESS)
        await self._settler.rows(batch, up, models, unrun=False, final=up.tries >= _TRIES)
        placement = Placement(reason=f"{self.name} refused it: {why}")
        await self._store.batches.place(batch.seq, placement)
        await self._settled(up)
        batch = await self._fresh(batch)
        log.info("batch runs here after all", batch=batch.id, provider=self.name, why=why)
        self._takeover(batch, batch.total - batch.completed - batch.failed)

    def _reruns(self, meaning: Meaning) -> bool:
        if meaning is Meaning.QUOTA:
            return self._fallback_on_quota
        return meaning in (Meaning.MODEL, Meaning.MIXED)

    async def _learn(
        self, batch: BatchRecord, meaning: Meaning | None, problems: Sequence[Problem]
    ) -> None:
        if meaning is Meaning.MIXED:
            await self._eligibility.teach(self.name, [MIXED], problems[0].message)
        if meaning is not Meaning.MODEL:
            return
        file = await self._store.files.get(batch.input_file_id, None)
        models = () if file is None else file.facts.models
        texts = [problem.message for problem in problems]
        theirs = {self._names.get(model, model): model for model in models}
        named = {theirs[name] for name in named_models(texts, theirs)}
        named |= named_models(texts, models)
        await self._eligibility.teach(self.name, named or models, texts[0])

    async def _unlearn(self, models: Iterable[str]) -> None:
        distinct = set(models)
        if await self._eligibility.refused(self.name):
            more = {MIXED} if len(distinct) > 1 else set()
            await self._eligibility.forget(self.name, distinct | more)

    # --- small things -------------------------------------------------------------------------

    async def _fresh(self, batch: BatchRecord) -> BatchRecord:
        return await self._store.batches.get(batch.id, None) or batch

    async def _note(self, up: UpstreamBatch) -> None:
        await self._store.upstream.keep_batch(up)
        self._seen[up.batch_seq] = up

    async def _settled(self, up: UpstreamBatch) -> None:
        await self._store.upstream.keep_batch(
            msgspec.structs.replace(up, settled_at=clock.now(), tries=0)
        )
        self._seen.pop(up.batch_seq, None)

    def _ours(self, text: str) -> str:
        return in_our_words(text, self._names)

    def _watch(self, batch_seq: int, in_s: float) -> None:
        if self._reconciler is not None:
            self._reconciler.watch(batch_seq, self.name, in_s)

    async def _look_now(self, batch_seq: int) -> None:
        if self._reconciler is not None:
            await self._reconciler.look_now(batch_seq, self.name)

    @asynccontextmanager
    async def _alone(self, file_seq: int) -> AsyncIterator[None]:
        """One create of a file at a time: a repetition waits for the first one's outcome."""
        lock, waiting = self._creating.get(file_seq, (anyio.Lock(), 0))
        self._creating[file_seq] = lock, waiting + 1
        try:
            async with lock:
                yield
        finally:
            _, waiting = self._creating[file_seq]
            self._creating[file_seq] = lock, waiting - 1
            if waiting == 1:
                del self._creating[file_seq]


def _unrecorded() -> OwnershipUnrecorded:
    return OwnershipUnrecorded(
        "The provider took it, but its id could not be recorded here; it was undone. Try again."
    )


def _problem_of(failure: Failure) -> Problem:
    return Problem(
        code=failure.code or "provider_refused", message=failure.message, param=failure.param
    )
