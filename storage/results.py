"""What a commit does to a batch's lines: result rows, usage rows, counters, the last-line rule.

All of it works on sets: the statements of one change are as many for a thousand lines as for one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tidemill.scheduler.states import DRAINED, ENDS
from tidemill.storage import money
from tidemill.storage.queries import load
from tidemill.storage.records import text
from tidemill.storage.writer import Appended, Tx
from tidemill.types import BatchStatus, LineState, Settlement, Usage, UsageRow

_Q = load("lines")

Kind = Literal["output", "error"]


@dataclass(frozen=True, slots=True)
class Ended:
    """A line that reaches its last state in this commit."""

    no: int
    frm: LineState
    to: LineState
    row: bytes
    custom_id: str
    settlement: Settlement | None = None
    """None: it never ran."""
    model: str = ""

    @property
    def kind(self) -> Kind:
        """The result file of its row."""
        return "output" if self.to is LineState.SUCCEEDED else "error"


def batch_of(tx: Tx, batch_seq: int) -> sqlite3.Row | None:
    """The batch with its input's ``blob``."""
    row: sqlite3.Row | None = tx.one(_Q["batch"], {"batch_seq": batch_seq})
    return row


def parsed(value: str) -> list[Any]:
    """A JSON array that a statement built."""
    result: list[Any] = msgspec.json.decode(value)
    return result


def end_lines(tx: Tx, batch: sqlite3.Row, ended: Sequence[Ended]) -> bool:
    """Bring lines of one open batch to their last state, with everything that is true with it.

    The caller has checked that each line is in the state it leaves. Returns True when no queued or
    running line is left: the batch has moved on (the last-line rule) or may end.
    """
    seq = batch["seq"]
    moves: dict[tuple[LineState, LineState], list[int]] = {}
    for line in ended:
        moves.setdefault((line.frm, line.to), []).append(line.no)
    for (frm, to), nos in moves.items():
        values = {"batch_seq": seq, "frm": str(frm), "to": str(to), "nos": text(nos)}
        changed = tx.run(_Q["end"], values).rowcount
        assert changed == len(nos), "a line left its state inside a transaction"
    grown = _insert_rows(tx, batch, ended)
    used = _book(tx, batch, ended)
    completed = len(moves.get((LineState.RUNNING, LineState.SUCCEEDED), ())) + len(
        moves.get((LineState.QUEUED, LineState.SUCCEEDED), ())
    )
    count(
        tx,
        seq,
        queued=-sum(len(nos) for (frm, _), nos in moves.items() if frm is LineState.QUEUED),
        running=-sum(len(nos) for (frm, _), nos in moves.items() if frm is LineState.RUNNING),
        completed=completed,
        failed=len(ended) - completed,
        output_bytes=grown["output"],
        error_bytes=grown["error"],
        usage=used,
    )
    return drain(tx, batch)


def drain(tx: Tx, batch: sqlite3.Row) -> bool:
    """The last-line rule; True as for ``end_lines``."""
    left = tx.one(_Q["left"], {"batch_seq": batch["seq"]})
    if left["queued"] or left["running"]:
        return False
    status = BatchStatus(batch["status"])
    if status in DRAINED:
        values = {
            "batch_seq": batch["seq"],
            "frm": str(status),
            "to": str(DRAINED[status]),
            "now": tx.now_s,
        }
        tx.run(_Q["drained"], values)
        return True
    return status in ENDS


def count(
    tx: Tx,
    batch_seq: int,
    *,
    queued: int = 0,
    running: int = 0,
    completed: int = 0,
    failed: int = 0,
    rerun: int = 0,
    output_bytes: int = 0,
    error_bytes: int = 0,
    usage: Usage | None = None,
) -> None:
    """Move a batch's counters."""
    usage = usage or Usage()
    tx.run(
        _Q["count"],
        {
            "batch_seq": batch_seq,
            "queued": queued,
            "running": running,
            "completed": completed,
            "failed": failed,
            "rerun": rerun,
            "output_bytes": output_bytes,
            "error_bytes": error_bytes,
            "input": usage.input,
            "cached": usage.cached,
            "output": usage.output,
            "reasoning": usage.reasoning,
        },
    )


def _insert_rows(tx: Tx, batch: sqlite3.Row, ended: Sequence[Ended]) -> dict[Kind, int]:
    """Append the rows to the two streams; returns by how many bytes each grew."""
    ends: dict[Kind, int] = {"output": batch["output_bytes"], "error": batch["error_bytes"]}
    begins = dict(ends)
    streams: dict[Kind, list[bytes]] = {"output": [], "error": []}
    places: list[tuple[int, Kind, int, int, int]] = []
    place = 0
    for line in ended:
        kind = line.kind
        places.append((line.no, kind, ends[kind], place, len(line.row)))
        streams[kind].append(line.row)
        place += len(line.row)
        ends[kind] += len(line.row) + 1
    tx.run(
        _Q["insert_rows"],
        {
            "batch_seq": batch["seq"],
            "bytes": b"".join([line.row for line in ended]),
            "rows": text(places),
        },
    )
    for kind, rows in streams.items():
        if rows:
            data = b"\n".join(rows) + b"\n"
            tx.changes.append(Appended(batch["id"], kind, begins[kind], data))
    return {kind: ends[kind] - begins[kind] for kind in ends}


def _book(tx: Tx, batch: sqlite3.Row, ended: Sequence[Ended]) -> Usage:
    """One usage row per line that was answered or used tokens; returns the sum."""
    rows: list[UsageRow] = []
    sums = [0, 0, 0, 0]
    for line in ended:
        settled = line.settlement
        if settled is None or (not settled.ok and settled.usage == _NOTHING):
            continue
        usage = settled.usage
        used = (usage.input, usage.cached, usage.output, usage.reasoning)
        sums = [a + b for a, b in zip(sums, used, strict=True)]
        rows.append(
            UsageRow(
                owner=batch["owner"],
                key_id=batch["key_id"],
                model=settled.model or line.model,
                execution=settled.execution,
                tier=settled.tier,
                usage=usage,
                batch_id=batch["id"],
                custom_id=line.custom_id,
                at=settled.finished_at or tx.now_s,
            )
        )
    money.book(tx, rows, batch["seq"])
    return Usage(input=sums[0], cached=sums[1], output=sums[2], reasoning=sums[3])


_NOTHING = Usage()
