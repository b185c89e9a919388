"""Providers as settings: who they are, how to reach them, what they call our models.

The setting ``providers`` is a list of tables (``[[providers]]`` in ``tidemill.toml``) or the same
list as JSON in ``TIDEMILL_PROVIDERS``. Reading it contacts nobody; what can be known to be wrong
without asking is refused here, with one sentence.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from tidemill.errors import SettingsError

Kind = Literal["openai", "azure", "openai_compatible", "tidemill"]
Credential = Literal["key", "default", "managed_identity", "workload_identity", "client_secret"]


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Price per million tokens, in any one currency; a missing batch price means the standard
    one."""

    input: float
    output: float
    batch_input: float | None = None
    batch_output: float | None = None


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a provider calls one of our models; None: not offered that way."""

    batch: str | None = None
    """Its name or deployment for batches."""
    standard: str | None = None
    """Its name or deployment on the ordinary routes."""
    price: Price | None = None


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry as written; ``models`` may be a list of names, or names with theirs."""

    name: str
    kind: Kind
    base_url: str = ""
    api_key_env: str = ""
    credential: Credential = "key"
    scope: str = "https://cognitiveservices.azure.com/.default"
    client_id: str = ""
    api_version: str = ""
    models: list[str] | dict[str, str | Model] = {}
    timeout_s: float = 600.0
    connect_timeout_s: float = 5.0
    concurrency: int = 8


class Provider(msgspec.Struct, frozen=True, kw_only=True):
    """One provider, checked."""

    name: str
    kind: Kind
    base_url: str
    """Root of its routes; for Azure the resource's endpoint, without ``/openai``."""
    api_key_env: str = ""
    """Environment variable that holds the key; the key itself is in no setting."""
    credential: Credential = "key"
    """``key``, or how azure-identity finds a token."""
    scope: str = "https://cognitiveservices.azure.com/.default"
    client_id: str = ""
    """Of a user-assigned managed identity."""
    api_version: str = ""
    """Azure's dated spelling of the routes; empty: ``/openai/v1``."""
    models: dict[str, Model] = {}
    """By our name."""
    timeout_s: float = 600.0
    connect_timeout_s: float = 5.0
    concurrency: int = 8
    """Calls at once at most, all routes together."""

    def batch_models(self) -> frozenset[str]:
        """Our names of what it may be asked to batch."""
        return frozenset(name for name, model in self.models.items() if model.batch)

    def standard_models(self) -> frozenset[str]:
        """Our names of what its ordinary routes serve."""
        return frozenset(name for name, model in self.models.items() if model.standard)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TAKEN = frozenset({"local", "logos", "auto", "provider"})
_LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain"})
_DEFAULT_URL = {"openai": "https://api.openai.com/v1"}
# Addresses that answer with a machine's own credentials or configuration.
_METADATA = frozenset(
    ipaddress.ip_address(address)
    for address in ("100.100.100.200", "168.63.129.16", "fd00:ec2::254", "192.0.0.192")
)


def parse(value: str | list[Any], *, azure_api_version: str = "") -> tuple[Provider, ...]:
    """The providers of the setting, in order; ``azure_api_version`` fills in where none is given.

    Raises ``SettingsError`` for the first thing that is wrong.
    """
    if isinstance(value, str):
        if not value.strip():
            return ()
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as exc:
            raise SettingsError(f"Bad value for setting 'providers': not JSON ({exc}).") from exc
    try:
        tables = msgspec.convert(value, list[_Table])
    except msgspec.ValidationError as exc:
        raise SettingsError(f"Bad value for setting 'providers': {exc}.") from exc
    providers = tuple(_provider(table, azure_api_version) for table in tables)
    names = [provider.name for provider in providers]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"Two providers are named '{name}'; a name is given once.")
    return providers


def _provider(table: _Table, azure_api_version: str) -> Provider:
    where = f"Provider '{table.name}'"
    if not _NAME.fullmatch(table.name) or table.name in _TAKEN:
        raise SettingsError(
            f"{where}: a name has letters, digits, '.', '_' and '-', and is none of "
            f"{', '.join(sorted(_TAKEN))}."
        )
    url = (table.base_url or _DEFAULT_URL.get(table.kind, "")).rstrip("/")
    if not url:
        raise SettingsError(f"{where}: 'base_url' is missing.")
    if table.kind == "azure":
        url = re.sub(r"/openai(/v1)?$", "", url)
    _check_url(where, url)
    if table.kind != "azure" and table.credential != "key":
        raise SettingsError(f"{where}: credential '{table.credential}' is for kind azure only.")
    if table.kind in ("openai", "azure") and table.credential == "key" and not table.api_key_env:
        raise SettingsError(f"{where}: 'api_key_env' must name the variable that holds its key.")
    if table.timeout_s <= 0 or table.connect_timeout_s <= 0 or table.concurrency < 1:
        raise SettingsError(f"{where}: timeouts and concurrency must be positive.")
    return Provider(
        name=table.name,
        kind=table.kind,
        base_url=url,
        api_key_env=table.api_key_env,
        credential=table.credential,
        scope=table.scope,
        client_id=table.client_id,
        api_version=(table.api_version or azure_api_version) if table.kind == "azure" else "",
        models=_models(table.models),
        timeout_s=table.timeout_s,
        connect_timeout_s=table.connect_timeout_s,
        concurrency=table.concurrency,
    )


def _models(value: list[str] | Mapping[str, str | Model]) -> dict[str, Model]:
    if isinstance(value, list):
        return {name: Model(batch=name, standard=name) for name in value}
    return {
        name: Model(batch=theirs, standard=theirs) if isinstance(theirs, str) else theirs
        for name, theirs in value.items()
    }


def _check_url(where: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError as exc:
        raise SettingsError(f"{where}: the base URL is not a URL ({exc}).") from exc
    if parts.scheme not in ("http", "https") or not host:
        raise SettingsError(f"{where}: the base URL must begin with https://.")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise SettingsError(f"{where}: the base URL holds only scheme, host, port and path.")
    if parts.scheme == "http" and not is_loopback(host):
        raise SettingsError(f"{where}: plain http is allowed to loopback only; use https://.")
    if (reason := forbidden_address(host)) is not None:
        raise SettingsError(f"{where}: the base URL points to {reason}.")


def is_loopback(host: str) -> bool:
    """True for ``localhost`` and loopback addresses; names are not resolved."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in _LOOPBACK_NAMES


def forbidden_address(host: str) -> str | None:
    """Why no credential may be sent to this address; None for other addresses and for names."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    address = mapped or address
    if address in _METADATA:
        return f"a metadata service ({address})"
    if address.is_link_local:
        return f"a link-local address ({address})"
    if address.is_unspecified or address.is_multicast:
        return f"an address that is nobody's ({address})"
    return None
