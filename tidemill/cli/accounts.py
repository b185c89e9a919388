"""``tidemill teams`` and ``tidemill users``: who keys belong to, and what they may do together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tidemill import clock, ids, limits
from tidemill.cli import options
from tidemill.cli.office import OPERATOR, changed_limits, found, limit_flags, on_office
from tidemill.cli.screen import Failed, emit, say, table, when
from tidemill.types import Account, AccountKind, Limits

if TYPE_CHECKING:
    from tidemill.storage.keyring import Office


@click.group()
def teams() -> None:
    """Teams share what their keys make, their limits and their budget."""


@click.group()
def users() -> None:
    """Users hold personal keys: limits and budget are shared, files and batches are not."""


def _commands(group: click.Group, kind: AccountKind) -> None:
    @group.command()
    @click.argument("name")
    @limit_flags
    @options.config
    @options.setting_flags(("storage_path",))
    @options.as_json
    def add(
        name: str, config: Path | None, storage_path: str | None, as_json: bool, **given: Any
    ) -> None:
        account = Account(
            kind=kind,
            id=ids.account_id(kind),
            name=name,
            limits=changed_limits(Limits(), given),
            created_at=clock.now(),
        )

        async def act(office: Office) -> None:
            await office.accounts.add(account, OPERATOR)

        on_office(config, storage_path, act, makes=True)
        emit(shown(account)) if as_json else click.echo(account.id)

    add.help = f"Add a {kind} called NAME."

    @group.command("list")
    @options.config
    @options.setting_flags(("storage_path",))
    @options.as_json
    def list_(config: Path | None, storage_path: str | None, as_json: bool) -> None:
        rows = on_office(config, storage_path, lambda office: office.accounts.page(kind))
        if as_json:
            emit([shown(account) for account in rows])
            return
        table(
            (kind, "name", "limits", "created", "closed"),
            [
                (one.id, one.name, _line(one.limits), when(one.created_at), when(one.closed_at))
                for one in rows
            ],
        )

    list_.help = f"List {kind}s, closed ones too."

    @group.command()
    @click.argument("account", metavar=kind.upper())
    @click.option("--name", help="Another name.")
    @limit_flags
    @options.config
    @options.setting_flags(("storage_path",))
    @options.as_json
    def change(
        account: str,
        name: str | None,
        config: Path | None,
        storage_path: str | None,
        as_json: bool,
        **given: Any,
    ) -> None:
        async def act(office: Office) -> Account:
            known = await found(office, kind, account)
            wanted = changed_limits(known.limits, given)
            changed = await office.accounts.change(known.id, name=name, limits=wanted, by=OPERATOR)
            return changed or known

        changed = on_office(config, storage_path, act)
        emit(shown(changed)) if as_json else say(f"{changed.id}: {_line(changed.limits) or '-'}")

    change.help = f"Change the name or limits of a {kind}; 'none' takes a limit away."

    @group.command()
    @click.argument("account", metavar=kind.upper())
    @options.config
    @options.setting_flags(("storage_path",))
    @options.as_json
    def close(account: str, config: Path | None, storage_path: str | None, as_json: bool) -> None:
        async def act(office: Office) -> Account:
            known = await found(office, kind, account)
            if not await office.accounts.close(known.id, OPERATOR):
                raise Failed(f"The {kind} '{account}' was closed before")
            return await found(office, kind, known.id)

        closed = on_office(config, storage_path, act)
        emit(shown(closed)) if as_json else say(f"Closed {closed.id}.")

    close.help = f"Close a {kind}: its keys end, what it owns stays."


_commands(teams, "team")
_commands(users, "user")


def shown(account: Account) -> dict[str, Any]:
    """A team or user as JSON."""
    return {
        "id": account.id,
        "name": account.name,
        "limits": limits.written(account.limits),
        "created_at": account.created_at,
        "closed_at": account.closed_at,
    }


def _line(one: Limits) -> str:
    return " ".join(f"{name}={_text(value)}" for name, value in limits.written(one).items())


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ";".join(f"{name}:{_text(models)}" for name, models in value.items())
    return ",".join(value) if isinstance(value, list) else str(value)
