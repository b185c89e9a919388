"""Where a batch runs: the decision table. ``docs/explain`` shows the same rows."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.backends.placement import Candidate, Question, place
from tidemill.errors import TidemillError
from tidemill.types import Placement


def _provider(name: str, *models: str, **more: Any) -> Candidate:
    return Candidate(name=name, batches=frozenset(models), **more)


def _ask(*models: str, here: str = "", **more: Any) -> Question:
    return Question(models=frozenset(models), runs_here=frozenset(here.split()), **more)


UP = _provider("up", "a", "b")
TWO = _provider("two", "a")

TABLE: list[tuple[str, Question, str]] = [
    ("No provider is configured", _ask("a", here="a"), "here"),
    ("One provider batches the model", _ask("a", here="a", candidates=(UP,)), "up"),
    ("One provider batches every model", _ask("a", "b", candidates=(UP,)), "up"),
    (
        "One of the models is not batched there",
        _ask("a", "c", here="a c", candidates=(UP,)),
        "here",
    ),
    (
        "Two providers batch every model",
        _ask("a", here="a", candidates=(UP, TWO)),
        "400 multiple_batch_providers",
    ),
    (
        "Two providers, only one batches every model",
        _ask("a", "b", candidates=(UP, TWO)),
        "up",
    ),
    (
        "Two providers, one named in the header",
        _ask("a", candidates=(UP, TWO), provider="two"),
        "two",
    ),
    (
        "Two providers, the cheapest is preferred",
        _ask(
            "a",
            candidates=(_provider("up", "a", price=2), _provider("two", "a", price=1)),
            prefer="cheapest",
        ),
        "two",
    ),
    (
        "Two providers, the cheapest is preferred, one has no price",
        _ask("a", candidates=(_provider("up", "a", price=2), TWO), prefer="cheapest"),
        "400 multiple_batch_providers",
    ),
    (
        "Two providers at the same price",
        _ask(
            "a",
            candidates=(_provider("up", "a", price=1), _provider("two", "a", price=1)),
            prefer="cheapest",
        ),
        "400 multiple_batch_providers",
    ),
    (
        "The header names an unknown provider",
        _ask("a", here="a", candidates=(UP,), provider="acme"),
        "403 provider_not_permitted",
    ),
    (
        "The header names an unknown provider, to run here",
        _ask("a", here="a", candidates=(UP,), provider="acme", execution="local"),
        "403 provider_not_permitted",
    ),
    (
        "The header names a provider that the key may not use",
        _ask("a", here="a", candidates=(_provider("up", "a", permitted=False),), provider="up"),
        "403 provider_not_permitted",
    ),
    (
        "The only capable provider is not permitted",
        _ask("a", here="a", candidates=(_provider("up", "a", permitted=False),)),
        "here",
    ),
    (
        "The named provider does not batch the model",
        _ask("b", here="b", candidates=(UP, TWO), provider="two"),
        "here",
    ),
    (
        "The provider serves no batch API",
        _ask("a", here="a", candidates=(_provider("up", "a", verdict="no"),)),
        "here",
    ),
    (
        "Whether it serves one is not known",
        _ask("a", here="a", candidates=(_provider("up", "a", verdict="unknown"),)),
        "here",
    ),
    (
        "Not known, and the model cannot run here",
        _ask("a", candidates=(_provider("up", "a", verdict="unknown"),)),
        "502 provider_unavailable",
    ),
    (
        "The provider refused the model lately",
        _ask("a", here="a", candidates=(_provider("up", "a", refused=frozenset("a")),)),
        "here",
    ),
    (
        "It refused another model of the name's kin",
        _ask(
            "gpt-4.1",
            candidates=(_provider("up", "gpt-4.1", refused=frozenset({"gpt-4.1-mini"})),),
        ),
        "up",
    ),
    (
        "It takes one model a file, the file names two",
        _ask("a", "b", here="a b", candidates=(_provider("up", "a", "b", one_model=True),)),
        "here",
    ),
    (
        "Asked to run here",
        _ask("a", here="a", candidates=(UP,), execution="local"),
        "here",
    ),
    (
        "Asked to run here, the model cannot",
        _ask("a", candidates=(UP,), execution="local"),
        "404 model_not_found",
    ),
    (
        "A provider is demanded and takes it",
        _ask("a", here="a", candidates=(UP,), execution="provider"),
        "up",
    ),
    (
        "A provider is demanded, none is configured",
        _ask("a", here="a", execution="provider"),
        "501 batch_api_not_supported",
    ),
    (
        "A provider is demanded, none serves a batch API",
        _ask("a", here="a", candidates=(_provider("up", "a", verdict="no"),), execution="provider"),
        "501 batch_api_not_supported",
    ),
    (
        "A provider is demanded, it does not batch the model",
        _ask("c", here="c", candidates=(UP,), execution="provider"),
        "501 model_not_available_for_batch",
    ),
    (
        "A provider is demanded, whether it serves a batch API is not known",
        _ask(
            "a",
            here="a",
            candidates=(_provider("up", "a", verdict="unknown"),),
            execution="provider",
        ),
        "502 provider_unavailable",
    ),
    (
        "No one place serves every model",
        _ask("a", "c", here="c", candidates=(UP,)),
        "404 model_not_found",
    ),
]


def outcome(question: Question) -> str:
    """``here``, a provider's name, or the error's status and code."""
    try:
        placement = place(question)
    except TidemillError as error:
        return f"{error.status} {error.code}"
    assert placement.reason
    return "here" if placement.execution == "local" else str(placement.provider)


@pytest.mark.parametrize(
    ("question", "expected"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE]
)
def test_a_batch_runs_where_the_table_says(question: Question, expected: str) -> None:
    """Each row gives a place or an error, and a place always has a reason."""
    assert outcome(question) == expected


def test_a_refused_batch_may_run_here_only_in_auto_and_only_when_it_can() -> None:
    """The placement carries that decision along, because the refusal may come hours later."""
    assert place(_ask("a", here="a", candidates=(UP,))).fallback
    assert not place(_ask("a", candidates=(UP,))).fallback
    demanded: Placement = place(_ask("a", here="a", candidates=(UP,), execution="provider"))
    assert not demanded.fallback


def test_the_ambiguous_are_listed() -> None:
    """The client learns what to choose from."""
    with pytest.raises(TidemillError, match=r"two, up.*X-Tidemill-Provider"):
        place(_ask("a", candidates=(UP, TWO)))
