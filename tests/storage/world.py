"""A small world around a store: files of numbered lines, batches of them, answers to them.

It knows the Protocols only, so that every store can live in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from tidemill import wire
from tidemill.ports import Store
from tidemill.types import (
    Answer,
    BatchRecord,
    BatchStatus,
    FileFacts,
    FileRecord,
    Lease,
    NewBatch,
    NewFile,
    NewLine,
    Outcome,
    Refusal,
    Settlement,
    Usage,
)

ENDPOINT = "/v1/chat/completions"
OWNER = "ada"
S = BatchStatus


class Hand:
    """A clock that goes when it is told to."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Input:
    """A file of lines with custom ids ``c1 … cn``; every third line ends in CR LF, one is blank."""

    def __init__(self, n: int, *, width: int = 40) -> None:
        self.lines: list[NewLine] = []
        self.texts: list[bytes] = []
        self.pieces: list[bytes] = []
        offset, no = 0, 0
        for i in range(1, n + 1):
            if i == 2:
                self.pieces.append(b"\n")
                offset, no = offset + 1, no + 1
            body = {"model": "m", "messages": [], "pad": "é" * (width + i % 7)}
            request = {"custom_id": f"c{i}", "method": "POST", "url": ENDPOINT, "body": body}
            text = json.dumps(request, ensure_ascii=False).encode()
            no += 1
            end = b"\r\n" if i % 3 == 0 else b"\n"
            self.lines.append(
                NewLine(no=no, offset=offset, length=len(text), custom_id=f"c{i}", model="m")
            )
            self.texts.append(text)
            self.pieces.append(text + end)
            offset += len(text) + len(end)

    @property
    def bytes(self) -> bytes:
        return b"".join(self.pieces)


async def upload(
    store: Store,
    pieces: Iterable[bytes],
    *,
    owner: str = OWNER,
    filename: str = "in.jsonl",
    purpose: str = "batch",
    expires_after_s: int | None = None,
    facts: FileFacts | None = None,
) -> FileRecord:
    """A committed file of these chunks."""
    new = NewFile(owner=owner, filename=filename, purpose=purpose, expires_after_s=expires_after_s)
    draft = await store.files.draft(new)
    for piece in pieces:
        await draft.append(piece)
    return await draft.commit(facts or FileFacts(lines=1))


async def content(store: Store, file: FileRecord, start: int = 0, stop: int | None = None) -> bytes:
    """Bytes of a file, joined."""
    return b"".join([piece async for piece in store.files.read(file, start, stop)])


def new_batch(file: FileRecord, **changes: object) -> NewBatch:
    """A request for a batch of a file."""
    values = {"owner": file.owner, "key_id": "key_1", "file": file, "endpoint": ENDPOINT}
    return NewBatch(**(values | changes))  # type: ignore[arg-type]


async def begin(
    store: Store, source: Input, *, owner: str = OWNER, **changes: object
) -> BatchRecord:
    """A batch of ``source`` in progress, all its lines queued."""
    facts = FileFacts(lines=len(source.lines), models=("m",), endpoint=ENDPOINT)
    file = await upload(store, source.pieces, owner=owner, facts=facts)
    batch = await store.batches.open(new_batch(file, **changes))
    await store.lines.add(batch.seq, source.lines)
    await store.batches.model(batch.seq, "m", len(source.lines))
    moved = await store.batches.move(batch.seq, frozenset({S.VALIDATING}), S.IN_PROGRESS)
    assert moved is not None
    return moved


ANSWER = Answer(body=b'{"object":"chat.completion"}', usage=Usage(input=7, cached=2, output=5))
REFUSAL = Refusal(code="bad", message="no", status_code=400)


def settlement(lease: Lease, outcome: Outcome = ANSWER, *, pad: int = 0) -> Settlement:
    """How a line ended; ``pad`` makes its row longer."""
    ok = isinstance(outcome, Answer)
    if pad and isinstance(outcome, Answer):
        outcome = Answer(body=b'{"pad":"' + b"z" * pad + b'"}', usage=outcome.usage)
    return Settlement(
        batch_seq=lease.batch_seq,
        no=lease.no,
        token=lease.token,
        ok=ok,
        row=wire.result_row(lease.custom_id, outcome),
        usage=outcome.usage if isinstance(outcome, Answer) else Usage(),
        model="m",
        owner=lease.owner,
        key_id=lease.key_id,
        custom_id=lease.custom_id,
        finished_at=1_800_000_123,
    )


async def lease(store: Store, batch: BatchRecord, n: int = 1000, holder: str = "h") -> list[Lease]:
    """Lease lines for an hour by the world's clock."""
    return await store.lines.lease(batch.seq, n, holder, 1_800_003_600)


async def fresh(store: Store, batch: BatchRecord) -> BatchRecord:
    """The batch as it is now."""
    found = await store.batches.get(batch.id, None)
    assert found is not None
    return found


async def finish(store: Store, batch: BatchRecord) -> BatchRecord:
    """Answer every line that is left and end the batch."""
    while leases := await lease(store, batch):
        await store.lines.settle([settlement(one) for one in leases])
    ended = await store.batches.move(batch.seq, frozenset({S.FINALIZING}), S.COMPLETED)
    assert ended is not None
    return ended


async def results(store: Store, batch: BatchRecord) -> tuple[list[dict[str, object]], ...]:
    """The rows of the output file and of the error file of an ended batch."""
    found = []
    for id in (batch.output_file_id, batch.error_file_id):
        rows: Sequence[bytes] = ()
        if id is not None:
            file = await store.files.get(id, batch.owner)
            assert file is not None
            data = await content(store, file)
            assert len(data) == file.bytes
            assert data.endswith(b"\n")
            rows = data.split(b"\n")[:-1]
        found.append([json.loads(row) for row in rows])
    return tuple(found)
