"""What providers hold for us: their ids, their last word on a batch, the latch of settlement."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import msgspec

from tidemill.crash import crash_point
from tidemill.storage.queries import load
from tidemill.storage.readers import Readers
from tidemill.storage.records import problems_of, record, text
from tidemill.storage.results import Ended, batch_of, end_lines, parsed
from tidemill.storage.trail import note
from tidemill.storage.writer import Tx, Writer
from tidemill.types import (
    SERVER,
    TERMINAL,
    Leftover,
    LineState,
    SettledBatch,
    Settlement,
    UpstreamBatch,
    UpstreamFile,
)

_Q = load("upstream")


class SqliteUpstream:
    """``ports.Upstream``."""

    def __init__(self, writer: Writer, readers: Readers) -> None:
        self._writer = writer
        self._readers = readers

    async def file(self, file_seq: int, provider: str) -> UpstreamFile | None:
        """The provider's copy of an input file, also one that has expired there."""
        values = {"file_seq": file_seq, "provider": provider}
        row = await self._readers.run(lambda conn: conn.execute(_Q["file"], values).fetchone())
        if row is None:
            return None
        return record(UpstreamFile, row)

    async def keep_file(self, file: UpstreamFile) -> None:
        """Record or replace the provider's copy of an input file."""
        values = msgspec.structs.asdict(file)
        await self._writer.run(lambda tx: tx.run(_Q["keep_file"], values).rowcount)

    async def batch(self, batch_seq: int) -> UpstreamBatch | None:
        """The provider's side of a forwarded batch; None when it never was one."""
        values = {"batch_seq": batch_seq}
        row = await self._readers.run(lambda conn: conn.execute(_Q["batch"], values).fetchone())
        return None if row is None else _batch(row)

    async def keep_batch(self, batch: UpstreamBatch) -> None:
        """Record or replace; never un-settles one that is settled."""
        values = msgspec.structs.asdict(batch)
        values["problems"] = text(batch.problems)
        del values["batch_id"]

        def write(tx: Tx) -> int:
            crash_point("upstream.keep_batch.before_commit")
            tx.after.append("upstream.keep_batch.after_commit")
            return tx.run(_Q["keep_batch"], values).rowcount

        await self._writer.run(write)

    async def unsettled(self) -> list[UpstreamBatch]:
        """All that still have to be looked at, oldest first."""
        rows = await self._readers.run(lambda conn: conn.execute(_Q["unsettled"]).fetchall())
        return [_batch(row) for row in rows]

    async def withdraw(self, batch_seq: int) -> bool:
        """Take back a batch that no provider took and that has no line: as if never created."""
        values = {"batch_seq": batch_seq}

        def write(tx: Tx) -> bool:
            tx.run(_Q["withdraw_intent"], values)
            gone = tx.one(_Q["withdraw"], values)
            if gone is not None:
                note(tx, SERVER, "batch.withdrawn", gone["id"], gone["owner"])
            return gone is not None

        return await self._writer.run(write)

    async def latch(self, batch_seq: int, until_at: int) -> bool:
        """Take the right to settle until ``until_at`` (0 gives it back); False when somebody holds
        it or it is settled."""

        def write(tx: Tx) -> bool:
            values = {"batch_seq": batch_seq, "until_at": until_at, "now": tx.now_s}
            return tx.run(_Q["latch"], values).rowcount == 1

        return await self._writer.run(write)

    async def settle(self, settlements: Sequence[Settlement]) -> list[SettledBatch]:
        """Like ``Lines.settle`` for lines that were never leased: conditional on *queued*."""
        return await self._writer.run(lambda tx: _settle(tx, settlements))

    async def leftovers(self, provider: str, n: int) -> list[Leftover]:
        """Up to ``n`` settled batches and deleted files whose copies a provider may still hold."""
        values = {"provider": provider, "n": n}

        def read(conn: sqlite3.Connection) -> list[Leftover]:
            found = [
                _of_batch(provider, row) for row in conn.execute(_Q["left_by_batches"], values)
            ]
            for row in conn.execute(_Q["left_by_files"], values):
                ids, file_seq = (row["id"],), row["file_seq"]
                found.append(Leftover(provider=provider, ids=ids, file_seq=file_seq))
            return found[:n]

        return await self._readers.run(read)

    async def cleared(self, leftover: Leftover) -> None:
        """The provider holds none of it any more, or never will let it go."""

        def write(tx: Tx) -> None:
            values = {**msgspec.structs.asdict(leftover), "ids": text(leftover.ids)}
            if leftover.file_seq is not None:
                tx.run(_Q["clear_file"], values)
            if leftover.batch_seq is not None:
                tx.run(_Q["clear_batch"], {**values, "now": tx.now_s})

        await self._writer.run(write)

    async def unlatch_all(self) -> None:
        """At the start of a single-server store: latches of the process that died."""
        await self._writer.run(lambda tx: tx.run(_Q["unlatch_all"]).rowcount)


def _settle(tx: Tx, settlements: Sequence[Settlement]) -> list[SettledBatch]:
    answers = []
    for seq in dict.fromkeys(one.batch_seq for one in settlements):
        batch = batch_of(tx, seq)
        if batch is None:
            continue
        mine = [one for one in settlements if one.batch_seq == seq]
        ended: dict[int, Ended] = {}
        if batch["status"] not in TERMINAL:
            asked = {"batch_seq": seq, "custom_ids": text([one.custom_id for one in mine])}
            for position, no, model in parsed(tx.value(_Q["queued"], asked)):
                one = mine[position]
                # A provider may say a line twice; the first time counts.
                ended.setdefault(
                    no,
                    Ended(
                        no=no,
                        frm=LineState.QUEUED,
                        to=LineState.SUCCEEDED if one.ok else LineState.FAILED,
                        row=one.row,
                        custom_id=one.custom_id,
                        settlement=one,
                        model=model,
                    ),
                )
        drained = bool(ended) and end_lines(tx, batch, list(ended.values()))
        answers.append(
            SettledBatch(batch_seq=seq, batch_id=batch["id"], accepted=len(ended), drained=drained)
        )
    crash_point("upstream.settle.before_commit")
    tx.after.append("upstream.settle.after_commit")
    return answers


def _batch(row: sqlite3.Row) -> UpstreamBatch:
    return record(UpstreamBatch, row, problems=problems_of(row))


def _of_batch(provider: str, row: sqlite3.Row) -> Leftover:
    held = (row["input_id"], row["output_id"], row["error_id"], row["copy_id"])
    ids = tuple(id for id in held if id is not None)
    file_seq = row["file_seq"] if row["copy_id"] is not None else None
    return Leftover(provider=provider, ids=ids, batch_seq=row["batch_seq"], file_seq=file_seq)
