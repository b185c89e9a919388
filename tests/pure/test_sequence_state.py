"""A saved state is read by contexts with any number of sequences."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.backends.llama.state import WORD, fitted

MAGIC, CELLS = 0xAF143CD8, 7


def saved(ids: int, seq: int, payload: bytes, most: int) -> bytearray:
    """As llama.cpp writes the state of ``seq``, with zeros for the largest context."""
    counts = [CELLS if k == seq else 0 for k in range(ids)]
    head = struct.pack(f"={4 + seq}I", MAGIC, seq, ids, *counts[: seq + 1])
    return bytearray(head + payload + bytes(WORD * (ids - 1 - seq)) + bytes(WORD * (most - ids)))


def read(state: bytes, ids: int, size: int) -> bytes:
    """As llama.cpp reads it: the same number of ids, and a count for each."""
    magic, _, number = struct.unpack_from("=3I", state)
    assert (magic, number) == (MAGIC, ids)
    at, found = 3 * WORD, []
    for _ in range(ids):
        (cells,) = struct.unpack_from("=I", state, at)
        at += WORD
        if cells:
            assert cells == CELLS
            found.append(state[at : at + size])
            at += size
    [payload] = found
    return payload


@given(st.integers(1, 20), st.integers(1, 20), st.data())
def test_any_context_reads_what_any_context_wrote(a: int, b: int, data: st.DataObject) -> None:
    """Whichever id it had, and whichever of the two has more; and afterwards it is as it was."""
    seq = data.draw(st.integers(0, a - 1))
    payload = data.draw(st.binary(min_size=1, max_size=64))
    state = saved(a, seq, payload, max(a, b))
    before = bytes(state)
    with fitted(memoryview(state), b) as readable:
        assert read(bytes(readable), b, len(payload)) == payload
    assert bytes(state) == before


def test_a_state_of_another_shape_is_left_as_it_is() -> None:
    """Without cells, or cut: llama.cpp will refuse it, and nothing is written over."""
    for state in (bytearray(struct.pack("=5I", MAGIC, 0, 2, 0, 0)), bytearray(3 * WORD)):
        before = bytes(state)
        with fitted(memoryview(state), 4) as readable:
            assert bytes(readable) == before


def test_a_read_that_fails_changes_nothing() -> None:
    """The words that were written anew are put back."""
    state = saved(4, 3, b"payload!", 4)
    before = bytes(state)
    with pytest.raises(RuntimeError, match="no room"), fitted(memoryview(state), 2):
        raise RuntimeError("no room")
    assert bytes(state) == before
