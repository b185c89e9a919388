"""Batches and their states."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Literal

from tidemill import ids
from tidemill.crash import crash_point
from tidemill.errors import BadRequest, DuplicateActiveBatch, InvariantBroken, NotFound
from tidemill.scheduler.states import STAMPS, sources
from tidemill.storage import money
from tidemill.storage.files import ENDS
from tidemill.storage.queries import load
from tidemill.storage.readers import Readers
from tidemill.storage.records import batch_record, placement_of, text
from tidemill.storage.trail import note
from tidemill.storage.writer import Finished, Tx, Writer
from tidemill.types import (
    TERMINAL,
    Actor,
    BatchRecord,
    BatchStatus,
    FileFacts,
    NewBatch,
    Page,
    Placement,
    Problem,
)
from tidemill.wire import RESULT_FILE_EXPIRY_S

_Q = load("batches")
_F = load("files")

_STAMPS = dict.fromkeys(STAMPS.values())

_REPEATED_WITHIN_S = 1_260
"""The SDKs wait 600 s for an answer and send a request twice again, after short pauses."""

_REPEATED_AMONG = 1_000
"""Of so many newest batches of an owner: the search must not hold up the writer."""


class SqliteBatches:
    """``ports.Batches``. ``ensure`` completes a batch's incremental files before its end shows;
    ``ring`` tells the janitor that a batch has let go of its input."""

    def __init__(
        self,
        writer: Writer,
        readers: Readers,
        ensure: Callable[[str, dict[str, int]], None],
        ring: Callable[[int | None], None],
    ) -> None:
        self._writer = writer
        self._readers = readers
        self._ensure = ensure
        self._ring = ring

    async def open(self, new: NewBatch) -> BatchRecord:
        """One commit: the first batch again where the request repeats one, else a new one.

        Raises ``DuplicateActiveBatch``, ``BudgetExceeded``, ``QuotaExceeded`` and, when the file is
        gone, ``NotFound``.
        """
        return await self._writer.run(lambda tx: _open(tx, new))

    async def repeated(self, new: NewBatch) -> BatchRecord | None:
        """The first batch where the request repeats one; what ``open`` would give back. Raises
        ``BadRequest`` for an idempotency key that was used for another create."""
        return await self._writer.run(lambda tx: _repeated(tx, new))

    async def get(self, id: str, owner: str | None) -> BatchRecord | None:
        """None when unknown or foreign; a null owner means: whoever owns it."""
        return await self._one("by_id", {"id": id, "owner": owner})

    async def page(self, owner: str, page: Page) -> tuple[list[BatchRecord], bool]:
        """A page and whether more follow. An unknown cursor gives an empty page."""

        def read(conn: sqlite3.Connection) -> list[sqlite3.Row]:
            after = ENDS[page.order]
            if page.after is not None:
                found = conn.execute(_Q["cursor"], {"id": page.after, "owner": owner}).fetchone()
                if found is None:
                    return []
                after = found["seq"]
            values = {"owner": owner, "after": after, "limit": page.limit + 1}
            return conn.execute(_Q[f"page_{page.order}"], values).fetchall()

        rows = await self._readers.run(read)
        return [batch_record(row) for row in rows[: page.limit]], len(rows) > page.limit

    async def active(self) -> list[BatchRecord]:
        """All batches that are not terminal, oldest first."""
        rows = await self._readers.run(lambda conn: conn.execute(_Q["active"]).fetchall())
        return [batch_record(row) for row in rows]

    async def move(
        self,
        seq: int,
        frm: frozenset[BatchStatus],
        to: BatchStatus,
        *,
        problems: Sequence[Problem] = (),
        by: Actor | None = None,
    ) -> BatchRecord | None:
        """Change state if it is one of ``frm``, stamp it, and at an end create the result files;
        None when it was not. ``by`` is who cancels.

        Raises ``ValueError`` for a move that the table of states does not have, and
        ``InvariantBroken`` for an end that would leave a line without its result row.
        """
        if not frm <= sources(to):
            wrong = ", ".join(sorted(frm - sources(to)))
            raise ValueError(f"a batch cannot move from {wrong} to {to}")

        def write(tx: Tx) -> BatchRecord | None:
            row = tx.one(_Q["by_seq"], {"seq": seq})
            if row is None or row["status"] not in frm:
                return None
            if to in TERMINAL:
                self._ensure(
                    row["id"], {"output": row["output_bytes"], "error": row["error_bytes"]}
                )
            if to is BatchStatus.CANCELLING:
                note(tx, by, "batch.cancelled", row["id"], row["owner"])
            return _move(tx, row, to, problems)

        # An end begins a new commit: the rows before it are in the incremental files by then.
        record = await self._writer.run(write, alone=to in TERMINAL)
        if record is not None and to in TERMINAL:
            self._ring(None)
        return record

    async def model(self, seq: int, model: str | None, total: int) -> None:
        """Record what validation found: the one model of all lines and how many lines there are."""
        values = {"seq": seq, "model": model, "total": total}
        await self._writer.run(lambda tx: tx.run(_Q["model"], values).rowcount)

    async def place(self, seq: int, placement: Placement, facts: FileFacts | None = None) -> None:
        """Change where a batch runs, and what is known of its input, in one commit."""

        def write(tx: Tx) -> None:
            tx.run(_Q["place"], {"seq": seq, "placement": text(placement)})
            if facts is not None:
                file_seq = tx.one(_Q["by_seq"], {"seq": seq})["input_file_seq"]
                tx.run(_F["check"], {"seq": file_seq, "facts": text(facts)})

        await self._writer.run(write)

    async def _one(self, query: str, values: dict[str, Any]) -> BatchRecord | None:
        row = await self._readers.run(lambda conn: conn.execute(_Q[query], values).fetchone())
        return None if row is None else batch_record(row)


def _open(tx: Tx, new: NewBatch) -> BatchRecord:
    first = _repeated(tx, new)
    if first is not None:
        return first
    if tx.one(_Q["readable_input"], {"seq": new.file.seq, "now": tx.now_s}) is None:
        raise NotFound(f"No such File object: {new.file.id}", param="input_file_id")
    active = tx.one(_Q["active_of_file"], {"seq": new.file.seq})
    if active is not None and not new.allow_duplicate:
        raise DuplicateActiveBatch(
            f"File {new.file.id} already has an active batch, {active['id']}; "
            "wait for its end or cancel it.",
            param="input_file_id",
        )
    cursor = tx.run(
        _Q["insert"],
        {
            "id": ids.batch_id(),
            "owner": new.owner,
            "key_id": new.key_id,
            "input_file_id": new.file.id,
            "input_file_seq": new.file.seq,
            "endpoint": new.endpoint,
            "completion_window": new.completion_window,
            "created_at": tx.now_s,
            "expires_at": tx.now_s + new.window_s,
            "metadata": None if new.metadata is None else text(new.metadata),
            "params": text(new.params),
            "placement": text(new.file.facts.placement),
            "output_expires_after_s": new.output_expires_after_s,
            "idempotency_key": new.idempotency_key,
            "exclusive": int(not new.allow_duplicate),
        },
    )
    seq = cursor.lastrowid
    assert seq is not None
    money.reserve(tx, new, seq)
    batch = batch_record(tx.one(_Q["by_seq"], {"seq": seq}))
    note(tx, new.by, "batch.created", batch.id, batch.owner)
    crash_point("batch.open.before_commit")
    tx.after.append("batch.open.after_commit")
    return batch


def _repeated(tx: Tx, new: NewBatch) -> BatchRecord | None:
    if new.idempotency_key is not None:
        first = tx.one(_Q["by_idempotency_key"], {"owner": new.owner, "key": new.idempotency_key})
        if first is not None:
            return _same(batch_record(first), new)
    if not new.retried:
        return None
    active = tx.one(_Q["active_of_file"], {"seq": new.file.seq})
    return _lost(tx, new) if active is None else batch_record(active)


def _same(first: BatchRecord, new: NewBatch) -> BatchRecord:
    """The batch that an idempotency key made, if the request is the one that made it. Raises
    ``BadRequest``: to answer with a batch of other input would be to lose this one in silence."""
    if not _alike(first, new):
        raise BadRequest(
            f"This Idempotency-Key was used for batch {first.id}, which was asked for with other "
            "parameters; send a new key.",
            param="Idempotency-Key",
            code="idempotency_key_reused",
        )
    return first


def _lost(tx: Tx, new: NewBatch) -> BatchRecord | None:
    """The batch whose answer the client did not get: a short one may have completed before the SDK
    sent the request again. One that ended otherwise did not do the work, and is no answer."""
    values = {
        "owner": new.owner,
        "seq": new.file.seq,
        "since": tx.now_s - _REPEATED_WITHIN_S,
        "n": _REPEATED_AMONG,
    }
    row = tx.one(_Q["just_completed"], values)
    record = None if row is None else batch_record(row)
    return record if record is not None and _alike(record, new) else None


def _alike(first: BatchRecord, new: NewBatch) -> bool:
    return (
        first.input_file_id == new.file.id
        and first.endpoint == new.endpoint
        and first.metadata == new.metadata
        and first.params == new.params
        and first.output_expires_after_s == new.output_expires_after_s
    )


def _move(tx: Tx, row: sqlite3.Row, to: BatchStatus, problems: Sequence[Problem]) -> BatchRecord:
    values: dict[str, Any] = {
        **_STAMPS,
        "seq": row["seq"],
        "frm": row["status"],
        "to": str(to),
        "problems": text(list(problems)) if problems else None,
        "total": row["total"],
        "output_file_id": None,
        "error_file_id": None,
        STAMPS[to]: tx.now_s,
    }
    if to in TERMINAL:
        ended = row["completed"] + row["failed"]
        # A batch that was cancelled while it was validated: its total was never said.
        values["total"] = row["total"] or ended
        if (
            to is not BatchStatus.FAILED
            and placement_of(row).execution == "local"
            and (ended != values["total"] or row["queued"] or row["running"])
        ):
            raise InvariantBroken(
                f"Batch {row['id']} cannot be {to}: {row['completed']} lines succeeded, "
                f"{row['failed']} failed, {row['queued']} are queued and {row['running']} run, "
                f"of {values['total']}."
            )
        if row["completed"]:
            values["output_file_id"] = _result_file(tx, row, "output")
        if row["failed"]:
            values["error_file_id"] = _result_file(tx, row, "error")
    tx.run(_Q["move"], values)
    if to in TERMINAL:
        crash_point("batch.end.before_commit")
        tx.after.append("batch.end.after_commit")
        tx.changes.append(Finished(row["id"]))
    return batch_record(tx.one(_Q["by_seq"], {"seq": row["seq"]}))


def _result_file(tx: Tx, batch: sqlite3.Row, kind: Literal["output", "error"]) -> str:
    after_s = batch["output_expires_after_s"] or RESULT_FILE_EXPIRY_S
    facts = FileFacts(
        lines=batch["completed"] if kind == "output" else batch["failed"],
        models=() if batch["model"] is None else (batch["model"],),
        endpoint=batch["endpoint"],
        placement=placement_of(batch),
    )
    id = ids.file_id()
    tx.run(
        _F["insert_result"],
        {
            "id": id,
            "owner": batch["owner"],
            "filename": f"{batch['id']}_{kind}.jsonl",
            "kind": kind,
            "bytes": batch[f"{kind}_bytes"],
            "created_at": tx.now_s,
            "expires_at": tx.now_s + after_s,
            "facts": text(facts),
            "batch_seq": batch["seq"],
        },
    )
    return id
