"""``tidemill keys``: directly on the store, so that a key exists before a server listens."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import anyio
import click

from tidemill import clock, ids
from tidemill.cli import options
from tidemill.cli.screen import Failed, emit, say, table, when
from tidemill.ports import Keys
from tidemill.settings import load
from tidemill.types import KeyRecord

T = TypeVar("T")
PREFIX_CHARS = 7
DAY_S = 86_400


@click.group()
def keys() -> None:
    """API keys in the store. A running server sees the change at once."""


@keys.command()
@click.argument("name")
@click.option("--owner", help="Share the files and batches of this owner  [default: its own]")
@click.option("--days", type=click.IntRange(min=1), help="Expires so many days from now.")
@options.config
@options.setting_flags(("storage_path",))
@options.as_json
def add(
    name: str,
    owner: str | None,
    days: int | None,
    config: Path | None,
    storage_path: str | None,
    as_json: bool,
) -> None:
    """Add a key called NAME. Its secret is shown now and never again: only a hash is kept."""
    secret, id, now = ids.key_secret(), ids.key_id(), clock.now()
    key = KeyRecord(
        id=id,
        name=name,
        owner=owner or id,
        prefix=secret[:PREFIX_CHARS],
        digest=hashlib.sha256(secret.encode()).hexdigest(),
        created_at=now,
        expires_at=None if days is None else now + days * DAY_S,
    )
    _on_keys(config, storage_path, lambda table: table.add(key))
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
    found = _on_keys(config, storage_path, lambda table: table.page())
    if as_json:
        emit([shown(key) for key in found])
        return
    table(
        ("key", "name", "owner", "secret", "created", "expires", "revoked"),
        [
            (
                key.id,
                key.name,
                key.owner,
                f"{key.prefix}…",
                when(key.created_at),
                when(key.expires_at),
                when(key.revoked_at),
            )
            for key in found
        ],
    )


@keys.command()
@click.argument("key_id")
@options.config
@options.setting_flags(("storage_path",))
def revoke(key_id: str, config: Path | None, storage_path: str | None) -> None:
    """Revoke a key. What it made stays."""
    if not _on_keys(config, storage_path, lambda table: table.revoke(key_id)):
        raise Failed(f"There is no key {key_id} that could be revoked")
    say(f"Revoked {key_id}.")


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
    }


def _on_keys(
    config: Path | None, storage_path: str | None, act: Callable[[Keys], Awaitable[T]]
) -> T:
    settings = load({"storage_path": storage_path}, toml=config).settings
    # Late: the other commands start without loading the store.
    from tidemill.storage.keyring import open_keys

    async def work() -> T:
        async with open_keys(Path(settings.storage_path)) as table:
            return await act(table)

    return anyio.run(work)
