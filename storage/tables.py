"""The small tables: API keys, the ledger, facts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidemill.ports import Clock
from tidemill.storage.queries import load
from tidemill.storage.readers import Readers
from tidemill.storage.records import key_record, text, usage_row
from tidemill.storage.writer import Tx, Writer
from tidemill.types import KeyRecord, UsageRow

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
    }


class SqliteKeys:
    """``ports.Keys``."""

    def __init__(self, writer: Writer, readers: Readers) -> None:
        self._writer = writer
        self._readers = readers

    async def add(self, key: KeyRecord) -> None:
        """Keep a key. Raises ``InvariantBroken`` when its id or digest is there already."""
        await self._writer.run(lambda tx: tx.run(_K["add"], key_values(key)).rowcount)

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

    async def revoke(self, id: str) -> bool:
        """False when there is no such key or it was revoked before."""
        return await self._writer.run(
            lambda tx: tx.run(_K["revoke"], {"id": id, "now": tx.now_s}).rowcount == 1
        )


class SqliteLedger:
    """``ports.Ledger``."""

    def __init__(self, writer: Writer, readers: Readers) -> None:
        self._writer = writer
        self._readers = readers

    async def book(self, rows: Sequence[UsageRow]) -> None:
        """Book rows in one commit; a batch's line that is booked already is left as it is."""
        if rows:
            await self._writer.run(
                lambda tx: tx.conn.executemany(_L["book"], [_booking(row) for row in rows]).rowcount
            )

    async def usage(self, owner: str | None, since_at: int, until_at: int) -> list[UsageRow]:
        """Rows of ``[since_at, until_at)`` in booking order; a null owner means all owners."""
        values = {"owner": owner, "since_at": since_at, "until_at": until_at}
        query = _L["of_all" if owner is None else "of_owner"]
        rows = await self._readers.run(lambda conn: conn.execute(query, values).fetchall())
        return [usage_row(row) for row in rows]


def _booking(row: UsageRow) -> dict[str, Any]:
    return {
        "owner": row.owner,
        "key_id": row.key_id,
        "model": row.model,
        "execution": row.execution,
        "tier": row.tier,
        "input": row.usage.input,
        "cached": row.usage.cached,
        "output": row.usage.output,
        "reasoning": row.usage.reasoning,
        "batch_id": row.batch_id,
        "custom_id": row.custom_id,
        "at": row.at,
    }


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

    async def forget(self, kind: str, key: str | None = None) -> int:
        """Forget one fact, or all of a kind; returns how many."""
        values = {"kind": kind, "key": key}
        return await self._writer.run(lambda tx: tx.run(_F["forget"], values).rowcount)

    async def all(self, kind: str) -> dict[str, tuple[bytes, int]]:
        """All facts of a kind that are not past their time."""
        values = {"kind": kind, "now": int(self._clock())}
        rows = await self._readers.run(lambda conn: conn.execute(_F["all"], values).fetchall())
        return {row["key"]: (row["value"], row["set_at"]) for row in rows}

    async def sweep(self) -> None:
        """Drop what is past its time."""
        await self._writer.run(lambda tx: tx.run(_F["drop_past"], {"now": tx.now_s}).rowcount)
