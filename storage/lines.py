"""The lines of batches that run here."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from tidemill import wire
from tidemill.crash import crash_point
from tidemill.errors import Conflict, InvariantBroken
from tidemill.storage import chunks
from tidemill.storage.queries import load
from tidemill.storage.readers import Readers
from tidemill.storage.records import params_of, record, text
from tidemill.storage.results import Ended, batch_of, count, end_lines, parsed
from tidemill.storage.writer import Merge, Tx, Writer
from tidemill.types import (
    TERMINAL,
    BatchStatus,
    Lease,
    LineState,
    NewLine,
    ResultRow,
    SettledBatch,
    Settlement,
)

_Q = load("lines")

_CLOSING = frozenset({BatchStatus.CANCELLING, BatchStatus.EXPIRING})


class SqliteLines:
    """``ports.Lines``. ``ended`` is told when lines stopped running, and let go what they held."""

    def __init__(
        self, writer: Writer, readers: Readers, ended: Callable[[], None] = lambda: None
    ) -> None:
        self._writer = writer
        self._readers = readers
        self._ended = ended
        self._settle = Merge(_settle)

    async def add(self, batch_seq: int, lines: Sequence[NewLine]) -> None:
        """Add queued lines; a line that is there already is left as it is.

        Raises ``Conflict`` when the batch has ended, ``InvariantBroken`` when a ``custom_id``
        occurs twice.
        """
        if lines:
            rows = [(x.no, x.offset, x.length, x.custom_id, x.model) for x in lines]
            await self._writer.run(lambda tx: _add(tx, batch_seq, text(rows)))

    async def lease(
        self,
        batch_seq: int,
        n: int,
        holder: str,
        until_at: int,
        models: Sequence[str] | None = None,
    ) -> list[Lease]:
        """Up to ``n`` queued lines that are due, in line order, become running; none unless the
        batch is in progress. Raises ``InvariantBroken`` when the input's bytes are missing."""
        taken = await self._writer.run(
            lambda tx: _lease(tx, batch_seq, n, holder, until_at, models)
        )
        if taken is None:
            return []
        batch, base, picked = taken
        places = [(offset, length) for _, offset, length, _, _ in picked]
        try:
            found = await self._readers.run(
                lambda conn: chunks.of_lines(conn, batch["blob"], places)
            )
        except LookupError as exc:
            raise InvariantBroken(f"Batch {batch['id']} has lost its input: {exc}.") from exc
        params = params_of(batch)
        return [
            Lease(
                batch_seq=batch_seq,
                batch_id=batch["id"],
                owner=batch["owner"],
                key_id=batch["key_id"],
                no=no,
                token=base + no,
                attempt=attempt,
                custom_id=custom_id,
                line=line,
                endpoint=batch["endpoint"],
                expires_at=batch["expires_at"],
                params=params,
                capped=batch["max_cost"] is not None,
            )
            for (no, _, _, custom_id, attempt), line in zip(picked, found, strict=True)
        ]

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettledBatch]:
        """Line state where the token matches, result row, usage row, counters, last-line rule, in
        one commit that callers of the same few milliseconds share. A late or double settlement,
        or one of a batch that has ended, changes nothing."""
        if not settlements:
            return []
        settled = await self._writer.join(self._settle, settlements)
        self._ended()
        return settled

    async def release(
        self, leases: Sequence[Lease], *, due_at: float = 0, spend: bool = True
    ) -> list[int]:
        """Back to queued, not before ``due_at``; returns the batches that are closing."""
        if not leases:
            return []
        closing = await self._writer.run(lambda tx: _release(tx, leases, due_at, spend))
        self._ended()
        return closing

    async def extend(self, holder: str, until_at: int) -> None:
        """Keep alive all running lines of a holder; a lease is never made shorter."""
        values = {"holder": holder, "until_at": until_at}
        await self._writer.run(lambda tx: tx.run(_Q["extend"], values).rowcount)

    async def reclaim(self, now: int | None) -> int:
        """Running lines whose lease lapsed (null: all) go back to queued and count as run again."""
        if now is not None and not await self._any_lapsed(now):
            return 0
        lapsed = await self._writer.run(lambda tx: _reclaim(tx, now))
        self._ended()
        return lapsed

    async def close(
        self, batch_seq: int, to: LineState, code: str, message: str, n: int = 2000
    ) -> int:
        """Up to ``n`` queued lines become cancelled or expired, each with its error row."""
        if to not in (LineState.CANCELLED, LineState.EXPIRED):
            raise ValueError(f"a line that never ran cannot become {to}")
        return await self._writer.run(lambda tx: _close(tx, batch_seq, to, code, message, n))

    async def models(self, batch_seq: int) -> list[str]:
        """The models that a batch's lines name."""
        values = {"batch_seq": batch_seq}
        rows = await self._readers.run(lambda conn: conn.execute(_Q["models"], values).fetchall())
        return [row["model"] for row in rows]

    async def running(self, batch_seq: int) -> int:
        """Lines of the batch that run now."""
        row = await self._read("running", {"batch_seq": batch_seq})
        return 0 if row is None else int(row[0])

    async def queued(self) -> int:
        """Lines that wait, over all active batches."""
        row = await self._read("queued", {})
        return 0 if row is None else int(row[0])

    async def next_due_at(self) -> float | None:
        """When the next line that waits for its retry falls due; None when none waits."""
        row = await self._read("next_due_at", {})
        return None if row is None else float(row[0])

    async def rows(self, batch_seq: int, after: int, limit: int) -> list[ResultRow]:
        """Result rows with ``seq > after``, both kinds, in commit order."""
        values = {"batch_seq": batch_seq, "after": after, "limit": limit}
        found = await self._readers.run(lambda conn: conn.execute(_Q["rows"], values).fetchall())
        return [record(ResultRow, row) for row in found]

    async def _any_lapsed(self, now: int) -> bool:
        return await self._read("lapsed", {"now": now}) is not None

    async def _read(self, query: str, values: dict[str, Any]) -> sqlite3.Row | None:
        return await self._readers.run(lambda conn: conn.execute(_Q[query], values).fetchone())


def _add(tx: Tx, batch_seq: int, lines: str) -> None:
    batch = batch_of(tx, batch_seq)
    if batch is None or batch["status"] in TERMINAL:
        raise Conflict("A batch that has ended takes no lines.")
    added = tx.run(_Q["add"], {"batch_seq": batch_seq, "lines": lines}).rowcount
    count(tx, batch_seq, queued=added)
    crash_point("lines.add.before_commit")
    tx.after.append("lines.add.after_commit")


def _lease(
    tx: Tx, batch_seq: int, n: int, holder: str, until_at: int, models: Sequence[str] | None
) -> tuple[sqlite3.Row, int, list[Any]] | None:
    batch = batch_of(tx, batch_seq)
    if batch is None or batch["status"] != BatchStatus.IN_PROGRESS:
        return None
    due = {"batch_seq": batch_seq, "now": tx.now, "n": n}
    if models is None:
        picked = parsed(tx.value(_Q["pick"], due))
    else:
        picked = parsed(tx.value(_Q["pick_models"], {**due, "models": text(models)}))
    if not picked:
        return None
    first, last = picked[0][0], picked[-1][0]
    base = tx.value(_Q["last_token"]) + 1 - first
    tx.run(_Q["take_tokens"], {"n": last - first + 1})
    values = {
        "batch_seq": batch_seq,
        "holder": holder,
        "until_at": until_at,
        "base": base,
        "nos": text([line[0] for line in picked]),
    }
    tx.run(_Q["lease"], values)
    count(tx, batch_seq, queued=-len(picked), running=len(picked))
    crash_point("lines.lease.before_commit")
    tx.after.append("lines.lease.after_commit")
    return batch, base, picked


def _settle(tx: Tx, calls: list[Sequence[Settlement]]) -> list[list[SettledBatch]]:
    """Settle the lines of several callers as one set."""
    flat = [(caller, one) for caller, call in enumerate(calls) for one in call]
    claims = text([(one.batch_seq, one.no, one.token) for _, one in flat])
    batches: dict[int, sqlite3.Row | None] = {}
    ended: dict[int, dict[int, Ended]] = defaultdict(dict)
    accepted: dict[tuple[int, int], int] = defaultdict(int)
    for position, custom_id, model in parsed(tx.value(_Q["fenced"], {"settlements": claims})):
        caller, one = flat[position]
        if one.batch_seq not in batches:
            batches[one.batch_seq] = batch_of(tx, one.batch_seq)
        batch = batches[one.batch_seq]
        # A batch that has ended no longer changes; and a line said twice counts once.
        if batch is None or batch["status"] in TERMINAL or one.no in ended[one.batch_seq]:
            continue
        ended[one.batch_seq][one.no] = Ended(
            no=one.no,
            frm=LineState.RUNNING,
            to=LineState.SUCCEEDED if one.ok else LineState.FAILED,
            row=one.row,
            custom_id=custom_id,
            settlement=one,
            model=model,
        )
        accepted[caller, one.batch_seq] += 1
    drained: set[int] = set()
    for seq, lines in ended.items():
        batch = batches[seq]
        if lines and batch is not None and end_lines(tx, batch, list(lines.values())):
            drained.add(seq)
    crash_point("lines.settle.before_commit")
    tx.after.append("lines.settle.after_commit")
    answers: list[list[SettledBatch]] = []
    for caller, call in enumerate(calls):
        answer: list[SettledBatch] = []
        for seq in dict.fromkeys(one.batch_seq for one in call):
            if seq not in batches:
                batches[seq] = batch_of(tx, seq)
            batch = batches[seq]
            if batch is not None:
                n = accepted[caller, seq]
                answer.append(
                    SettledBatch(
                        batch_seq=seq,
                        batch_id=batch["id"],
                        accepted=n,
                        drained=n > 0 and seq in drained,
                    )
                )
        answers.append(answer)
    return answers


def _release(tx: Tx, leases: Sequence[Lease], due_at: float, spend: bool) -> list[int]:
    claims = text([(one.batch_seq, one.no, one.token) for one in leases])
    held: dict[int, set[int]] = defaultdict(set)
    for position, _, _ in parsed(tx.value(_Q["fenced"], {"settlements": claims})):
        held[leases[position].batch_seq].add(leases[position].no)
    for seq, nos in held.items():
        values = {
            "batch_seq": seq,
            "nos": text(sorted(nos)),
            "due_at": due_at,
            "give_back": 0 if spend else 1,
        }
        tx.run(_Q["release"], values)
        count(tx, seq, queued=len(nos), running=-len(nos))
    closing = []
    for seq in dict.fromkeys(one.batch_seq for one in leases):
        batch = batch_of(tx, seq)
        if batch is not None and batch["status"] in _CLOSING:
            closing.append(seq)
    return closing


def _reclaim(tx: Tx, now: int | None) -> int:
    total = 0
    for seq, n in tx.run(_Q["lapsed"], {"now": now}).fetchall():
        batch = batch_of(tx, seq)
        # Lines of a batch that is being cancelled or expires will not run again.
        again = batch is not None and batch["status"] == BatchStatus.IN_PROGRESS
        count(tx, seq, queued=n, running=-n, rerun=n if again else 0)
        total += n
    if total:
        tx.run(_Q["reclaim"], {"now": now})
    return total


def _close(tx: Tx, batch_seq: int, to: LineState, code: str, message: str, n: int) -> int:
    batch = batch_of(tx, batch_seq)
    if batch is None or batch["status"] in TERMINAL:
        return 0
    waiting = parsed(tx.value(_Q["waiting"], {"batch_seq": batch_seq, "n": n}))
    if not waiting:
        return 0
    ended = [
        Ended(
            no=no,
            frm=LineState.QUEUED,
            to=to,
            row=wire.unrun_row(custom_id, code, message),
            custom_id=custom_id,
        )
        for no, custom_id in waiting
    ]
    end_lines(tx, batch, ended)
    crash_point("lines.close.before_commit")
    tx.after.append("lines.close.after_commit")
    return len(ended)
