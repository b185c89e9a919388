"""Usage rows with their price, what has been spent, and what is reserved.

Every row is booked through ``book``, inside the commit that settles what it is for: row, monthly
spending and the batch's own cost change together or not at all.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal, get_args

import anyio

from tidemill import budgets
from tidemill.access import accounts
from tidemill.ports import Clock
from tidemill.storage.accounts import grant_of
from tidemill.storage.queries import load
from tidemill.storage.readers import Readers
from tidemill.storage.records import text
from tidemill.storage.writer import Tx, Writer
from tidemill.types import (
    BatchStatus,
    Grouping,
    Lease,
    Limits,
    NewBatch,
    NewFile,
    Purse,
    Usage,
    UsageQuery,
    UsageRow,
    UsageSum,
)

_Q = load("money")

Kind = Literal["key", "team", "user"]


# --- booking ----------------------------------------------------------------------------------


def book(tx: Tx, rows: Sequence[UsageRow], batch_seq: int | None = None) -> None:
    """Book rows at the prices in force; those of a batch all belong to ``batch_seq``."""
    if not rows:
        return
    values: list[tuple[Any, ...]] = []
    spent: dict[tuple[str, str, int], int] = defaultdict(int)
    total = 0
    known: dict[str | None, tuple[str | None, str | None]] = {None: (None, None)}
    for row in rows:
        if row.key_id not in known:
            known[row.key_id] = _accounts_of(tx, row.key_id)
        team_id, user_id = known[row.key_id]
        quote = tx.prices.quote(row.model, execution=row.execution, tier=row.tier)
        rate, usage = quote.rate, row.usage
        cost = rate.cost(usage)
        who = (row.owner, row.key_id, team_id, user_id)
        what = (row.model, row.execution, row.tier)
        used = (usage.input, usage.cached, usage.output, usage.reasoning)
        price = (quote.version, rate.input, rate.cached, rate.output, cost)
        values.append((*who, *what, *used, batch_seq, row.custom_id, row.at, *price))
        if cost:
            total += cost
            month = budgets.month(row.at)
            for kind, id in (("key", row.key_id), ("team", team_id), ("user", user_id)):
                if id is not None:
                    spent[kind, id, month] += cost
    tx.run(_Q["book"], {"rows": text(values)})
    for (kind, id, month), amount in spent.items():
        tx.run(_Q["spend"], {"kind": kind, "id": id, "month": month, "amount": amount})
    if total and batch_seq is not None:
        tx.run(_Q["charge"], {"batch_seq": batch_seq, "cost": total})


def booked(tx: Tx, batch_seq: int, custom_id: str | None) -> bool:
    """True when a line of a batch has its usage row."""
    values = {"batch_seq": batch_seq, "custom_id": custom_id}
    return tx.one(_Q["booked"], values) is not None


def _accounts_of(tx: Tx, key_id: str | None) -> tuple[str | None, str | None]:
    row = tx.one(_Q["accounts_of"], {"key_id": key_id})
    return (None, None) if row is None else (row["team_id"], row["user_id"])


def report(conn: sqlite3.Connection, query: UsageQuery) -> list[UsageSum]:
    """Sums of usage rows by group, in the groups' order."""
    values = {
        "since_at": query.since_at,
        "until_at": query.until_at,
        "owner": query.owner,
        **{name: name in query.by for name in get_args(Grouping)},
    }
    sums = [
        UsageSum(
            group={name: row[name] for name in query.by},
            rows=row["rows"],
            usage=Usage(
                input=row["input"],
                cached=row["cached"],
                output=row["output"],
                reasoning=row["reasoning"],
            ),
            cost=row["cost"],
        )
        for row in conn.execute(_Q["report"], values)
    ]
    return sorted(sums, key=lambda one: [value or "" for value in one.group.values()])


# --- budgets ----------------------------------------------------------------------------------


def reserve(tx: Tx, new: NewBatch, batch_seq: int) -> None:
    """Admit a batch that was just inserted, and reserve what it asks for.

    Raises ``BudgetExceeded`` and ``QuotaExceeded``, which undo the insertion.
    """
    lines, tokens = new.file.facts.lines, new.file.bytes // budgets.BYTES_PER_TOKEN
    purses = _purses(tx.conn, new.key_id, tx.now, own=batch_seq)
    budgets.admit(purses, hold=new.hold, lines=lines, tokens=tokens)
    if new.max_cost is not None or new.hold:
        values = {"batch_seq": batch_seq, "max_cost": new.max_cost, "hold": new.hold}
        tx.run(_Q["reserve"], values)


def keep(tx: Tx, new: NewFile, size: int) -> None:
    """Admit a file of ``size`` bytes. Raises ``StorageQuotaExceeded``."""
    if new.quota is not None:
        budgets.keep(_stored(tx.conn, new.owner), size, new.quota)


class SqliteBudgets:
    """``ports.Budgets``."""

    def __init__(self, writer: Writer, readers: Readers, clock: Clock) -> None:
        self._writer = writer
        self._readers = readers
        self._clock = clock
        self._turn = 0
        self._freed = anyio.Event()

    async def purses(self, key_id: str | None) -> list[Purse]:
        """Of the key, its team and its user, as far as it has them."""
        now = self._clock()
        return await self._readers.run(lambda conn: _purses(conn, key_id, now))

    async def hold(self, lease: Lease, amount: int) -> budgets.Turn:
        """Reserve what a leased line may cost, until it is settled or released."""
        return await self._writer.run(lambda tx: _hold(tx, lease, amount))

    async def begin(self, key_id: str, amount: int) -> int | None:
        """Reserve what an interactive request may cost, until it is booked or released."""
        return await self._writer.run(lambda tx: _begin(tx, key_id, amount))

    async def release(self, reservation: int) -> None:
        """Give back what a request reserved that cost nothing."""
        await self._writer.run(lambda tx: release(tx, reservation))
        self.ring()

    async def release_all(self) -> None:
        """Give back what a dead server's requests reserved."""
        await self._writer.run(lambda tx: tx.run(_Q["release_all"]).rowcount)

    @property
    def turn(self) -> int:
        """Counts the commits that ended lines or requests; read before ``hold`` and ``begin``."""
        return self._turn

    async def freed(self, since: int) -> None:
        """Returns once a commit has ended lines or requests after ``turn`` was ``since``."""
        while self._turn == since:
            await self._freed.wait()

    def ring(self) -> None:
        """A commit has ended lines or requests."""
        self._turn += 1
        self._freed.set()
        self._freed = anyio.Event()

    async def stored(self, owner: str) -> int:
        """Bytes of the input files that an owner keeps."""
        return await self._readers.run(lambda conn: _stored(conn, owner))


def _limited(conn: sqlite3.Connection, key_id: str | None) -> list[tuple[Kind, str, Limits]]:
    grant = None if key_id is None else grant_of(conn, key_id)
    if grant is None:
        return []
    return [
        ("key", grant.key.id, grant.key.limits),
        *((account.kind, account.id, account.limits) for account in accounts(grant)),
    ]


def _purses(conn: sqlite3.Connection, key_id: str | None, now: float, own: int = 0) -> list[Purse]:
    """``own`` is a batch that does not count: it is the one that asks."""
    month = budgets.month(now)
    purses = []
    for kind, id, limits in _limited(conn, key_id):
        held = _held(conn, kind, id, own)
        enqueued = conn.execute(_Q["enqueued"], {"kind": kind, "id": id, "own": own}).fetchone()
        purses.append(
            Purse(
                kind=kind,
                id=id,
                limits=limits,
                spent=_spent(conn, kind, id, month),
                committed=held["reserved"] + held["in_flight"],
                lines=enqueued["lines"],
                tokens=enqueued["bytes"] // budgets.BYTES_PER_TOKEN,
            )
        )
    return purses


def _hold(tx: Tx, lease: Lease, amount: int) -> budgets.Turn:
    batch = tx.one(_Q["batch"], {"batch_seq": lease.batch_seq})
    if batch["status"] != BatchStatus.IN_PROGRESS:
        return "closing"
    month = budgets.month(tx.now)
    positions = []
    if batch["max_cost"] is not None:
        positions.append(
            budgets.Position(
                limit=batch["max_cost"], spent=batch["cost"], own_in_flight=batch["in_flight"]
            )
        )
    for kind, id, limits in _limited(tx.conn, batch["key_id"]):
        if limits.monthly_budget is not None:
            held = _held(tx.conn, kind, id, lease.batch_seq)
            positions.append(
                budgets.Position(
                    limit=limits.monthly_budget,
                    spent=_spent(tx.conn, kind, id, month),
                    reserved=held["reserved"],
                    in_flight=held["in_flight"],
                    own_reserved=batch["held"],
                    own_in_flight=batch["in_flight"],
                )
            )
    turns = {budgets.turn(position, amount) for position in positions}
    if "over" in turns:
        return "over"
    if "wait" in turns:
        return "wait"
    values = {
        "batch_seq": lease.batch_seq,
        "no": lease.no,
        "token": lease.token,
        "amount": amount,
    }
    tx.run(_Q["hold"], values)
    return "held"


def _begin(tx: Tx, key_id: str, amount: int) -> int | None:
    month = budgets.month(tx.now)
    free = True
    for kind, id, limits in _limited(tx.conn, key_id):
        if limits.monthly_budget is not None:
            held = _held(tx.conn, kind, id, own=0)
            position = budgets.Position(
                limit=limits.monthly_budget,
                spent=_spent(tx.conn, kind, id, month),
                reserved=held["reserved"],
                in_flight=held["in_flight"],
            )
            free = budgets.begin(kind, position) and free
    if not free:
        return None
    return tx.run(_Q["begin"], {"key_id": key_id, "hold": amount}).lastrowid


def release(tx: Tx, reservation: int | None) -> None:
    """Give back what a request reserved, if it did."""
    if reservation is not None:
        tx.run(_Q["release"], {"seq": reservation})


def _held(conn: sqlite3.Connection, kind: Kind, id: str, own: int) -> sqlite3.Row:
    row: sqlite3.Row = conn.execute(_Q["active"], {"kind": kind, "id": id, "own": own}).fetchone()
    return row


def _stored(conn: sqlite3.Connection, owner: str) -> int:
    return int(conn.execute(_Q["stored"], {"owner": owner}).fetchone()[0])


def _spent(conn: sqlite3.Connection, kind: Kind, id: str, month: int) -> int:
    row = conn.execute(_Q["spent"], {"kind": kind, "id": id, "month": month}).fetchone()
    return 0 if row is None else int(row["amount"])
