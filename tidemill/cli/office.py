"""What the operator's commands share: the store's small tables, and options for limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import click

from tidemill import limits
from tidemill.cli.screen import Failed
from tidemill.settings import load
from tidemill.types import Account, AccountKind, Actor, Limits

if TYPE_CHECKING:
    from tidemill.storage.keyring import Office

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

OPERATOR = Actor(id="cli")
"""Who does what is done on this machine, in the audit trail."""
NONE = "none"

_NUMBERS = (
    ("requests_per_minute", "Interactive requests a minute."),
    ("tokens_per_minute", "Tokens of interactive requests a minute."),
    ("enqueued_lines", "Lines of batches that have not ended."),
    ("enqueued_tokens", "Estimated input tokens of these lines."),
    ("storage_bytes", "Bytes of the input files that are kept."),
    ("monthly_budget", "Amount of currency a month (UTC), e.g. 12.50."),
)


def limit_flags(function: F) -> F:
    """One option per limit; ``none`` takes a limit away."""
    for name, help in reversed(_NUMBERS):
        function = click.option(f"--{name.replace('_', '-')}", name, metavar="N", help=help)(
            function
        )
    function = click.option(
        "--lane", metavar="|".join(limits.LANES), help="Best lane of interactive requests."
    )(function)
    function = click.option(
        "--at",
        "at",
        multiple=True,
        metavar="PROVIDER=MODEL[,MODEL]",
        help="Models at a provider ('local' is one); those that are not named are closed.",
    )(function)
    return click.option(
        "--models", metavar="MODEL[,MODEL]", help="Models that may be used; 'gpt-*' is a beginning."
    )(function)


def changed_limits(now: Limits, given: dict[str, Any]) -> Limits:
    """Limits with those of the options put in. Raises ``BadParameter``."""
    fields = limits.written(now)
    for name, value in given.items():
        if name == "at":
            if value:
                fields["providers"] = None if NONE in value else _at(value)
        elif value is not None:
            fields[name] = _field(name, value)
    try:
        return limits.parse(fields)
    except ValueError as exc:
        raise click.BadParameter(f"{exc}.") from None


def _field(name: str, value: str) -> Any:
    if value == NONE:
        return None
    if name == "models":
        return _names(value)
    if name in ("lane", "monthly_budget"):
        return value
    if not (value.isascii() and value.isdigit()):
        raise click.BadParameter(f"'{value}' is not a whole number.", param_hint=f"--{name}")
    return int(value)


def _names(value: str) -> list[str]:
    return [name.strip() for name in value.split(",") if name.strip()]


def _at(values: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for value in values:
        provider, sign, models = value.partition("=")
        if not provider or not sign:
            raise click.BadParameter(f"'{value}' is not PROVIDER=MODEL.", param_hint="--at")
        found.setdefault(provider, []).extend(_names(models))
    return found


def on_office(
    config: Path | None,
    storage_path: str | None,
    act: Callable[[Office], Awaitable[T]],
    *,
    makes: bool = False,
) -> T:
    """Do something on the store, also while a server runs on it. ``makes``: a store that is not
    there is made; else ``Failed`` is raised, because a mistyped path would look like no use."""
    settings = load({"storage_path": storage_path}, toml=config).settings
    # Late: the other commands start without loading the store.
    from tidemill.storage.connections import DATABASE
    from tidemill.storage.keyring import open_office

    if not makes and not Path(settings.storage_path, DATABASE).exists():
        raise Failed(f"There is no store in {settings.storage_path}; --storage-path names another")

    async def work() -> T:
        async with open_office(Path(settings.storage_path)) as office:
            return await act(office)

    return anyio.run(work)


async def found(office: Office, kind: AccountKind, asked: str) -> Account:
    """A team or user by id or name. Raises ``Failed`` when there is none."""
    account = await office.accounts.get(kind, asked)
    if account is None:
        raise Failed(f"There is no {kind} '{asked}'")
    return account
