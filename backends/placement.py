"""Where a batch runs: one pure function from what is known to a placement or a clear refusal.

The order of the questions is the rule. Model coverage is asked before anything is called
ambiguous, so two capable providers compete only for files that both serve whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from tidemill.errors import (
    AmbiguousProvider,
    ModelNotFound,
    NotSupported,
    ProviderNotPermitted,
    ProviderUnavailable,
)
from tidemill.types import Placement, Record

LOCAL = "local"


class Candidate(Record, frozen=True, kw_only=True):
    """One provider, as far as a placement cares."""

    name: str
    permitted: bool = True
    """The key may use it."""
    verdict: Literal["yes", "no", "unknown"] = "yes"
    batches: frozenset[str] = frozenset()
    """Our names of the models that it has a batch name for."""
    refused: frozenset[str] = frozenset()
    """Models that it is known to refuse in batches."""
    one_model: bool = False
    """It takes one model a file."""
    price: int | None = None
    """Batch rates of this file's models together; None: not all are priced."""


class Question(Record, frozen=True, kw_only=True):
    """What a file and its upload ask for."""

    models: frozenset[str]
    runs_here: frozenset[str]
    """Of these models, those that a line can be run for from here: on a local engine, or at a
    provider's ordinary route."""
    candidates: tuple[Candidate, ...] = ()
    execution: Literal["auto", "local", "provider"] = "auto"
    provider: str | None = None
    """Named by the client."""
    prefer: Literal["ask", "cheapest"] = "ask"


def place(question: Question) -> Placement:
    """Where the batch of this file runs, and why.

    Raises ``ProviderNotPermitted``, ``AmbiguousProvider``,
    ``NotSupported`` (501, when a provider was demanded), ``ProviderUnavailable`` (nobody can tell
    yet) and ``ModelNotFound`` (no one place serves every model).
    """
    q = question
    permitted = [candidate for candidate in q.candidates if candidate.permitted]
    if q.provider is not None:
        permitted = [candidate for candidate in permitted if candidate.name == q.provider]
        if not permitted:
            raise ProviderNotPermitted(q.provider)
    if q.execution == "local":
        return _here(q, "the request asked for it")
    covering = [c for c in permitted if c.verdict == "yes" and not _uncovered(q, c)]
    if len(covering) > 1 and q.prefer == "cheapest" and (cheapest := _cheapest(covering)):
        return _there(q, cheapest, "the cheapest of " + _names(c.name for c in covering))
    if len(covering) > 1:
        raise AmbiguousProvider(
            f"Several providers could take this batch: {_names(c.name for c in covering)}. "
            "Name one in the X-Tidemill-Provider header.",
            param="X-Tidemill-Provider",
        )
    if covering:
        return _there(q, covering[0], f"it batches {_count(q.models)}")
    return _without_provider(q, permitted)


def _there(q: Question, candidate: Candidate, reason: str) -> Placement:
    return Placement(
        execution="provider",
        backend=candidate.name,
        provider=candidate.name,
        reason=f"{candidate.name}: {reason}",
        fallback=q.execution == "auto" and q.models <= q.runs_here,
    )


def _here(q: Question, reason: str) -> Placement:
    if missing := sorted(q.models - q.runs_here):
        raise ModelNotFound(
            f"The batch cannot run here ({reason}): {_quoted(missing)} can only be batched at a "
            "provider.",
            param="body.model",
        )
    return Placement(execution="local", backend=LOCAL, reason=reason)


def _without_provider(q: Question, permitted: Sequence[Candidate]) -> Placement:
    able = [candidate for candidate in permitted if candidate.verdict == "yes"]
    unknown = [candidate for candidate in permitted if candidate.verdict == "unknown"]
    hopeful = [candidate for candidate in unknown if not _uncovered(q, candidate)]
    if not permitted:
        reason = "no provider is configured"
    elif able:
        reason = "; ".join(f"{c.name} {_uncovered(q, c)}" for c in able)
    elif unknown:
        reason = f"whether {_names(c.name for c in unknown)} serves a batch API is not known yet"
    else:
        reason = f"{_names(c.name for c in permitted)} serves no batch API"
    can_run_here = q.models <= q.runs_here
    if hopeful and (q.execution == "provider" or not can_run_here):
        raise ProviderUnavailable(
            f"The batch cannot be placed now: whether {_names(c.name for c in hopeful)} serves a "
            "batch API is not known; try again.",
            retry_after_s=30,
        )
    if q.execution == "provider":
        raise NotSupported(
            f"No provider can take this batch: {reason}. "
            "Send X-Tidemill-Execution: auto to run it here instead.",
            code="model_not_available_for_batch" if able else "batch_api_not_supported",
        )
    return _here(q, reason)


def _uncovered(q: Question, candidate: Candidate) -> str | None:
    """Why a provider does not take this file whole; None when it does."""
    if missing := sorted(q.models - candidate.batches):
        return f"does not serve {_quoted(missing)}"
    if refused := sorted(q.models & candidate.refused):
        return f"refused to batch {_quoted(refused)}"
    if candidate.one_model and len(q.models) > 1:
        return "takes one model a file"
    return None


def _cheapest(covering: Sequence[Candidate]) -> Candidate | None:
    """The one with the lowest price, where all are priced and one is lowest."""
    priced = [(c.price, c) for c in covering if c.price is not None]
    if len(priced) < len(covering):
        return None
    priced.sort(key=lambda pair: pair[0])
    return None if priced[0][0] == priced[1][0] else priced[0][1]


def _count(models: frozenset[str]) -> str:
    return f"the model {_quoted(models)}" if len(models) == 1 else f"all {len(models)} models"


def _quoted(models: Iterable[str]) -> str:
    names = sorted(models)
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
