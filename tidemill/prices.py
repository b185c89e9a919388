"""What tokens cost: a versioned catalogue, and integer arithmetic over it.

Money is a whole number of micro-units of one currency; no float ever holds an amount. A rate is
micro-units per million tokens, so tokens × rate is exact, and a row's cost is rounded once::

    cost = ⌈((input - cached) × rate.input + cached × rate.cached + output × rate.output) / 10⁶⌉

Rounded up: a row is over- rather than under-charged, by less than one micro-unit.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping
from decimal import ROUND_CEILING, Decimal, DecimalException
from pathlib import Path
from typing import Any, Literal

import msgspec

from tidemill.errors import SettingsError
from tidemill.providers import Model, Provider
from tidemill.types import Usage

MILLION = 1_000_000
LOCAL = "local"
Tier = Literal["standard", "batch"]


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Micro-units per million tokens. ``output`` covers reasoning tokens, too."""

    input: int = 0
    cached: int = 0
    output: int = 0

    @property
    def free(self) -> bool:
        """True when no number of tokens costs anything."""
        return not (self.input or self.cached or self.output)

    def cost(self, usage: Usage) -> int:
        """Micro-units for these tokens, rounded up once.

        >>> Rate(input=150_000, cached=75_000, output=600_000).cost(Usage(input=1000, output=10))
        156
        """
        fresh = max(usage.input - usage.cached, 0)
        exact = fresh * self.input + usage.cached * self.cached + usage.output * self.output
        return -(-exact // MILLION)


FREE = Rate()


class ModelPrice(msgspec.Struct, frozen=True, kw_only=True):
    """A model's rates; without a batch rate the standard one holds."""

    standard: Rate
    batch: Rate | None = None


class Quote(msgspec.Struct, frozen=True, kw_only=True):
    """The price that a usage row is booked at, and the version of the catalogue that said so."""

    rate: Rate = FREE
    version: str = ""
    """Empty: no price was known, the row is booked at 0."""


UNPRICED = Quote()


class Catalogue(msgspec.Struct, frozen=True, kw_only=True):
    """Prices of models.

    A model is looked up as ``provider/model``, as ``kind/model`` of that provider's kind, and as
    ``model``; then in the same way by the name that the provider has for it, since a list of
    everybody's prices knows no name of ours. One that runs here is looked up only as
    ``local/model``, so that such a list never charges for a local model of the same name.
    """

    models: dict[str, ModelPrice] = {}
    currency: str = "USD"
    version: str = ""
    kinds: dict[str, str] = {}
    """Kind of each provider by its name."""
    offers: dict[str, Model] = {}
    """What providers call our models, by ``provider/model``."""

    def quote(self, model: str, *, execution: str = LOCAL, tier: str = "standard") -> Quote:
        """The price of a model where it runs: ``execution`` is ``local`` or a provider's name.

        >>> one = ModelPrice(standard=Rate(input=2_000_000, cached=1_000_000, output=8_000_000))
        >>> catalogue = Catalogue(models={"m": one}, version="1")
        >>> catalogue.quote("m", execution="openai", tier="batch").rate.output
        8000000
        >>> catalogue.quote("m").rate.free
        True
        """
        names = [f"{execution}/{model}"]
        if execution != LOCAL:
            kind = self.kinds.get(execution, execution)
            names += [f"{kind}/{model}", model]
            for theirs in self._theirs(f"{execution}/{model}", tier):
                names += [f"{execution}/{theirs}", f"{kind}/{theirs}", theirs]
        for name in names:
            if (price := self.models.get(name)) is not None:
                rate = price.batch if tier == "batch" and price.batch else price.standard
                return Quote(rate=rate, version=self.version)
        return UNPRICED

    def _theirs(self, name: str, tier: str) -> list[str]:
        offered = self.offers.get(name, Model())
        names = (offered.standard, offered.batch)
        return [one for one in (names[::-1] if tier == "batch" else names) if one is not None]

    def cost(
        self, usage: Usage, model: str, *, execution: str = LOCAL, tier: str = "standard"
    ) -> int:
        """Micro-units for these tokens of a model."""
        return self.quote(model, execution=execution, tier=tier).rate.cost(usage)


# So large that nobody means them, so small that tokens × rate stays within 64 bits in the store.
_MOST = 10**15
_MOST_RATE = 10**11


# --- amounts ----------------------------------------------------------------------------------


def micro(amount: str | int | Decimal) -> int:
    """An amount of currency as micro-units.

    Raises ``ValueError`` for what is no number, is negative, or is finer than a micro-unit.

    >>> micro("12.50")
    12500000
    """
    try:
        exact = Decimal(amount) * MILLION
    except DecimalException:
        raise ValueError(f"{amount!r} is not an amount") from None
    if not exact.is_finite() or not 0 <= exact <= _MOST:
        raise ValueError(f"{amount!r} is not an amount")
    if exact != exact.to_integral_value():
        raise ValueError(f"{amount!r} is finer than a millionth")
    return int(exact)


def shown(amount: int) -> str:
    """Micro-units as a person reads them: at least two decimals, none lost.

    >>> shown(12_500_000), shown(1), shown(-250_000)
    ('12.50', '0.000001', '-0.25')
    """
    whole, rest = divmod(abs(amount), MILLION)
    decimals = f"{rest:06d}".rstrip("0").ljust(2, "0")
    return f"{'-' if amount < 0 else ''}{whole}.{decimals}"


# --- files ------------------------------------------------------------------------------------


def load(path: Path) -> Catalogue:
    """Read a catalogue: TOML, JSON, or a LiteLLM price map (JSON).

    Raises ``SettingsError`` with one sentence that names the file and what is wrong in it.
    """
    try:
        raw = path.read_bytes()
    except OSError as exc:
        raise SettingsError(f"Cannot read the price file {path}: {exc.strerror}.") from exc
    try:
        text = raw.decode("utf-8")
        if path.suffix == ".toml":
            content = tomllib.loads(text, parse_float=Decimal)
        else:
            content = json.loads(text, parse_float=Decimal, parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise SettingsError(f"The price file {path} is not {kind}: {exc}.") from exc
    try:
        return parse(content)
    except ValueError as exc:
        raise SettingsError(f"The price file {path} is wrong: {exc}.") from exc


def parse(content: Any) -> Catalogue:
    """A catalogue from decoded TOML or JSON, ours or LiteLLM's. Raises ``ValueError``."""
    if not isinstance(content, Mapping):
        raise ValueError("it is not a table of models")
    ours = isinstance(content.get("models"), Mapping) and not _foreign(content["models"])
    if ours:
        unknown = set(content) - {"models", "currency", "version"}
        if unknown:
            raise ValueError(f"unknown field '{min(unknown)}'")
        models = {name: _ours(name, entry) for name, entry in content["models"].items()}
    else:
        models = dict(_litellm(content))
    if not models:
        raise ValueError("it has no prices")
    currency = content.get("currency", "USD") if ours else "USD"
    version = content.get("version") if ours else None
    if not isinstance(currency, str) or not isinstance(version, str | int | None):
        raise ValueError("'currency' and 'version' are texts")
    return Catalogue(
        models=models, currency=currency, version=_fingerprint(models, currency, version)
    )


def with_providers(catalogue: Catalogue, providers: Iterable[Provider]) -> Catalogue:
    """The catalogue with the prices that the providers' own settings give; a price file wins."""
    providers = tuple(providers)
    models = dict(catalogue.models)
    for provider in providers:
        for name, model in provider.models.items():
            key = f"{provider.name}/{name}"
            if model.price is None or key in models:
                continue
            price = model.price
            entry: dict[str, Any] = {
                "input": Decimal(str(price.input)),
                "output": Decimal(str(price.output)),
            }
            batch = {"input": price.batch_input, "output": price.batch_output}
            if given := {k: Decimal(str(v)) for k, v in batch.items() if v is not None}:
                entry["batch"] = given
            models[key] = _ours(key, entry)
    version = catalogue.version
    if models != catalogue.models:
        version = _fingerprint(models, catalogue.currency, catalogue.version or None)
    return Catalogue(
        models=models,
        currency=catalogue.currency,
        version=version,
        kinds={provider.name: str(provider.kind) for provider in providers},
        offers={
            f"{provider.name}/{name}": model
            for provider in providers
            for name, model in provider.models.items()
        },
    )


_FIELDS = ("input", "cached_input", "output")


def _ours(name: str, entry: Any) -> ModelPrice:
    """``{input, cached_input, output, batch: {…}}`` in currency per million tokens."""
    if not isinstance(entry, Mapping):
        raise ValueError(f"the price of '{name}' is not a table")
    batch = entry.get("batch", {})
    if not isinstance(batch, Mapping):
        raise ValueError(f"'batch' of '{name}' is not a table")
    unknown = (set(entry) - {*_FIELDS, "batch"}) | (set(batch) - set(_FIELDS))
    if unknown:
        raise ValueError(f"unknown field '{min(unknown)}' in the price of '{name}'")
    if "input" not in entry:
        raise ValueError(f"the price of '{name}' has no 'input'")
    given = [
        {field: _amount(name, field, table[field]) for field in _FIELDS if field in table}
        for table in (entry, batch)
    ]
    return _price(*given)


def _price(standard: Mapping[str, int], batch: Mapping[str, int]) -> ModelPrice:
    """Fill the gaps upwards: cached input at the input rate, batch at the standard rate."""
    rate = Rate(
        input=standard["input"],
        cached=standard.get("cached_input", standard["input"]),
        output=standard.get("output", 0),
    )
    if not batch:
        return ModelPrice(standard=rate)
    input = batch.get("input", rate.input)
    # Few publish a cached batch rate: without one a cached token costs the less of what applies.
    cached = batch.get("cached_input", min(input, rate.cached))
    return ModelPrice(
        standard=rate,
        batch=Rate(input=input, cached=cached, output=batch.get("output", rate.output)),
    )


def _amount(name: str, field: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int | Decimal):
        raise ValueError(f"'{field}' of '{name}' is not a number")
    try:
        rate = micro(value)
    except ValueError as exc:
        raise ValueError(f"'{field}' of '{name}': {exc}") from None
    if rate > _MOST_RATE:
        raise ValueError(f"'{field}' of '{name}' is not a price")
    return rate


# LiteLLM's map: currency per single token, and fields of many other kinds that are not tokens.
_LITELLM = (
    ("input", "input_cost_per_token"),
    ("cached_input", "cache_read_input_token_cost"),
    ("output", "output_cost_per_token"),
)
_BATCHES = "_batches"
_TIERS = "tiered_pricing"


def _foreign(models: Mapping[str, Any]) -> bool:
    return any(
        isinstance(entry, Mapping) and ("input_cost_per_token" in entry or "mode" in entry)
        for entry in models.values()
    )


def _litellm(content: Mapping[str, Any]) -> Iterable[tuple[str, ModelPrice]]:
    """Models of a LiteLLM price map that are priced by token; others (images, audio) are left
    out. Where the rate grows with the prompt, the first one holds."""
    for name, entry in content.items():
        if name == "sample_spec" or not isinstance(entry, Mapping):
            continue
        entry = {**_first_tier(entry), **entry}
        standard, batch = (
            {
                field: _per_token(name, key + tail, entry[key + tail])
                for field, key in _LITELLM
                if entry.get(key + tail) is not None
            }
            for tail in ("", _BATCHES)
        )
        if "input" in standard:
            yield name, _price(standard, batch)


def _first_tier(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Some models have all their rates in a list, by the length of the prompt."""
    tiers = entry.get(_TIERS)
    found = tiers[0] if isinstance(tiers, list) and tiers else {}
    return found if isinstance(found, Mapping) else {}


def _per_token(name: str, field: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str | Decimal):
        raise ValueError(f"'{field}' of '{name}' is not a number")
    try:
        exact = Decimal(value) * MILLION * MILLION
    except DecimalException:
        raise ValueError(f"'{field}' of '{name}' is not a number") from None
    if not exact.is_finite() or exact < 0:
        raise ValueError(f"'{field}' of '{name}' is not a price")
    # The map has had rates a million times too high. One wrong entry among thousands must not keep
    # a server from its start, and is no reason to give the model away.
    return min(int(exact.to_integral_value(ROUND_CEILING)), _MOST_RATE)


def _fingerprint(models: Mapping[str, ModelPrice], currency: str, version: str | int | None) -> str:
    """The version that rows keep: the file's own name for itself, and what is in it."""
    content = msgspec.json.encode((currency, sorted(models.items())))
    digest = hashlib.sha256(content).hexdigest()[:12]
    return digest if version is None else f"{version}+{digest}"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")
