"""Ranges of bytes out of pieces: the chunks of a blob, or the rows of a result stream."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from tidemill.storage.queries import load

_Q = load("files")

PIECE = 64 * 1024
"""Bytes that a reader gets at once, about."""

_GAP = 4 * PIECE
"""Two ranges closer than this are read together."""


def of_blob(conn: sqlite3.Connection, blob: int, start: int, stop: int, most: int) -> bytes:
    """Bytes ``[start, stop)`` of a blob, or as many of them as the first ``most`` bytes of pieces
    hold. Empty when the blob has nothing there any more."""
    cursor = conn.execute(_Q["chunks"], {"blob": blob, "start": start, "stop": stop})
    return _cut(cursor, start, stop, most, b"")


def of_rows(
    conn: sqlite3.Connection, batch_seq: int, kind: str, start: int, stop: int, most: int
) -> bytes:
    """The same of a result stream: its rows, each followed by a line end."""
    cursor = conn.execute(
        _Q["rows"], {"batch_seq": batch_seq, "kind": kind, "start": start, "stop": stop}
    )
    return _cut(cursor, start, stop, most, b"\n")


def _cut(cursor: sqlite3.Cursor, start: int, stop: int, most: int, end: bytes) -> bytes:
    pieces: list[bytes] = []
    position = start
    try:
        for begin, data in cursor:
            piece = data + end if end else data
            if begin > position or begin + len(piece) <= position:
                break  # a piece is missing: what follows is not what was asked for
            pieces.append(piece[position - begin : stop - begin])
            position = begin + len(piece)
            if position >= min(stop, start + most):
                break
    finally:
        cursor.close()
    return b"".join(pieces)


def of_lines(conn: sqlite3.Connection, blob: int, places: Sequence[tuple[int, int]]) -> list[bytes]:
    """The bytes of lines at ``(offset, length)`` of a blob, in the order asked for.

    Neighbours are read with one query. Raises ``LookupError`` when bytes are missing.
    """
    order = sorted(range(len(places)), key=lambda i: places[i])
    found: list[bytes] = [b""] * len(places)
    first = 0
    while first < len(order):
        start, length = places[order[first]]
        stop, last = start + length, first + 1
        while last < len(order) and places[order[last]][0] - stop <= _GAP:
            offset, length = places[order[last]]
            stop, last = max(stop, offset + length), last + 1
        data = of_blob(conn, blob, start, stop, stop - start)
        if len(data) < stop - start:
            raise LookupError(f"bytes {start} to {stop} of blob {blob} are missing")
        for i in order[first:last]:
            offset, length = places[i]
            found[i] = data[offset - start : offset - start + length]
        first = last
    return found
