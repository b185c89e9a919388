"""Whose line is next: owners take turns, then the nearest deadline, then age, then line order.

Pure: knows batches by ``seq`` only, never awaits, never reads a clock.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple


class _Entry(NamedTuple):
    expires_at: int
    seq: int


class Turns:
    """The batches that have lines to run, arranged by owner.

    ``deal`` hands out shares; the caller says with ``dry`` that a batch had fewer due lines than
    its share, and with ``wet`` that it may have some again.
    """

    def __init__(self) -> None:
        self._owners: OrderedDict[str, list[_Entry]] = OrderedDict()
        self._owner_of: dict[int, str] = {}
        self._expires: dict[int, int] = {}

    def __len__(self) -> int:
        """Batches that may have lines now."""
        return sum(len(entries) for entries in self._owners.values())

    def add(self, owner: str, seq: int, expires_at: int) -> None:
        """A batch began, or was found at start."""
        self._owner_of[seq] = owner
        self._expires[seq] = expires_at
        self.wet(seq)

    def remove(self, seq: int) -> None:
        """A batch ended, or no line of it may start any more."""
        self.dry(seq)
        self._owner_of.pop(seq, None)
        self._expires.pop(seq, None)

    def dry(self, seq: int) -> None:
        """The batch has no line that is due; it keeps its place for later."""
        owner = self._owner_of.get(seq)
        entries = self._owners.get(owner) if owner is not None else None
        if not entries or owner is None:
            return
        entries[:] = [entry for entry in entries if entry.seq != seq]
        if not entries:
            del self._owners[owner]

    def wet(self, seq: int) -> None:
        """The batch may have lines that are due. Unknown batches are ignored."""
        owner = self._owner_of.get(seq)
        if owner is None:
            return
        entries = self._owners.setdefault(owner, [])
        entry = _Entry(self._expires[seq], seq)
        if entry not in entries:
            entries.append(entry)
            entries.sort()

    def wet_all(self) -> None:
        """Every known batch may have lines that are due (a retry's time came)."""
        for seq in self._owner_of:
            self.wet(seq)

    def deal(self, n: int) -> list[tuple[int, int]]:
        """Share ``n`` lines among the owners: ``[(batch seq, lines)]``, at most one share an owner.

        Shares differ by one line at most, and the owner who was dealt first goes to the back,
        so that over many small deals everybody gets the same.
        """
        owners = list(self._owners)[: max(0, n)]
        if not owners:
            return []
        share, rest = divmod(n, len(owners))
        shares = []
        for place, owner in enumerate(owners):
            shares.append((self._owners[owner][0].seq, share + (1 if place < rest else 0)))
        for owner in owners:
            self._owners.move_to_end(owner)
        if rest and len(owners) == len(self._owners):
            # Those who got one line more go behind those who did not.
            for owner in owners[:rest]:
                self._owners.move_to_end(owner)
        return shares
