"""Local models as settings: which there are, and how each is served.

The setting ``models`` is a list of tables (``[[models]]`` in ``tidemill.toml``) or the same list
as JSON in ``TIDEMILL_MODELS``. What an entry leaves open, the server's general settings say.
Reading it opens no file; what is wrong with a file is found when the server starts.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tidemill.errors import SettingsError
from tidemill.types import Adapter, EngineSpec

if TYPE_CHECKING:
    from tidemill.settings import Settings

DEFAULT = "smollm2"
"""Served where no setting names a model."""


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry as written; None: as the server's general setting says."""

    model: Annotated[str, Meta(min_length=1)]
    name: str = ""
    """Served under; empty: taken from the model."""
    embedding: bool = False
    """True: for ``/v1/embeddings`` only."""
    gpu_layers: Annotated[int, Meta(ge=-1)] | None = None
    max_context_length: Annotated[int, Meta(ge=0)] | None = None
    slots: Annotated[int, Meta(ge=0, le=256)] | None = None
    long_slots: Annotated[int, Meta(ge=0, le=256)] | None = None
    threads: Annotated[int, Meta(ge=0)] | None = None
    weights: Literal["auto", "as-is", "q8_0", "q4_0"] | None = None
    adapters: tuple[Adapter, ...] = ()
    preload: bool | None = None
    """Loaded at start; None: the first entry is."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """One model that this server is to serve."""

    spec: EngineSpec
    preload: bool
    entry: str = ""
    """Where the settings name it, for who has to correct them; empty: in a setting of its own."""


def parse(value: str) -> tuple[Model, ...]:
    """The entries of the setting, in order. Raises ``SettingsError`` with one sentence that names
    entry and key for the first thing that is wrong."""
    if not value.strip():
        return ()
    try:
        tables = msgspec.json.decode(value)
    except msgspec.DecodeError as exc:
        raise SettingsError(f"Bad value for setting 'models': not JSON ({exc}).") from exc
    if not isinstance(tables, list):
        raise SettingsError(
            "Bad value for setting 'models': it is a list of tables, each under [[models]]."
        )
    entries = tuple(_entry(no, table) for no, table in enumerate(tables, 1))
    named = [(entry.name, entry.embedding) for entry in entries if entry.name]
    for name, embedding in named:
        if named.count((name, embedding)) > 1:
            raise twice(name)
    return entries


def twice(name: str) -> SettingsError:
    """Two models of a kind cannot be told apart by one name."""
    return SettingsError(
        f"Two local models are served under the name '{name}'; give one of them another 'name'."
    )


def wanted(settings: Settings) -> tuple[Wanted, ...]:
    """All models of this server: ``model`` first, then the entries, then ``embedding_model``."""
    entries = parse(settings.models)
    found = []
    if settings.model or not entries:
        chat = Model(model=settings.model or DEFAULT, name=settings.model_name)
        found.append(Wanted(spec=_spec(chat, settings), preload=True))
    for no, entry in enumerate(entries, 1):
        preload = not found if entry.preload is None else entry.preload
        where = _named(no, entry.name or entry.model)
        found.append(Wanted(spec=_spec(entry, settings), preload=preload, entry=where))
    if settings.embedding_model:
        vectors = Model(
            model=settings.embedding_model,
            embedding=True,
            max_context_length=0,
            slots=0,
            long_slots=0,
            weights="as-is",
        )
        found.append(Wanted(spec=_spec(vectors, settings), preload=True))
    return tuple(found)


def _entry(no: int, table: Any) -> Model:
    name = table.get("name") or table.get("model") if isinstance(table, dict) else None
    where = _named(no, name)
    try:
        return msgspec.convert(table, Model)
    except msgspec.ValidationError as exc:
        reason, _, path = str(exc).partition(" - at `$.")
        key = f", key '{re.sub(r'[^a-z_0-9.].*', '', path)}'" if path else ""
        raise SettingsError(f"Bad value for setting 'models', {where}{key}: {reason}.") from exc


def _named(no: int, name: Any) -> str:
    return f"entry {no} ('{name}')" if isinstance(name, str) else f"entry {no}"


def _spec(entry: Model, settings: Settings) -> EngineSpec:
    return EngineSpec(
        model=entry.model,
        name=entry.name,
        embedding=entry.embedding,
        gpu_layers=_or(entry.gpu_layers, settings.gpu_layers),
        context_length=_or(entry.max_context_length, settings.max_context_length),
        slots=_or(entry.slots, settings.slots),
        long_slots=_or(entry.long_slots, settings.long_slots),
        threads=_or(entry.threads, settings.threads),
        headroom=settings.interactive_headroom,
        step_timeout_s=settings.step_timeout_seconds,
        weights=entry.weights or settings.weights,
        speculation=settings.speculation,
        attention=settings.attention,
        adapters=entry.adapters,
    )


def _or(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value
