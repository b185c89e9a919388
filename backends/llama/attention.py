"""Attention on a CPU by this package's own code: offered to llama.cpp once a process, and told what
sequences have in common, so that it is read once for all of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from llama_cpp import llama_cpp as C

from tidemill.backends.llama.extension import extension

_share: list[Callable[[list[tuple[int, int]]], None]] = []
"""How to tell it; empty: llama.cpp computes attention itself."""


def offer() -> str | None:
    """Let contexts that are made from now on compute attention here, for as long as the process
    lives. Why they cannot; None: they do. Not for a model on a GPU, which has its own."""
    try:
        native = extension()
    except ImportError as exc:
        return str(exc)
    why: str = native.offer_attention()
    if why:
        return why
    _share[:] = [native.share]
    return None


def flash() -> int:
    """What a context is to be made with. llama.cpp's own choice is none at all where another device
    would compute attention than the rest of a layer, as ours does."""
    return int(C.LLAMA_FLASH_ATTN_TYPE_ENABLED if _share else C.LLAMA_FLASH_ATTN_TYPE_AUTO)


def unshare() -> None:
    """The step that was told is over: what another context computes next has nothing of it."""
    for tell in _share:
        tell([])


class Beginnings:
    """Sequence ids of one context whose first tokens are the same in memory, bit for bit, because
    one was copied from the other. Ids count from 0 in their context."""

    def __init__(self, ids: int) -> None:
        self._new = count()
        self._of = [(-1, 0)] * ids

    def of(self, seq: int) -> tuple[int, int]:
        """The group of an id, and how many tokens it has in common with it; a group below 0 is
        none."""
        return self._of[seq]

    def copied(self, source: int, to: int, tokens: int) -> None:
        """``to`` became a copy of ``source``, which has this many tokens."""
        group, length = self._of[source]
        if group < 0 or sum(other == group for other, _ in self._of) < 2:
            group, length = next(self._new), tokens
        self._of[source] = group, length
        self._of[to] = group, min(length, tokens)

    def cut(self, seq: int, length: int) -> None:
        """What ``seq`` had from token ``length`` on is gone."""
        group, had = self._of[seq]
        if length < had:
            self._of[seq] = (group, length) if length > 0 else (-1, 0)

    def share(self) -> None:
        """Tell it to the step that comes next, which is one of this context."""
        for tell in _share:
            tell(self._of)
