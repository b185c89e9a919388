"""A sequence's state as llama.cpp writes it, read by a context with another number of sequences.

llama.cpp moves a state between contexts with equally many sequence ids only: a saved state begins
with that number and has a count of cells for each id, all but one zero::

    magic | id | number n | k zeros | cells | positions, keys, values | n - 1 - k zeros

What lies between can be read by any context of the model, if as many zeros are around it as that
context has other ids. So a state is saved with zeros behind it for the largest context, and for the
time of a read the words before the cells are written anew. Where a state has another shape,
llama.cpp finds the wrong number and refuses it, and the sequence is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

WORD = 4
_HEAD = 3
"""Words before the counts; the last one is the number of ids."""


@contextmanager
def fitted(state: memoryview, ids: int) -> Iterator[memoryview]:
    """What a context with so many sequence ids can read. ``state`` was saved with room for them
    (``WORD`` bytes each) and is the same afterwards."""
    words = state[: (_HEAD + _ids_of(state)) * WORD].cast("I")
    before = next((k for k, cells in enumerate(words[_HEAD:]) if cells), None)
    if before is None or len(words) - _HEAD == ids:
        yield state
        return
    start = before - min(before, ids - 1)
    kept = words[start : start + _HEAD].tolist()
    for at, word in enumerate((words[0], words[1], ids), start):
        words[at] = word
    try:
        yield state[start * WORD :]
    finally:
        for at, word in enumerate(kept, start):
            words[at] = word


def _ids_of(state: memoryview) -> int:
    number = state[(_HEAD - 1) * WORD : _HEAD * WORD].cast("I")[0]
    return int(min(number, len(state) // WORD - _HEAD))
