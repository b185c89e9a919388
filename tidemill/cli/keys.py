"""``tidemill keys``: directly on the store, so that a key exists before a server listens."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import UNSET

from tidemill import access, clock, ids
from tidemill.cli import options
from tidemill.cli.office import NONE, OPERATOR, changed_limits, found, limit_flags, on_office
from tidemill.cli.screen import Failed, emit, say, table, when
from tidemill.limits import written
from tidemill.types import KeyRecord, Limits

if TYPE_CHECKING:
    from tidemill.storage.keyring import Office

PREFIX_CHARS = 7
DAY_S = 86_400
MOST_DAYS = 36_500


@click.group()
def keys() -> None:
    """API keys in the store. A running server sees the change at once."""


@keys.command()
@click.argument("name")
@click.option("--owner", help="Share the files and batches of this owner  [default: its own]")
@click.option("--team", help="Id or name of the team that it belongs to, which owns what it makes.")
@click.option("--user", help="Id or name of the user that it belongs to.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(sorted(access.SCOPES)),
    help="What it is for; may be repeated  [default: batch and inference]",
)
@click.option("--days", type=click.IntRange(min=1), help="Expires so many days from now.")
@limit_flags
@options.config
@options.setting_flags(("storage_path",))
@options.as_json
def add(
    name: str,
    owner: str | None,
    team: str | None,
    user: str | None,
    scopes: tuple[str, ...],
    days: int | None,
    config: Path | None,
    storage_path: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Add a key called NAME. Its secret is shown now and never again: only a hash is kept."""
    if owner is not None and (team is not None or user is not None):
        raise click.UsageError("--owner does not go with --team or --user: those are the owner.")
    secret, id, now = ids.key_secret(), ids.key_id(), clock.now()
    limits = changed_limits(Limits(), given)

    async def act(office: Office) -> KeyRecord:
        team_id = None if team is None else (await found(office, "team", team)).id
        user_id = None if user is None else (await found(office, "user", user)).id
        key = KeyRecord(
            id=id,
            name=name,
            owner=owner or access.owner(id, team_id, user_id),
            prefix=secret[:PREFIX_CHARS],
            digest=hashlib.sha256(secret.encode()).hexdigest(),
            scopes=frozenset(scopes),
            created_at=now,
            expires_at=None if days is None else now + days * DAY_S,
            team_id=team_id,
            user_id=user_id,
            limits=limits,
        )
        await office.keys.add(key, OPERATOR)
        return key

    key = on_office(config, storage_path, act, makes=True)
    if as_json:
        emit({**shown(key), "secret": secret})
    else:
        say(f"Key {key.id} ({name}); the secret is not stored, keep it:")
        click.echo(secret)


@keys.command("list")
@options.config
@options.setting_flags(("storage_path",))
@options.as_json
def list_(config: Path | None, storage_path: str | None, as_json: bool) -> None:
    """List keys, revoked ones too."""
    rows = on_office(config, storage_path, lambda office: office.keys.page())
    if as_json:
        emit([shown(key) for key in rows])
        return
    table(
        ("key", "name", "owner", "secret", "created", "used", "expires", "revoked"),
        [
            (
                key.id,
                key.name,
                key.owner,
                f"{key.prefix}…",
                when(key.created_at),
                when(key.last_used_at),
                when(key.expires_at),
                when(key.revoked_at),
            )
            for key in rows
        ],
    )


@keys.command()
@click.argument("key_id")
@options.config
@options.setting_flags(("storage_path",))
@options.as_json
def revoke(key_id: str, config: Path | None, storage_path: str | None, as_json: bool) -> None:
    """Revoke a key. What it made stays."""

    async def act(office: Office) -> KeyRecord:
        if not await office.keys.revoke(key_id, OPERATOR):
            raise Failed(
                f"There is no key with the id {key_id} that could be revoked; 'tidemill keys "
                "list' shows them"
            )
        return next(key for key in await office.keys.page() if key.id == key_id)

    key = on_office(config, storage_path, act)
    emit(shown(key)) if as_json else say(f"Revoked {key.id}.")


@keys.command()
@click.argument("key_id")
@click.option("--name", help="Another name.")
@click.option("--days", metavar="N", help="Expires so many days from now; 'none': never.")
@limit_flags
@options.config
@options.setting_flags(("storage_path",))
@options.as_json
def change(
    key_id: str,
    name: str | None,
    days: str | None,
    config: Path | None,
    storage_path: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Change the name, end or limits of a key; 'none' takes one away. What it owns stays its."""
    expires_at = UNSET if days is None else _end(days)

    async def act(office: Office) -> KeyRecord:
        grant = await office.accounts.grant(key_id)
        if grant is None:
            raise Failed(f"There is no key with the id {key_id}; 'tidemill keys list' shows them")
        wanted = changed_limits(grant.key.limits, given)
        changed = await office.keys.change(
            key_id, name=name, limits=wanted, expires_at=expires_at, by=OPERATOR
        )
        return changed or grant.key

    key = on_office(config, storage_path, act)
    if as_json:
        emit(shown(key))
    else:
        say(f"Changed {key.id}.")


def _end(days: str) -> int | None:
    if days == NONE:
        return None
    if not (days.isascii() and days.isdigit() and int(days) <= MOST_DAYS):
        raise click.BadParameter(
            f"'{days}' is neither '{NONE}' nor 0 to {MOST_DAYS}.", param_hint="--days"
        )
    return clock.now() + int(days) * DAY_S


def shown(key: KeyRecord) -> dict[str, Any]:
    """A key without its hash."""
    return {
        "id": key.id,
        "name": key.name,
        "owner": key.owner,
        "prefix": key.prefix,
        "scopes": sorted(key.scopes),
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "last_used_at": key.last_used_at,
        "team": key.team_id,
        "user": key.user_id,
        "limits": written(key.limits),
    }
