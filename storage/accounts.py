"""Teams, users and what a key grants with them."""

from __future__ import annotations

import sqlite3

import msgspec

from tidemill.errors import Conflict
from tidemill.storage.queries import load
from tidemill.storage.readers import Readers
from tidemill.storage.records import key_record, limits_of, record, text
from tidemill.storage.trail import note
from tidemill.storage.writer import Tx, Writer
from tidemill.types import Account, AccountKind, Actor, Grant, Limits

_Q = load("accounts")


class SqliteAccounts:
    """``ports.Accounts``."""

    def __init__(self, writer: Writer, readers: Readers) -> None:
        self._writer = writer
        self._readers = readers

    async def add(self, account: Account, by: Actor | None = None) -> None:
        """Raises ``Conflict`` when an open account of the kind has the name."""
        values = {**msgspec.structs.asdict(account), "limits": text(account.limits)}

        def write(tx: Tx) -> None:
            _free(tx, account.kind, account.name, account.id)
            tx.run(_Q["add"], values)
            note(tx, by, f"{account.kind}.created", account.id)

        await self._writer.run(write)

    async def get(self, kind: AccountKind, id_or_name: str) -> Account | None:
        """By id, or by the name of an open one."""
        values = {"kind": kind, "asked": id_or_name}
        row = await self._readers.run(lambda conn: conn.execute(_Q["get"], values).fetchone())
        return None if row is None else _account(row)

    async def page(self, kind: AccountKind) -> list[Account]:
        """All of a kind, closed ones too, oldest first."""
        rows = await self._readers.run(
            lambda conn: conn.execute(_Q["page"], {"kind": kind}).fetchall()
        )
        return [_account(row) for row in rows]

    async def change(
        self,
        id: str,
        *,
        name: str | None = None,
        limits: Limits | None = None,
        by: Actor | None = None,
    ) -> Account | None:
        """Change what is given; None when there is no such account.

        Raises ``Conflict`` when an open account of the kind has the name.
        """
        values = {"id": id, "name": name, "limits": None if limits is None else text(limits)}

        def write(tx: Tx) -> Account | None:
            row = tx.one(_Q["by_id"], {"id": id})
            if row is None:
                return None
            if name is not None and row["closed_at"] is None:
                _free(tx, row["kind"], name, id)
            tx.run(_Q["change"], values)
            note(tx, by, f"{row['kind']}.changed", id)
            return _account(tx.one(_Q["by_id"], {"id": id}))

        return await self._writer.run(write)

    async def close(self, id: str, by: Actor | None = None) -> bool:
        """Its keys may do nothing from now on; False when it was closed or never was."""

        def write(tx: Tx) -> bool:
            row = tx.one(_Q["by_id"], {"id": id})
            if tx.run(_Q["close"], {"id": id, "now": tx.now_s}).rowcount == 0:
                return False
            note(tx, by, f"{row['kind']}.closed", id)
            return True

        return await self._writer.run(write)

    async def grant(self, key_id: str) -> Grant | None:
        """A key with its team and user; None when the store has no such key."""
        return await self._readers.run(lambda conn: grant_of(conn, key_id))


def grant_of(conn: sqlite3.Connection, key_id: str) -> Grant | None:
    """``SqliteAccounts.grant`` on a connection."""
    row = conn.execute(_Q["key"], {"id": key_id}).fetchone()
    if row is None:
        return None
    key = key_record(row)
    return Grant(key=key, team=_by_id(conn, key.team_id), user=_by_id(conn, key.user_id))


def _by_id(conn: sqlite3.Connection, id: str | None) -> Account | None:
    if id is None:
        return None
    return _account(conn.execute(_Q["by_id"], {"id": id}).fetchone())


def _free(tx: Tx, kind: str, name: str, id: str) -> None:
    if tx.one(_Q["taken"], {"kind": kind, "name": name, "except": id}) is not None:
        raise Conflict(f"There is a {kind} called '{name}' already.")


def _account(row: sqlite3.Row) -> Account:
    return record(Account, row, limits=limits_of(row))
