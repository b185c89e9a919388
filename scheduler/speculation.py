"""How many drafts a step computes: as many as pay, by what was measured.

A draft row costs time and may bring a token. Both are learned while the engine runs: the seconds of
a pass over the weights by its rows, and how often what is looked up is what is chosen, by who asks
and how long the match was; that needs no draft, only a look at what was chosen without. ``share``
decides, a pure function of these numbers. Where no draft pays, one step in ``PROBE`` tries the best
that could be had, so that costs which were measured wrong are measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Seq
from typing import Generic, NamedTuple, TypeVar

import msgspec

from tidemill import clock
from tidemill.scheduler.lookup import Match, drafts
from tidemill.scheduler.sequence import Sequence
from tidemill.scheduler.steps import Chunk, Sampled
from tidemill.types import Lane

C = TypeVar("C")

COUNTS = (1, 2, 3, 5, 7, 11, 15)
"""Drafts that one sequence may get in a step. With its token these are 16 rows at most, which is
where kernels are at their best; more than that is seldom kept."""
MARGIN = 1.15
"""Less is not worth the risk: what has just begun to look like a copy is often none."""
PROBE = 64
"""Of so many steps in which something could be drafted and nothing paid, one drafts it."""
PRIOR = (0.3, 0.5, 0.7, 0.8, 0.9)
"""Chance of a draft before anything is known, for matches of 2, up to 4, 8, 16 and 32 tokens."""
GROUPS = 1_024
"""Groups that are remembered; beyond it the oldest begins anew."""
_SLOWEST_COST, _SLOWEST_ODDS = 1 / 8, 1 / 64
_BELIEF = 4
"""What the prior of a chance weighs, in tokens."""
_KNOTS = 12
_OUTLIER = 4.0


class Costs:
    """Seconds of a pass by its rows: known at powers of two, and straight lines between them.

    What was never measured is taken for as cheap as fewer rows, so that it is tried once.
    """

    def __init__(self) -> None:
        self._at = [0.0] * _KNOTS
        self._seen = [0] * _KNOTS

    def of(self, rows: int) -> float:
        """Seconds of one pass; 0.0 while nothing is known at all."""
        _, low, high, share = self._around(rows)
        return low + share * (high - low)

    def total(self, passes: Seq[int]) -> float:
        """Seconds of several passes."""
        return sum(map(self.of, passes))

    def learn(self, passes: Seq[int], seconds: float) -> None:
        """A step of these passes took so long."""
        expected = self.total(passes)
        if expected <= 0.0:
            each = seconds / sum(passes)
            self._at = [each * 2**k for k in range(_KNOTS)]
            expected = seconds
        ratio = seconds / expected
        for rows in passes:
            knot, low, high, share = self._around(rows)
            ends = (
                [(knot, low, 1 - share), (knot + 1, high, share)] if share else [(knot, low, 1.0)]
            )
            if all(self._seen[k] for k, _, _ in ends):
                # Whatever held the machine up once says nothing about rows.
                ratio = min(ratio, _OUTLIER)
            error = (low + share * (high - low)) * (ratio - 1)
            norm = (1 - share) ** 2 + share**2
            for k, value, weight in ends:
                self._seen[k] += 1
                rate = max(_SLOWEST_COST, 1 / self._seen[k])
                self._at[k] = max(0.0, value + rate * weight * error / norm)

    def _around(self, rows: int) -> tuple[int, float, float, float]:
        """The knot below, its value, the next one's, and how far between them ``rows`` is."""
        knot = min(rows.bit_length() - 1, _KNOTS - 2)
        low = self._at[self._known(knot)]
        # More rows take no less time, and no more than as many passes would.
        high = min(max(self._at[self._known(knot + 1)], low), 2 * low)
        return knot, low, high, rows / 2**knot - 1

    def _known(self, knot: int) -> int:
        """The nearest knot below that was measured; the knot itself where there is none."""
        return next((k for k in range(knot, -1, -1) if self._seen[k]), knot)


class Odds:
    """The chance that a draft is kept if those before it were, by group and length of the match."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, tuple[list[float], list[int]]] = {}
        """Chances, and how many tokens each was learned from."""

    def of(self, group: Hashable, length: int) -> float:
        """Between 0 and 1."""
        return self._groups[group][0][_kind(length)] if group in self._groups else _prior(length)

    def learn(self, group: Hashable, length: int, *, kept: int, refused: bool) -> None:
        """Of the drafts after such a match the first ``kept`` were kept, and the next refused or
        not."""
        if group not in self._groups and len(self._groups) >= GROUPS:
            del self._groups[next(iter(self._groups))]
        chances, seen = self._groups.setdefault(group, (list(PRIOR), [_BELIEF] * len(PRIOR)))
        kind = _kind(length)
        for outcome in [1.0] * kept + [0.0] * refused:
            seen[kind] += 1
            rate = max(_SLOWEST_ODDS, 1 / seen[kind])
            chances[kind] += rate * (outcome - chances[kind])


def _prior(length: int) -> float:
    return PRIOR[_kind(length)]


def _kind(length: int) -> int:
    return (length - 1).bit_length() - 1


def passes(lengths: Seq[tuple[int, int]]) -> list[int]:
    """Rows of each pass over the weights that a step of ``(sequence id, rows)`` takes, ids
    ascending: consecutive ids go together with as many rows each as the shortest of them has, and
    what the others have left goes in passes after it."""
    left, out = list(lengths), list[int]()
    while left:
        run = 1
        while run < len(left) and left[run][0] == left[run - 1][0] + 1:
            run += 1
        least = min(rows for _, rows in left[:run])
        out.append(run * least)
        left = [(seq, rows - least) for seq, rows in left[:run] if rows > least] + left[run:]
    return out


class Guess(NamedTuple):
    """What could be drafted for one chunk."""

    chance: float
    """That a draft is kept if those before it were."""
    most: int
    """Drafts that there is room for."""


def share(
    lengths: Seq[tuple[int, int]], guesses: Mapping[int, Guess], costs: Costs, room: int
) -> tuple[dict[int, int], float]:
    """The best drafts for a step: how many for which chunk, and the tokens per second that they
    bring as a multiple of those without drafts; nothing and 1.0 when nothing can be drafted.

    ``lengths`` are the chunks as for ``passes``; ``guesses`` go by index into them, and belong to
    chunks that choose a token. ``room`` is how many rows are free in the step. Prompts beside them
    take the time that they take: only what drafts add to it counts.
    """
    tokens, base = len(lengths), costs.total(passes(lengths))
    plain = costs.total(passes([(seq, 1) for seq, _ in lengths]))
    best: tuple[dict[int, int], float] = ({}, 0.0)
    if plain <= 0.0 or not guesses:
        return {}, 1.0
    for least in sorted({round(guess.chance, 1) for guess in guesses.values()}, reverse=True):
        for count in COUNTS:
            given = {
                i: min(count, guess.most)
                for i, guess in guesses.items()
                if round(guess.chance, 1) >= least
            }
            if sum(given.values()) > room:
                break
            longer = [(seq, rows + given.get(i, 0)) for i, (seq, rows) in enumerate(lengths)]
            gain = sum(_expected(guesses[i].chance, n) for i, n in given.items())
            # Drafts that make a sequence as long as its neighbour's prompt may even save a pass.
            seconds = plain + max(0.0, costs.total(passes(longer)) - base)
            ratio = (1 + gain / tokens) * plain / seconds
            if ratio > best[1]:
                best = given, ratio
    return best if best[0] else ({}, 1.0)


def _expected(chance: float, n: int) -> float:
    """Drafts that are kept of ``n``, on average."""
    return float(n) if chance >= 1.0 else chance * (1 - chance**n) / (1 - chance)


class Speculation(Generic[C]):
    """Drafts for the steps of one engine, and what came of them. Used by the engine's thread."""

    def __init__(self, *, now: Callable[[], float] = clock.monotonic) -> None:
        self.costs, self.odds = Costs(), Odds()
        self._now = now
        self._begun = 0.0
        self._unpaid = 0
        """Steps in a row in which something could be drafted and nothing paid."""
        self._matches: dict[int, tuple[Hashable, Match, int]] = {}
        """By index of the chunk of this step: the group, the match and the token that it names."""

    def begin(
        self, chunks: list[Chunk[C]], live: Mapping[int, Sequence[C]], *, rows: int, context: int
    ) -> list[Chunk[C]]:
        """The chunks of a step of at most ``rows`` rows, with drafts where they pay; no sequence
        gets longer than ``context`` by them. While somebody INTERACTIVE is among all that are
        ``live`` nobody else gets any: their next token should not wait for those."""
        self._matches.clear()
        drafted = list(chunks)
        sequences = [live[chunk.key] for chunk in chunks]
        first = min(sequence.lane for sequence in live.values())
        guesses = dict[int, Guess]()
        for i, (chunk, sequence) in enumerate(zip(chunks, sequences, strict=True)):
            if chunk.chooser is None or not 0 < sequence.answered < sequence.limit - 1:
                continue
            if (match := sequence.lookup.match(sequence.tokens)) is not None:
                group = (sequence.scope, sequence.lane, sequence.group)
                self._matches[i] = group, match, sequence.tokens[match.at]
                if first is not Lane.INTERACTIVE or sequence.lane is first:
                    left = sequence.limit - sequence.answered - 1
                    most = min(left, context - len(sequence.tokens))
                    if most > 0:
                        guesses[i] = Guess(self.odds.of(group, match.length), most)
        lengths = [(chunk.seq, len(chunk.tokens)) for chunk in chunks]
        given, ratio = share(lengths, guesses, self.costs, rows - sum(n for _, n in lengths))
        if given and self._pays(ratio):
            for i, n in given.items():
                ahead = drafts(sequences[i].tokens, self._matches[i][1].at, n)
                drafted[i] = msgspec.structs.replace(chunks[i], drafts=ahead)
        self._begun = self._now()
        return drafted

    def _pays(self, ratio: float) -> bool:
        if ratio >= MARGIN:
            self._unpaid = 0
            return True
        self._unpaid += 1
        return self._unpaid % PROBE == 0

    def end(self, chunks: list[Chunk[C]], sampled: Mapping[int, list[Sampled]]) -> None:
        """The step of ``begin`` was computed just now."""
        took = self._now() - self._begun
        lengths = [(chunk.seq, len(chunk.tokens) + len(chunk.drafts)) for chunk in chunks]
        self.costs.learn(passes(lengths), took)
        for i, (group, match, named) in self._matches.items():
            chosen, tried = sampled[chunks[i].key], chunks[i].drafts or [named]
            pairs = zip(tried, chosen, strict=False)
            kept = sum(draft == one.token for draft, one in pairs)
            refused = kept < min(len(tried), len(chosen))
            self.odds.learn(group, match.length, kept=kept, refused=refused)
