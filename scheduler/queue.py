"""Whose line is next: owners take turns, then the nearest deadline, then age, then line order.

Batches that would miss their deadline are *lifted*: half of the turns go to their owners while
others wait, or more where they are more. With N owners each has a turn within 2 N lines.

Each place where lines run (this server's engines, a provider) has turns of its own, so that lines
of a slow place never stand where those of another could run.

Pure: knows batches by ``seq`` only, never awaits, never reads a clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from tidemill.types import Waiting


class _Entry(NamedTuple):
    """Sorts by who is first among the batches of one owner."""

    waits: bool
    """False for a batch that is lifted."""
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
        self._lifted: set[int] = set()
        self._odd_to_lifted = True
        """Who gets the odd line of the next deal that both sides share."""

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
        self._lifted.discard(seq)

    def lift(self, seqs: Set[int]) -> None:
        """These batches are lifted, and no others. Unknown ones are ignored."""
        changed = self._owner_of.keys() & (self._lifted ^ seqs)
        self._lifted = self._owner_of.keys() & seqs
        for owner in {self._owner_of[seq] for seq in changed} & self._owners.keys():
            entries = self._owners[owner]
            entries[:] = sorted(self._entry(entry.seq) for entry in entries)

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
        entry = self._entry(seq)
        if entry not in entries:
            entries.append(entry)
            entries.sort()

    def wet_all(self) -> None:
        """Every known batch may have lines that are due (a retry's time came)."""
        for seq in self._owner_of:
            self.wet(seq)

    def _entry(self, seq: int) -> _Entry:
        return _Entry(seq not in self._lifted, self._expires[seq], seq)

    def waiting(self) -> Waiting | None:
        """The nearest deadline of all batches that may have lines now, and whether one of them is
        lifted; None: there are none."""
        found: list[int] = []
        for entries in self._owners.values():  # the nearest of those lifted, and of the others
            found.append(entries[0].expires_at)
            found += [next((entry.expires_at for entry in entries if entry.waits), found[-1])]
        if not found:
            return None
        lifted = any(not entries[0].waits for entries in self._owners.values())
        return Waiting(deadline=min(found), lifted=lifted)

    def deal(self, n: int) -> list[tuple[int, int]]:
        """Share ``n`` lines among the owners: ``[(batch seq, lines)]``, at most one share an owner.

        Owners with a lifted batch share half of them, if they are fewer than the others; over many
        deals the halves differ by one line at most. Else all are dealt alike: shares differ by one
        line at most, and the owner who was dealt first goes to the back, so that over many small
        deals everybody gets the same.

        An owner stands behind at most N - 1 others, and of two lines in a row at least one goes to
        somebody ahead of it or to itself. So it has a turn within 2 N lines, as long as its own
        batches are neither lifted nor lowered meanwhile.
        """
        lifted = [owner for owner, entries in self._owners.items() if not entries[0].waits]
        if not 0 < len(lifted) < len(self._owners) - len(lifted):
            return self._share(list(self._owners), n)
        others = [owner for owner, entries in self._owners.items() if entries[0].waits]
        half, odd = divmod(max(0, n), 2)
        to_lifted = half + (odd if self._odd_to_lifted else 0)
        self._odd_to_lifted ^= bool(odd)
        return self._share(lifted, to_lifted) + self._share(others, n - to_lifted)

    def _share(self, among: list[str], n: int) -> list[tuple[int, int]]:
        """Share ``n`` lines among these owners, who are in the order of their turns."""
        owners = among[: max(0, n)]
        if not owners:
            return []
        share, rest = divmod(n, len(owners))
        shares = []
        for place, owner in enumerate(owners):
            shares.append((self._owners[owner][0].seq, share + (1 if place < rest else 0)))
        for owner in owners:
            self._owners.move_to_end(owner)
        if rest and len(owners) == len(among):
            # Those who got one line more go behind those who did not.
            for owner in owners[:rest]:
                self._owners.move_to_end(owner)
        return shares


class Queues:
    """The ``Turns`` of each place. A batch with lines for several places stands in several."""

    def __init__(self, places: Iterable[str]) -> None:
        self._turns = OrderedDict((place, Turns()) for place in places)

    def __len__(self) -> int:
        """Batches that may have lines now; one with several places counts for each."""
        return sum(len(turns) for turns in self._turns.values())

    def add(self, owner: str, seq: int, expires_at: int, places: Iterable[str]) -> None:
        """A batch began, or was found at start; its lines run at these places."""
        for place in places:
            self._turns[place].add(owner, seq, expires_at)

    def remove(self, seq: int) -> None:
        """A batch ended, or no line of it may start any more."""
        for turns in self._turns.values():
            turns.remove(seq)

    def lift(self, seqs: Set[int]) -> None:
        """These batches are lifted at every place, and no others. Unknown ones are ignored."""
        for turns in self._turns.values():
            turns.lift(seqs)

    def dry(self, seq: int, place: str) -> None:
        """The batch has no line that is due at a place; it keeps its place for later."""
        self._turns[place].dry(seq)

    def wet(self, seq: int) -> None:
        """The batch may have lines that are due. Unknown batches are ignored."""
        for turns in self._turns.values():
            turns.wet(seq)

    def wet_all(self) -> None:
        """Every known batch may have lines that are due (a retry's time came)."""
        for turns in self._turns.values():
            turns.wet_all()

    def waiting(self) -> dict[str, Waiting]:
        """The places that may have lines now, and how pressing these are."""
        found = {place: turns.waiting() for place, turns in self._turns.items()}
        return {place: lines for place, lines in found.items() if lines is not None}

    def deal(
        self, total: int, wants: Mapping[str, int], active: Mapping[str, int]
    ) -> list[tuple[str, int, int]]:
        """Share ``total`` lines in flight among the places, and each place's among the owners:
        ``[(place, batch seq, lines)]``.

        ``wants``: lines that each place would have in flight; ``active``: those that it has.
        """
        busy = {
            place: wants[place]
            for place, turns in self._turns.items()
            if len(turns) or active.get(place, 0)
        }
        portions = portioned(total, busy)
        left = total - sum(active.values())
        shares = []
        for place in list(self._turns):
            n = min(left, portions.get(place, 0) - active.get(place, 0))
            dealt = self._turns[place].deal(n)
            if dealt:
                left -= n
                self._turns.move_to_end(place)
            shares += [(place, seq, lines) for seq, lines in dealt]
        return shares


def portioned(total: int, wants: Mapping[str, int]) -> dict[str, int]:
    """``total`` shared evenly: what one does not want goes to the others, and none gets nothing.

    >>> portioned(10, {"local": 32, "slow": 32, "small": 2})
    {'small': 2, 'local': 4, 'slow': 4}
    """
    portions: dict[str, int] = {}
    for place in sorted(wants, key=lambda place: wants[place]):
        even = total // (len(wants) - len(portions))
        portions[place] = min(wants[place], max(1, even))
        total -= portions[place]
    return portions
