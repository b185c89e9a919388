"""All providers of one server, put together: verdicts, placement, backends, one reconciler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import anyio
import msgspec
import structlog
from anyio.abc import TaskStatus

from tidemill import access, clock
from tidemill.backends.capability import Capability
from tidemill.backends.dialects import Dialect, dialect_of
from tidemill.backends.eligibility import MIXED, Eligibility
from tidemill.backends.ordinary import OrdinaryRoutes
from tidemill.backends.placement import Candidate, Question, place
from tidemill.backends.provider import Local, ProviderBackend
from tidemill.backends.routed import RoutedInference
from tidemill.errors import BudgetExceeded, Forbidden, NotFound, ProviderNotPermitted
from tidemill.ports import Store
from tidemill.prices import UNPRICED, Catalogue
from tidemill.providers import Provider, parse
from tidemill.scheduler.reconciler import Reconciler
from tidemill.scheduler.retry import Gate
from tidemill.settings import Settings
from tidemill.types import (
    Actor,
    BatchRecord,
    Execution,
    FileFacts,
    FileRecord,
    Limits,
    Placement,
    Upload,
)

log = structlog.get_logger()


class Providers:
    """What the composition root, the handlers and the CLI need to know of providers."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        prices: Catalogue,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Raises ``SettingsError`` where a provider's credential is missing."""
        self._prices = prices
        self._settings = settings
        self._store = store
        configured = parse(settings.providers, azure_api_version=settings.azure_batch_api_version)
        self.dialects: dict[str, Dialect] = {
            provider.name: dialect_of(provider, environ) for provider in configured
        }
        self.eligibility = Eligibility(
            store.facts, ttl_days=settings.batch_model_eligibility_ttl_days
        )
        self.capability = Capability(
            self.dialects.values(), store.facts, ttl_hours=settings.batch_capability_ttl_hours
        )
        self._gates = {
            name: Gate(dialect.provider.concurrency) for name, dialect in self.dialects.items()
        }
        self.routes = tuple(
            OrdinaryRoutes(dialect, self._gates[name]) for name, dialect in self.dialects.items()
        )
        """Their ordinary routes, in the order of the settings."""
        self.backends: dict[str, ProviderBackend] = {}
        """By name; filled by ``open_backends``."""

    @property
    def configured(self) -> tuple[Provider, ...]:
        """The providers of the settings, in order."""
        return tuple(dialect.provider for dialect in self.dialects.values())

    def open_backends(self, here: Local) -> dict[str, ProviderBackend]:
        """Make the backends. ``here`` keeps uploads, and runs what a provider does not."""
        settings = self._settings
        for name, dialect in self.dialects.items():
            self.backends[name] = ProviderBackend(
                dialect,
                self._store,
                self.eligibility,
                gate=self._gates[name],
                here=here,
                interval_s=settings.batch_reconcile_interval_s,
                refresh_s=settings.provider_refresh_s,
                fallback_on_quota=settings.fallback_on_quota,
                doubt=partial(_doubt, self.capability, name),
            )
        return self.backends

    def ordinary(self, provider: str) -> OrdinaryRoutes | None:
        """The ordinary routes of one provider; None where none has this name."""
        return next((one for one in self.routes if one.provider.name == provider), None)

    def batches(self, model: str) -> bool:
        """True when some provider has a batch name for the model."""
        return any(model in provider.batch_models() for provider in self.configured)

    async def place(self, facts: FileFacts, upload: Upload, here: RoutedInference) -> FileFacts:
        """The facts of a file with its placement, as far as the key's limits allow.

        ``here`` says what can be run from here, and where. A file that is not checked yet has no
        models to go by: it is placed when its batch is. Raises as ``placement.place``, and
        ``Forbidden`` for a model that the key may use nowhere that serves it.
        """
        limits = upload.principal.limits
        if facts.checked:
            asked = (upload.execution, upload.provider)
            return await self._placed(facts, limits, *asked, here)
        if upload.provider is not None and not access.uses(limits, upload.provider):
            raise ProviderNotPermitted(upload.provider)
        return msgspec.structs.replace(
            facts,
            placement=Placement(reason="its models are known when a batch checks it"),
            asked=upload.execution,
            asked_provider=upload.provider,
        )

    async def place_late(
        self, batch: BatchRecord, file: FileRecord, facts: FileFacts, here: RoutedInference
    ) -> FileFacts:
        """The placement of a file that its batch has just checked; raises as ``place``."""
        grant = None if batch.key_id is None else await self._store.accounts.grant(batch.key_id)
        limits = () if grant is None else access.limits(grant)
        asked = (file.facts.asked, file.facts.asked_provider)
        placed = await self._placed(facts, limits, *asked, here)
        if placed.placement.execution == "local" or batch.max_cost is None:
            return placed
        # Its cost could not be estimated at create, and nobody stops a provider's batch in between.
        if not placed.placement.fallback:
            raise BudgetExceeded(
                "A provider cannot stop a batch at its 'max_cost', and the cost of a file that its "
                "batch checks is not known before; upload it with X-Tidemill-Validation: upload."
            )
        here_then = Placement(reason="a provider cannot stop at a 'max_cost'")
        return msgspec.structs.replace(placed, placement=here_then)

    async def adopt(self, batch: BatchRecord) -> None:
        """A batch that was placed late goes to its provider now."""
        await self.backends[batch.placement.backend].adopt(batch)

    async def _placed(
        self,
        facts: FileFacts,
        limits: Sequence[Limits],
        execution: Execution,
        provider: str | None,
        here: RoutedInference,
    ) -> FileFacts:
        models = frozenset(facts.models)
        candidates: tuple[Candidate, ...] = ()
        if execution != "local":
            candidates = await self._candidates(models, limits)
        elif provider is not None:
            candidates = tuple(
                Candidate(name=name, permitted=access.uses(limits, name)) for name in self.dialects
            )
        runs_here = frozenset(
            model
            for model in models
            if here.knows(model) and access.permits(limits, model, here.where(model))
        )
        served = runs_here.union(*(candidate.batches for candidate in candidates))
        withheld = sorted(
            m for m in models - served if here.knows(m) or (candidates and self.batches(m))
        )
        if withheld:
            raise Forbidden(
                f"This key may not use the model '{withheld[0]}' where it is served.",
                param="body.model",
                code="model_not_permitted",
            )
        question = Question(
            models=models,
            runs_here=runs_here,
            candidates=candidates,
            execution=execution,
            provider=provider,
            prefer=self._settings.prefer,
        )
        return msgspec.structs.replace(facts, placement=place(question))

    async def _candidates(
        self, models: frozenset[str], limits: Sequence[Limits]
    ) -> tuple[Candidate, ...]:
        found: dict[str, Candidate] = {}

        async def ask(provider: Provider) -> None:
            verdict = await self.capability.verdict(provider.name)
            refused = await self.eligibility.refused(provider.name)
            found[provider.name] = Candidate(
                name=provider.name,
                permitted=access.uses(limits, provider.name),
                verdict=verdict.state,
                batches=frozenset(
                    model
                    for model in provider.batch_models()
                    if access.permits(limits, model, provider.name)
                ),
                refused=refused - {MIXED},
                one_model=MIXED in refused,
                price=self._price(provider.name, models),
            )

        async with anyio.create_task_group() as tasks:
            for provider in self.configured:
                tasks.start_soon(ask, provider)
        return tuple(found[provider.name] for provider in self.configured)

    def _price(self, provider: str, models: frozenset[str]) -> int | None:
        """The batch rates of these models together, as their usage would be booked."""
        quotes = [self._prices.quote(m, execution=provider, tier="batch") for m in models]
        if UNPRICED in quotes:
            return None
        return sum(quote.rate.input + quote.rate.output for quote in quotes)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Probe, reconcile and settle until cancelled."""

        async def look(batch_seq: int, provider: str) -> float | None:
            return await self.backends[provider].look(batch_seq)

        reconciler = Reconciler(look, {p.name: p.concurrency for p in self.configured})
        async with anyio.create_task_group() as tasks:
            await tasks.start(reconciler.run)
            for backend in self.backends.values():
                await backend.start(reconciler)
            await self._say_who_waits()
            tasks.start_soon(self.capability.run)
            task_status.started()

    async def _say_who_waits(self) -> None:
        at = Counter(batch.placement.provider for batch in await self._store.batches.active())
        for name in at.keys() - self.dialects.keys() - {None}:
            log.warning("batches wait for a provider that left", provider=name, batches=at[name])

    async def close(self) -> None:
        """Close all connections."""
        for dialect in self.dialects.values():
            await dialect.close()

    async def forget(
        self, provider: str, models: Sequence[str] | None, by: Actor | None = None
    ) -> int:
        """Forget refusals, of all models where None; returns how many. Raises ``NotFound``."""
        if provider not in self.dialects:
            raise NotFound(f"No provider is named '{provider[:100]}'.", param="provider")
        return await self.eligibility.forget(provider, models, by)

    async def report(self) -> list[dict[str, Any]]:
        """Each provider with verdict, age, reason and the models that it refused to batch."""
        known = self.capability.known()
        refused = await self.eligibility.all()
        now = clock.now()
        rows = []
        for provider in self.configured:
            verdict = known.get(provider.name)
            rows.append(
                {
                    "id": provider.name,
                    "object": "provider",
                    "kind": provider.kind,
                    "models": sorted(provider.models),
                    "batch_api": verdict.state if verdict else "unknown",
                    "reason": verdict.reason if verdict else "not probed yet",
                    "checked_at": verdict.checked_at if verdict else None,
                    "age_s": now - verdict.checked_at if verdict else None,
                    "not_batched": [
                        {"model": r.model, "reason": r.reason, "since_at": r.since_at}
                        for r in refused
                        if r.provider == provider.name
                    ],
                }
            )
        return rows


def _doubt(capability: Capability, name: str) -> None:
    capability.doubt(name)
