"""One place to ask for every model: this server's engines first, then providers in order."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from tidemill.errors import ModelNotFound, refusal
from tidemill.ports import Inference
from tidemill.types import Lane, ModelCard, Outcome, Usage, Waiting


class Bounded(Inference, Protocol):
    """An ``Inference`` that says how many lines keep it busy, by the places that it consists of."""

    @property
    def capacities(self) -> Mapping[str, int]: ...

    def place(self, model: str, endpoint: str) -> str: ...

    def waits(self, lines: Mapping[str, Waiting]) -> None: ...


class _Named(msgspec.Struct):
    model: Any = None


_named = msgspec.json.Decoder(_Named)


class RoutedInference:
    """Implements ``ports.Inference`` by asking the first place that knows the model.

    What nobody knows goes to the first place, whose words for it are the server's own.
    """

    def __init__(self, places: Sequence[Bounded]) -> None:
        self._places = tuple(places)

    def cards(self) -> Sequence[ModelCard]:
        """All models; where two places serve one name, the first is asked, and shown."""
        cards: dict[str, ModelCard] = {}
        for place in self._places:
            for card in place.cards():
                cards.setdefault(card.id, card)
        return tuple(cards.values())

    def knows(self, model: str) -> bool:
        """True when a request for this model can run somewhere from here."""
        return any(place.knows(model) for place in self._places)

    def where(self, model: str) -> str:
        """Where a request for this model would run."""
        return next((place.where(model) for place in self._places if place.knows(model)), "local")

    async def count(self, endpoint: str, body: bytes) -> int | None:
        """Prompt tokens of a request where its model is served."""
        place = self._place(body, None)
        return None if place is None else await place.count(endpoint, body)

    @property
    def capacities(self) -> dict[str, int]:
        """Lines that keep each place busy, by its name."""
        return {name: n for place in self._places for name, n in place.capacities.items()}

    def place(self, model: str, endpoint: str) -> str:
        """Which of those runs a line for a model and an endpoint."""
        known = (place for place in self._places if place.knows(model))
        return next(known, self._places[0]).place(model, endpoint)

    def waits(self, lines: Mapping[str, Waiting]) -> None:
        """Tell every place where lines wait."""
        for place in self._places:
            place.waits(lines)

    async def answer(
        self,
        endpoint: str,
        body: bytes,
        *,
        lane: Lane,
        owner: str,
        defaults: Any = None,
        model: str | None = None,
        booked: Callable[[str, Usage], None] | None = None,
        batch: str | None = None,
    ) -> Outcome:
        """Run one request where its model is served."""
        place = self._place(body, model)
        if place is None:
            return refusal(ModelNotFound("No model is served here.", param="model"))
        return await place.answer(
            endpoint,
            body,
            lane=lane,
            owner=owner,
            defaults=defaults,
            model=model,
            booked=booked,
            batch=batch,
        )

    def stream(
        self,
        endpoint: str,
        body: bytes,
        *,
        owner: str,
        lane: Lane = Lane.INTERACTIVE,
        model: str | None = None,
        booked: Callable[[str, Usage], None] | None = None,
    ) -> AsyncIterator[bytes]:
        """Server-sent events from where the model is served."""
        place = self._place(body, model)
        if place is None:
            raise ModelNotFound("No model is served here.", param="model")
        return place.stream(endpoint, body, owner=owner, lane=lane, model=model, booked=booked)

    def _place(self, body: bytes, forced: str | None) -> Bounded | None:
        name = forced or _model(body)
        known = (p for p in self._places if isinstance(name, str) and p.knows(name))
        return next(known, self._places[0] if self._places else None)


def _model(body: bytes) -> Any:
    try:
        return _named.decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # whoever is asked says what is wrong with it
