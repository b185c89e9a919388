"""Which parts of an arena are free, in Python: the same policy as the C++ ``FreeList``."""

from __future__ import annotations

from bisect import bisect_left

from tidemill.native.slots import ALIGN


class Holes:
    """Best fit (the smallest hole, then the lowest offset); holes that touch are one hole."""

    def __init__(self, nbytes: int) -> None:
        self.total = nbytes // ALIGN * ALIGN
        self.holes: list[tuple[int, int]] = [(0, self.total)] if self.total else []
        """(offset, bytes), ascending."""

    @staticmethod
    def rounded(nbytes: int) -> int:
        """A size as it is taken: a multiple of ``ALIGN``."""
        return -(-nbytes // ALIGN) * ALIGN

    @property
    def free(self) -> int:
        return sum(size for _, size in self.holes)

    @property
    def largest(self) -> int:
        return max((size for _, size in self.holes), default=0)

    def take(self, nbytes: int) -> int | None:
        """Offset of a block, or None when no hole is large enough."""
        need = self.rounded(nbytes)
        fits = [(size, offset) for offset, size in self.holes if size >= need]
        if not fits:
            return None
        size, offset = min(fits)
        self.holes.remove((offset, size))
        if size > need:
            self._add(offset + need, size - need)
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Give back a block as it was taken, or shrunk."""
        self._add(offset, self.rounded(nbytes))

    def shrink(self, offset: int, frm: int, to: int) -> None:
        """Keep the first ``to`` bytes of a block of ``frm`` bytes."""
        had, keep = self.rounded(frm), self.rounded(to)
        if keep < had:
            self._add(offset + keep, had - keep)

    def _add(self, offset: int, size: int) -> None:
        at = bisect_left(self.holes, (offset, 0))
        if at < len(self.holes) and self.holes[at][0] == offset + size:
            size += self.holes.pop(at)[1]
        if at and sum(self.holes[at - 1]) == offset:
            at -= 1
            before = self.holes.pop(at)
            offset, size = before[0], before[1] + size
        self.holes.insert(at, (offset, size))
