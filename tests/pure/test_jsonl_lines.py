"""Lines and chunks of a file that arrives in pieces."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidemill.lines import CHUNK_BYTES, Cutter, LineTooLong, Splitter, Text

# Few distinct bytes, so that line ends, blanks and byte order marks meet often.
files = st.lists(
    st.sampled_from(
        [b"\n", b"\r\n", b"\r", b" ", b"\xef\xbb\xbf", b"{}", b"x", "\u2028\x85".encode()]
    ),
    max_size=30,
).map(b"".join)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    borders = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(borders)]


def split(parts: list[bytes]) -> list[Text]:
    splitter = Splitter()
    return [text for part in parts for text in splitter.feed(part)] + splitter.finish()


@given(data=files, cuts=st.lists(st.integers(0, 10_000), max_size=8))
@example(data=b"\xef\xbb\xbf{}\r\n", cuts=[1, 2, 5, 6])
def test_piece_borders_never_show(data: bytes, cuts: list[int]) -> None:
    """However a file is cut for its journey, the same lines come out, each where it stands."""
    texts = split(pieces(data, cuts))
    assert texts == split([data])
    for text in texts:
        assert data[text.offset : text.offset + len(text.data)] == text.data
        assert data[: text.offset].count(b"\n") == text.no - 1
        assert text.data.strip()


@given(data=files, cuts=st.lists(st.integers(0, 10_000), max_size=8))
def test_no_line_is_lost(data: bytes, cuts: list[int]) -> None:
    """Every line that has more than blanks comes out, and no other."""
    expected = [n for n, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    if data.startswith(b"\xef\xbb\xbf") and not data.split(b"\n")[0][3:].strip():
        expected.remove(1)
    assert [text.no for text in split(pieces(data, cuts))] == expected


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_other_line_separators_do_not_end_a_line(separator: str) -> None:
    """Statement 150, C06: what ``str.splitlines`` takes for a line end is part of the string."""
    line = f'{{"a": "x{separator}y"}}'.encode()
    assert split([line + b"\n" + line]) == [Text(1, 0, line), Text(2, len(line) + 1, line)]


def test_crlf_and_a_missing_last_newline() -> None:
    """Statements 148 and 149: CRLF ends a line, and so does the end of the file."""
    assert split([b"{}\r\n\r\n  \t\r\n[]"]) == [Text(1, 0, b"{}"), Text(4, 11, b"[]")]


def test_a_byte_order_mark_is_skipped_once() -> None:
    """C02: the mark before line 1 belongs to no line; anywhere else it is content."""
    bom = b"\xef\xbb\xbf"
    assert split([bom + b"{}\n" + bom + b"{}"]) == [Text(1, 3, b"{}"), Text(2, 6, bom + b"{}")]


def test_an_endless_line_is_refused_before_it_fills_the_memory() -> None:
    """A line without an end is given up at the limit, with its number."""
    splitter = Splitter(max_line_bytes=100)
    splitter.feed(b"{}\n" + b"x" * 100)
    with pytest.raises(LineTooLong) as caught:
        splitter.feed(b"x")
    assert caught.value.no == 2


def test_a_long_line_in_one_piece_is_refused_too() -> None:
    """The limit does not depend on how the file came."""
    with pytest.raises(LineTooLong) as caught:
        Splitter(max_line_bytes=100).feed(b"\n" + b"x" * 101 + b"\n")
    assert caught.value.no == 2


@pytest.mark.parametrize("seed", range(20))
def test_chunks_are_the_file(seed: int) -> None:
    """Chunks put together are the upload, each ends at a line end, and only a line that is longer
    than a chunk makes one that is larger."""
    dice = random.Random(seed)
    lines = [b"x" * dice.choice([0, 10, 900, CHUNK_BYTES - 1, 3 * CHUNK_BYTES]) for _ in range(60)]
    data = b"\r\n".join(lines) + dice.choice([b"", b"\n"])
    cutter = Cutter()
    chunks = []
    for part in pieces(data, [dice.randrange(len(data)) for _ in range(dice.choice([0, 5, 100]))]):
        chunks += cutter.feed(part)
    chunks += cutter.finish()
    assert b"".join(chunks) == data
    assert all(chunk.endswith(b"\n") for chunk in chunks[:-1])
    assert all(len(c) <= CHUNK_BYTES or c.count(b"\n", 0, -1) == 0 for c in chunks)
    small = [a for a, b in pairwise(chunks) if len(a) + len(b) < CHUNK_BYTES]
    assert not small, "two chunks that would have fitted into one"
