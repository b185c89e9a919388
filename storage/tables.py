"""The small tables: API keys, the ledger, facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from tidemill.errors import InvariantBroken
from tidemill.ports import Clock
from tidemill.storage import money
from tidemill.storage.queries import load
from tidemill.storage.readers import Readers
from tidemill.storage.records import key_record, text, usage_row
from tidemill.storage.trail import note
from tidemill.storage.writer import Tx, Writer
from tidemill.types import Actor, KeyRecord, Limits, UsageQuery, UsageRow, UsageSum

_K = load("keys")
_L = load("ledger")
_F = load("facts")


def key_values(key: KeyRecord) -> dict[str, Any]:
    """A key as the columns of ``keys``."""
    return {
        "id": key.id,
        "name": key.name,
        "owner": key.owner,
        "prefix": key.prefix,
        "digest": key.digest,
        "scopes": text(sorted(key.scopes)),
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "team_id": key.team_id,
        "user_id": key.user_id,
        "limits": text(key.limits),
        "last_used_at": key.last_used_at,
    }


class SqliteKeys:
    """``ports.Keys``."""

    def __init__(self, writer: Writer, readers: Readers) -> None:
        self._writer = writer
        self._readers = readers

    async def add(self, key: KeyRecord, by: Actor | None = None) -> None:
        """Keep a key. Raises ``InvariantBroken`` when its id or digest is there already."""

        def write(tx: Tx) -> None:
            tx.run(_K["add"], key_values(key))
            note(tx, by, "key.created", key.id, key.owner)

        await self._writer.run(write)

    async def find(self, digest: str) -> KeyRecord | None:
        """None when unknown; revoked and expired keys are returned, the caller decides."""
        row = await self._readers.run(
            lambda conn: conn.execute(_K["find"], {"digest": digest}).fetchone()
        )
        return None if row is None else key_record(row)

    async def page(self) -> list[KeyRecord]:
        """All keys, oldest first."""
        rows = await self._readers.run(lambda conn: conn.execute(_K["page"]).fetchall())
        return [key_record(row) for row in rows]

    async def revoke(self, id: str, by: Actor | None = None) -> bool:
        """False when there is no such key or it was revoked before."""

        def write(tx: Tx) -> bool:
            if tx.run(_K["revoke"], {"id": id, "now": tx.now_s}).rowcount == 0:
                return False
            note(tx, by, "key.revoked", id, tx.one(_K["by_id"], {"id": id})["owner"])
            return True

        return await self._writer.run(write)

    async def change(
        self,
        id: str,
        *,
        name: str | None = None,
        limits: Limits | None = None,
        expires_at: int | UnsetType | None = UNSET,
        by: Actor | None = None,
    ) -> KeyRecord | None:
        """Change what is given; what the key owns stays its. ``expires_at=None``: it never
        expires. None when there is no such key."""
        values = {
            "id": id,
            "name": name,
            "limits": None if limits is None else text(limits),
            "ends": expires_at is not UNSET,
            "expires_at": None if expires_at is UNSET else expires_at,
        }

        def write(tx: Tx) -> KeyRecord | None:
            tx.run(_K["change"], values)
            row = tx.one(_K["by_id"], {"id": id})
            if row is None:
                return None
            note(tx, by, "key.changed", id, row["owner"])
            return key_record(row)

        return await self._writer.run(write)

    async def touch(self, seen: Mapping[str, int]) -> None:
        """Note when keys (by id) were last used; an earlier time than the known one is ignored."""
        if seen:
            values = {"seen": text(list(seen.items()))}
            await self._writer.run(lambda tx: tx.run(_K["touch"], values).rowcount)


class SqliteLedger:
    """``ports.Ledger``. ``freed`` is called after a commit that gave back a reservation."""

    def __init__(self, writer: Writer, readers: Readers, freed: Callable[[], None]) -> None:
        self._writer = writer
        self._readers = readers
        self._freed = freed

    async def book(self, rows: Sequence[UsageRow], *, reservation: int | None = None) -> None:
        """Book rows at the prices in force, in one commit; a batch's line that is booked already is
        left as it is. The true cost takes the place of what a request reserved."""

        def write(tx: Tx) -> None:
            _book(tx, rows)
            money.release(tx, reservation)

        if rows or reservation is not None:
            await self._writer.run(write)
        if reservation is not None:
            self._freed()

    async def usage(self, owner: str | None, since_at: int, until_at: int) -> list[UsageRow]:
        """Rows of ``[since_at, until_at)`` in booking order; a null owner means all owners."""
        values = {"owner": owner, "since_at": since_at, "until_at": until_at}
        query = _L["of_all" if owner is None else "of_owner"]
        rows = await self._readers.run(lambda conn: conn.execute(query, values).fetchall())
        return [usage_row(row) for row in rows]

    async def report(self, query: UsageQuery) -> list[UsageSum]:
        """Sums of usage rows by group, in the groups' order."""
        return await self._readers.run(lambda conn: money.report(conn, query))


def _book(tx: Tx, rows: Sequence[UsageRow]) -> None:
    of_none: list[UsageRow] = []
    of_batches: dict[str, dict[str | None, UsageRow]] = {}
    for row in rows:
        if row.batch_id is None:
            of_none.append(row)
        else:
            of_batches.setdefault(row.batch_id, {}).setdefault(row.custom_id, row)
    money.book(tx, of_none)
    for batch_id, lines in of_batches.items():
        batch = tx.one(_L["seq_of"], {"id": batch_id})
        if batch is None:
            raise InvariantBroken(f"There is no batch {batch_id} to book lines of.")
        seq = batch["seq"]
        fresh = [row for custom_id, row in lines.items() if not money.booked(tx, seq, custom_id)]
        money.book(tx, fresh, seq)


class SqliteFacts:
    """``ports.Facts``."""

    def __init__(self, writer: Writer, readers: Readers, clock: Clock) -> None:
        self._writer = writer
        self._readers = readers
        self._clock = clock

    async def get(self, kind: str, key: str) -> tuple[bytes, int] | None:
        """Value and when it was set; None when unknown or past its time."""
        values = {"kind": kind, "key": key, "now": int(self._clock())}
        row = await self._readers.run(lambda conn: conn.execute(_F["get"], values).fetchone())
        return None if row is None else (row["value"], row["set_at"])

    async def put(self, kind: str, key: str, value: bytes, ttl_s: int | None = None) -> None:
        """Remember, for ``ttl_s`` seconds or for good; an older value is replaced."""

        def write(tx: Tx) -> None:
            until_at = None if ttl_s is None else tx.now_s + ttl_s
            values = {"kind": kind, "key": key, "value": bytes(value), "now": tx.now_s}
            tx.run(_F["put"], {**values, "until_at": until_at})

        await self._writer.run(write)

    async def forget(
        self, kind: str, key: str | None = None, by: Actor | None = None, about: str = ""
    ) -> int:
        """Forget one fact, or all of a kind; returns how many."""

        def write(tx: Tx) -> int:
            forgotten: int = tx.run(_F["forget"], {"kind": kind, "key": key}).rowcount
            if forgotten:
                note(tx, by, f"{kind}.forgotten", about)
            return forgotten

        return await self._writer.run(write)

    async def all(self, kind: str) -> dict[str, tuple[bytes, int]]:
        """All facts of a kind that are not past their time."""
        values = {"kind": kind, "now": int(self._clock())}
        rows = await self._readers.run(lambda conn: conn.execute(_F["all"], values).fetchall())
        return {row["key"]: (row["value"], row["set_at"]) for row in rows}

    async def sweep(self) -> None:
        """Drop what is past its time."""
        await self._writer.run(lambda tx: tx.run(_F["drop_past"], {"now": tx.now_s}).rowcount)
