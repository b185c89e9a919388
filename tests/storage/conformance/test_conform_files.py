"""What every store does with files."""

from __future__ import annotations

import itertools

import pytest

from tests.storage.world import (
    OWNER,
    Hand,
    Input,
    S,
    begin,
    content,
    finish,
    fresh,
    lease,
    new_batch,
    upload,
)
from tidemill.errors import FileInUse, NotFound, TidemillError
from tidemill.ports import Store
from tidemill.types import FileFacts, NewFile, Page, Placement

pytestmark = pytest.mark.anyio


async def test_a_draft_is_invisible_until_it_is_committed(store: Store) -> None:
    """Nothing lists or finds a file whose bytes are still arriving."""
    draft = await store.files.draft(NewFile(owner=OWNER, filename="a b é.jsonl"))
    await draft.append(b"{}\n")
    assert await store.files.page(OWNER, Page()) == ([], False)
    facts = FileFacts(lines=1, models=("x", "y"), placement=Placement(reason="said so"))
    file = await draft.commit(facts)
    assert await store.files.get(file.id, OWNER) == file
    assert await store.files.page(OWNER, Page()) == ([file], False)
    assert (file.filename, file.bytes, file.kind, file.facts) == ("a b é.jsonl", 3, "input", facts)


async def test_the_bytes_come_back_exactly(store: Store) -> None:
    """CR LF, a missing last line end and bytes that are no UTF-8 are kept; so is an empty file."""
    pieces = [b'{"a":1}\r\n', b"\xff\xfe\n", b"no end"]
    assert await content(store, await upload(store, pieces)) == b"".join(pieces)
    assert await content(store, await upload(store, [])) == b""


async def test_every_range_of_an_input_is_read_to_the_byte(store: Store) -> None:
    """``[start, stop)`` is right at, before and after every boundary of a chunk."""
    pieces = [b"abc\n", b"d\n", b"efghij\n", b"k"]
    whole = b"".join(pieces)
    file = await upload(store, pieces)
    for start, stop in itertools.product(range(len(whole) + 2), range(len(whole) + 2)):
        assert await content(store, file, start, stop) == whole[start:stop], (start, stop)
    assert await content(store, file, 3) == whole[3:]


async def test_every_range_of_a_result_is_read_to_the_byte(store: Store) -> None:
    """The same for the rows of a result file, line ends included."""
    batch = await finish(store, await begin(store, Input(4)))
    assert batch.output_file_id is not None
    file = await store.files.get(batch.output_file_id, OWNER)
    assert file is not None
    whole = await content(store, file)
    ends = [i for i, byte in enumerate(whole) if byte == 10]
    near = sorted({0, 1, len(whole), len(whole) + 1, *(e + d for e in ends for d in (-1, 0, 1, 2))})
    for start, stop in itertools.product(near, near):
        assert await content(store, file, start, stop) == whole[start:stop], (start, stop)


async def test_a_long_line_is_read_in_pieces(store: Store) -> None:
    """A chunk of a megabyte arrives in pieces of at most 64 KiB."""
    long = b"x" * 1_000_000 + b"\n"
    file = await upload(store, [b"a\n", long, b"b\n"])
    pieces = [piece async for piece in store.files.read(file)]
    assert b"".join(pieces) == b"a\n" + long + b"b\n"
    assert max(len(piece) for piece in pieces) <= 65_536


async def test_a_discarded_draft_leaves_nothing(store: Store) -> None:
    """After ``discard`` a commit fails; a second discard, or one after a commit, is harmless."""
    draft = await store.files.draft(NewFile(owner=OWNER, filename="a"))
    await draft.append(b"x" * 3_000_000)
    await draft.discard()
    await draft.discard()
    with pytest.raises(TidemillError):
        await draft.commit(FileFacts(lines=1))
    assert await store.files.page(OWNER, Page()) == ([], False)
    kept = await store.files.draft(NewFile(owner=OWNER, filename="b"))
    await kept.append(b"bytes")
    file = await kept.commit(FileFacts(lines=1))
    await kept.discard()
    assert await content(store, file) == b"bytes"


async def test_expiry_follows_the_purpose_and_the_client(store: Store, clock: Hand) -> None:
    """30 days for purpose batch, none for others; the client's word wins, its last word most."""
    now = int(clock.now)
    assert (await upload(store, [b"x"])).expires_at == now + 2_592_000
    assert (await upload(store, [b"x"], purpose="user_data")).expires_at is None
    assert (await upload(store, [b"x"], expires_after_s=3600)).expires_at == now + 3600
    new = NewFile(owner=OWNER, filename="a", expires_after_s=3600)
    draft = await store.files.draft(new)
    file = await draft.commit(FileFacts(lines=0), expires_after_s=7200)
    assert (file.created_at, file.expires_at) == (now, now + 7200)


async def test_an_expired_file_is_unknown(store: Store, clock: Hand) -> None:
    """Past its time a file is found and listed no more, before and after the sweep."""
    file = await upload(store, [b"x"], expires_after_s=3600)
    clock.now += 3600
    assert await store.files.get(file.id, OWNER) is None
    assert await store.files.page(OWNER, Page()) == ([], False)
    assert not await store.files.delete(file.id, OWNER)
    assert await store.files.sweep(int(clock.now)) == 1
    assert await store.files.sweep(int(clock.now)) == 0


async def test_a_deleted_file_is_unknown_at_once(store: Store, clock: Hand) -> None:
    """Retrieve, list, read and a second delete say so; the sweep removes its bytes once."""
    file = await upload(store, [b"x" * 65536 for _ in range(100)])
    assert await store.files.delete(file.id, OWNER)
    assert await store.files.get(file.id, OWNER) is None
    assert not await store.files.delete(file.id, OWNER)
    with pytest.raises(NotFound):
        await content(store, file)
    assert await store.files.sweep(int(clock.now)) == 1
    assert await store.files.sweep(int(clock.now)) == 0


async def test_a_foreign_file_is_unknown(store: Store) -> None:
    """Another owner's file can be neither found nor deleted; the server itself may look."""
    file = await upload(store, [b"x"], owner="bob")
    assert await store.files.get(file.id, OWNER) is None
    assert not await store.files.delete(file.id, OWNER)
    assert await store.files.get(file.id, None) == file


async def test_a_file_in_use_cannot_be_deleted(store: Store, clock: Hand) -> None:
    """While an active batch reads it the delete is refused, naming the batch; afterwards the
    results outlive it."""
    batch = await begin(store, Input(3))
    with pytest.raises(FileInUse, match=batch.id):
        await store.files.delete(batch.input_file_id, OWNER)
    ended = await finish(store, batch)
    assert await store.files.delete(batch.input_file_id, OWNER)
    await store.files.sweep(int(clock.now))
    assert ended.output_file_id is not None
    output = await store.files.get(ended.output_file_id, OWNER)
    assert output is not None
    assert len((await content(store, output)).splitlines()) == 3


async def test_an_input_that_expires_under_its_batch_is_kept_for_it(
    store: Store, clock: Hand
) -> None:
    """Its lines can be leased after the sweep; the bytes go once the batch has ended."""
    source = Input(2)
    facts = FileFacts(lines=2)
    file = await upload(store, source.pieces, expires_after_s=3600, facts=facts)
    batch = await store.batches.open(new_batch(file))
    await store.lines.add(batch.seq, source.lines)
    await store.batches.model(batch.seq, "m", 2)
    await store.batches.move(batch.seq, frozenset({S.VALIDATING}), S.IN_PROGRESS)
    clock.now += 3601
    assert await store.files.get(file.id, OWNER) is None
    assert await store.files.sweep(int(clock.now)) == 0
    await finish(store, batch)
    assert await store.files.sweep(int(clock.now)) == 1


async def test_a_deleted_result_takes_its_rows_along(store: Store, clock: Hand) -> None:
    """The rows of a deleted output file can be read nowhere, at once and after the sweep."""
    ended = await finish(store, await begin(store, Input(3)))
    assert ended.output_file_id is not None
    assert len(await store.lines.rows(ended.seq, 0, 10)) == 3
    assert await store.files.delete(ended.output_file_id, OWNER)
    assert await store.lines.rows(ended.seq, 0, 10) == []
    assert await store.files.sweep(int(clock.now)) == 1
    assert await store.lines.rows(ended.seq, 0, 10) == []
    assert (await fresh(store, ended)).completed == 3


async def test_pages_walk_every_file_once(store: Store) -> None:
    """Newest or oldest first, each id once, also while files arrive; the last page says so."""
    files = [await upload(store, [b"x"], filename=f"{i}") for i in range(7)]
    await upload(store, [b"x"], owner="bob")
    seen: list[str] = []
    after = None
    while True:
        page, more = await store.files.page(OWNER, Page(limit=3, after=after))
        seen += [file.filename for file in page]
        await upload(store, [b"x"], filename="late")
        if not more:
            break
        after = page[-1].id
    assert seen == ["6", "5", "4", "3", "2", "1", "0"]
    page, more = await store.files.page(OWNER, Page(limit=2, after=files[1].id, order="asc"))
    assert ([file.filename for file in page], more) == (["2", "3"], True)
    page, more = await store.files.page(OWNER, Page(limit=100, order="asc", purpose="user_data"))
    assert (page, more) == ([], False)


async def test_a_cursor_whose_file_is_gone_goes_on(store: Store, clock: Hand) -> None:
    """Deleting the file that a pager stands on does not restart the list."""
    files = [await upload(store, [b"x"], filename=f"{i}") for i in range(4)]
    await store.files.delete(files[2].id, OWNER)
    await store.files.sweep(int(clock.now))
    page, more = await store.files.page(OWNER, Page(limit=5, after=files[2].id))
    assert ([file.filename for file in page], more) == (["1", "0"], False)
    assert await store.files.page(OWNER, Page(after="file-unknown")) == ([], False)
    foreign = await upload(store, [b"x"], owner="bob")
    assert await store.files.page(OWNER, Page(after=foreign.id)) == ([], False)


async def test_result_files_are_listed_under_their_purpose(store: Store) -> None:
    """Output files are found with ``purpose=batch_output`` and name their batch."""
    batch = await finish(store, await begin(store, Input(2)))
    page, _ = await store.files.page(OWNER, Page(purpose="batch_output"))
    assert [(file.id, file.batch_id, file.kind) for file in page] == [
        (batch.output_file_id, batch.id, "output")
    ]


async def test_leases_read_across_chunks_however_they_are_cut(store: Store) -> None:
    """A line comes back exactly even where a chunk ends inside it."""
    source = Input(50)
    whole = source.bytes
    cut = [whole[i : i + 37] for i in range(0, len(whole), 37)]
    file = await upload(store, cut, facts=FileFacts(lines=50))
    batch = await store.batches.open(new_batch(file))
    await store.lines.add(batch.seq, source.lines)
    await store.batches.move(batch.seq, frozenset({S.VALIDATING}), S.IN_PROGRESS)
    assert [one.line for one in await lease(store, batch)] == source.texts
