"""How a forwarded batch ends: its results come home, or it goes on here, or its failure is shown.

What the provider's refusals teach is learned here, and forgotten when it answers after all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import anyio
import msgspec
import structlog

from tidemill import clock
from tidemill.backends.eligibility import MIXED, Eligibility
from tidemill.backends.refusals import (
    Meaning,
    in_our_names,
    meaning_of_problems,
    named_models,
)
from tidemill.backends.settlement import Incomplete, Settler
from tidemill.backends.upstreams import Upstreams
from tidemill.backends.words import in_our_words
from tidemill.ports import Store
from tidemill.scheduler.states import CANCELLABLE
from tidemill.types import (
    Actor,
    BatchRecord,
    BatchStatus,
    Placement,
    Problem,
    Refusal,
    UpstreamBatch,
)

log = structlog.get_logger()


class Here(Protocol):
    """The local path, as far as batches come to it from a provider."""

    def fits(self, lines: int) -> bool:
        """False when so many lines are more than can ever wait here."""

    def reserve(self, lines: int) -> int:
        """Room for a batch about to be created; returns what was taken. Raises ``AtCapacity``."""

    def release(self, reserved: int) -> None:
        """Give it back."""

    def take_over(self, batch: BatchRecord, queued: int) -> None:
        """Run a batch here from now on; ``queued`` of its lines wait."""

    async def cancel(self, batch: BatchRecord, by: Actor | None = None) -> BatchRecord:
        """Cancel a batch that runs here."""


TRIES = 6
"""How often a 404 for a batch, or results with missing rows, are asked for again."""
_LATCH_S = 900


class Ending:
    """Ends the batches of one provider. ``names``: our model names → its batch names."""

    def __init__(
        self,
        settler: Settler,
        store: Store,
        upstreams: Upstreams,
        eligibility: Eligibility,
        names: dict[str, str],
        *,
        here: Here,
        fallback_on_quota: bool,
        doubt: Callable[[], None],
    ) -> None:
        """``doubt`` is called when the provider shows that it serves no Batch API any more."""
        self.name = upstreams.name
        self._settler = settler
        self._store = store
        self._upstreams = upstreams
        self._eligibility = eligibility
        self._names = names
        self._here = here
        self._fallback_on_quota = fallback_on_quota
        self._doubt = doubt

    async def settle(
        self, batch: BatchRecord, up: UpstreamBatch, stopped: Refusal | None = None
    ) -> bool:
        """Bring the results home once; whoever comes second finds the latch taken: False.

        ``stopped`` is why we had it cancelled, where its client did not."""
        if not await self._store.upstream.latch(batch.seq, clock.now() + _LATCH_S):
            return False
        try:
            await self._end(batch, up, stopped)
            return True
        finally:
            with anyio.CancelScope(shield=True):
                await self._store.upstream.latch(batch.seq, 0)

    async def _end(self, batch: BatchRecord, up: UpstreamBatch, stopped: Refusal | None) -> None:
        if up.status != "cancelled" or batch.status not in CANCELLABLE:
            stopped = None
        meaning = meaning_of_problems(up.problems) if up.status == "failed" else None
        await self.learn(batch, up, meaning, up.problems)
        up = msgspec.structs.replace(
            up, problems=in_our_names(up.problems, await self.names(batch, up))
        )
        if (
            meaning is not None
            and self.reruns(meaning)
            and batch.placement.fallback
            and batch.status in CANCELLABLE
        ):
            if self._here.fits(batch.total):
                await self.run_here(batch, up, up.problems[0].message)
                return
            too_large = Problem(
                code="capacity_exceeded",
                message=f"Nor can its {batch.total} lines wait here. Split the file.",
            )
            up = msgspec.structs.replace(up, problems=(*up.problems, too_large))
        final = up.tries >= TRIES
        fails_whole = up.status == "failed" and not (up.output_id or up.error_id)
        if not (fails_whole and batch.status in CANCELLABLE):
            batch = await self._settler.begin(batch, up, stopped=stopped is not None)
            models = await self._settler.add_lines(batch)
            ids = await self._upstreams.ids(batch, up)
            answered = await self._settler.rows(
                batch, up, models, ids=ids, unrun=stopped is None, final=final
            )
            batch = await self._fresh(batch)
            left = batch.total - batch.completed - batch.failed
            if up.status == "completed" and left and not final:
                raise Incomplete(f"{left} of {batch.total} lines have no row")
            if answered:
                await self._unlearn(models.values())
        ended = await self._settler.end(batch, up, stopped)
        await self._upstreams.settled(up)
        log.info("batch ended", batch=batch.id, provider=self.name, status=str(ended.status))

    async def run_here(self, batch: BatchRecord, up: UpstreamBatch, why: str) -> None:
        """The same batch of the same file goes on here; what the provider finished is kept.

        It was accepted, so it need not fit into the intake now: later batches wait for it instead.
        """
        models = await self._settler.add_lines(batch)
        validating = frozenset({BatchStatus.VALIDATING})
        await self._store.batches.move(batch.seq, validating, BatchStatus.IN_PROGRESS)
        ids = await self._upstreams.ids(batch, up)
        await self._settler.rows(batch, up, models, ids=ids, unrun=False, final=up.tries >= TRIES)
        placement = Placement(reason=f"{self.name} refused it: {why}")
        await self._store.batches.place(batch.seq, placement)
        await self._upstreams.settled(up)
        batch = await self._fresh(batch)
        log.info("batch runs here after all", batch=batch.id, provider=self.name, why=why)
        self._here.take_over(batch, batch.total - batch.completed - batch.failed)

    def reruns(self, meaning: Meaning) -> bool:
        """True when a refusal of this meaning sends the batch here."""
        if meaning is Meaning.QUOTA:
            return self._fallback_on_quota
        return meaning in (Meaning.MODEL, Meaning.MIXED, Meaning.UNSERVED)

    async def learn(
        self,
        batch: BatchRecord,
        up: UpstreamBatch,
        meaning: Meaning | None,
        problems: Sequence[Problem],
    ) -> None:
        """Remember the models that a refusal names, or all of the batch's where it names none.

        ``problems`` are the refusal's own words, at least one where it has a meaning.
        """
        if meaning is Meaning.UNSERVED:
            self._doubt()
        if meaning not in (Meaning.MODEL, Meaning.MIXED):
            return
        reason = in_our_words(problems[0].message, await self.names(batch, up))
        if meaning is Meaning.MIXED:
            await self._eligibility.teach(self.name, [MIXED], reason)
        if meaning is not Meaning.MODEL:
            return
        file = await self._store.files.get(batch.input_file_id, None)
        models = () if file is None else file.facts.models
        texts = [problem.message for problem in problems]
        theirs = {self._names.get(model, model): model for model in models}
        named = {theirs[name] for name in named_models(texts, theirs)}
        await self._eligibility.teach(self.name, named or models, reason)

    async def _unlearn(self, models: Iterable[str]) -> None:
        distinct = set(models)
        if await self._eligibility.refused(self.name):
            more = {MIXED} if len(distinct) > 1 else set()
            await self._eligibility.forget(self.name, distinct | more)

    async def names(self, batch: BatchRecord, up: UpstreamBatch) -> dict[str, str]:
        """What the provider may speak of: models, the batch and its files, by our names."""
        return {**self._names, **await self._upstreams.ids(batch, up)}

    async def _fresh(self, batch: BatchRecord) -> BatchRecord:
        return await self._store.batches.get(batch.id, None) or batch
