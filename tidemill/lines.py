"""Bytes to lines: what a line is, where it stands, and how a file is cut for storing.

A line ends at LF and nowhere else: U+2028, U+2029 and U+0085 are legal inside a JSON string, so
``str.splitlines`` would cut a record in two. A CR before the LF belongs to the line end, a UTF-8
byte order mark before line 1 to no line, and the last line may lack its end.
"""

from __future__ import annotations

from typing import NamedTuple

CHUNK_BYTES = 64 * 1024
MAX_LINE_BYTES = 64 * 1024 * 1024
"""A line is held in memory as a whole; the default file limit is below this."""

_BOM = b"\xef\xbb\xbf"
_CR = 13


class Text(NamedTuple):
    """One line that is not blank."""

    no: int
    """1-based, blank lines counted."""
    offset: int
    """Of the first byte, in the file."""
    data: bytes
    """Without line end and byte order mark."""


class LineTooLong(Exception):
    """A line grew past the limit before its end came."""

    def __init__(self, no: int, limit: int) -> None:
        super().__init__(f"This line is longer than {limit} bytes.")
        self.no = no


class Splitter:
    """Splits a file that arrives in pieces of any size; the pieces' borders never show.

    >>> splitter = Splitter()
    >>> splitter.feed(b'{"a": 1}\\r\\n\\n{"b"'), splitter.feed(b": 2}"), splitter.finish()
    ([Text(no=1, offset=0, data=b'{"a": 1}')], [], [Text(no=3, offset=11, data=b'{"b": 2}')])
    """

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.no = 0
        """Lines ended so far."""
        self._limit = max_line_bytes
        self._offset = 0
        self._tail: list[bytes] = []
        self._tail_bytes = 0

    def feed(self, piece: bytes) -> list[Text]:
        """The lines that end in this piece. Raises ``LineTooLong``."""
        end = piece.rfind(b"\n") + 1
        if end == 0:
            self._keep(piece)
            return []
        block = b"".join((*self._tail, piece[:end]))
        self._tail.clear()
        self._tail_bytes = 0
        texts = self._split(block[:-1])
        self._keep(piece[end:])
        return texts

    def finish(self) -> list[Text]:
        """The last line, where no line end followed it."""
        block = b"".join(self._tail)
        self._tail.clear()
        self._tail_bytes = 0
        return self._split(block) if block else []

    def _keep(self, piece: bytes) -> None:
        if piece:
            self._tail.append(piece)
            self._tail_bytes += len(piece)
            if self._tail_bytes > self._limit:
                raise LineTooLong(self.no + 1, self._limit)

    def _split(self, block: bytes) -> list[Text]:
        texts = []
        no, offset, limit = self.no, self._offset, self._limit
        for data in block.split(b"\n"):
            no += 1
            start = offset
            offset += len(data) + 1
            if not data or data.isspace():
                continue
            if len(data) > limit:
                raise LineTooLong(no, limit)
            if no == 1 and data.startswith(_BOM):
                data = data[3:]
                start += 3
                if not data or data.isspace():
                    continue
            if data[-1] == _CR:
                data = data[:-1]
            texts.append(Text(no, start, data))
        self.no, self._offset = no, offset
        return texts


class Cutter:
    """Cuts a file into the pieces that are stored: its exact bytes, cut at line ends.

    A piece has at most ``CHUNK_BYTES``, except that a longer line is a piece of its own.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0
        """Up to here the buffer's first line, longer than a chunk, is known to have no end."""

    def feed(self, piece: bytes) -> list[bytes]:
        """The chunks that are complete now."""
        buffer = self._buffer
        buffer += piece
        chunks: list[bytes] = []
        start = 0
        while len(buffer) - start > CHUNK_BYTES:
            end = buffer.rfind(b"\n", start, start + CHUNK_BYTES)
            if end < 0:
                end = buffer.find(b"\n", max(start + CHUNK_BYTES, self._searched))
            if end < 0:
                self._searched = len(buffer)
                break
            chunks.append(bytes(buffer[start : end + 1]))
            start = end + 1
            self._searched = 0
        del buffer[:start]
        self._searched = max(0, self._searched - start)
        return chunks

    def finish(self) -> list[bytes]:
        """The rest."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return [rest] if rest else []
