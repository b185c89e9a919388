"""Drafts are looked up where the sequence was before as it is now."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.scheduler.lookup import LONGEST, Lookup, Match, drafts


def in_common(tokens: list[int], at: int) -> int:
    """How many tokens before ``at`` are the last ones, counted one by one."""
    n = 0
    while n < min(at, LONGEST) and tokens[at - 1 - n] == tokens[len(tokens) - 1 - n]:
        n += 1
    return n


@pytest.mark.parametrize(
    ("tokens", "match"),
    [
        ([], None),
        ([1], None),
        ([1, 2], None),
        ([1, 2, 3, 4], None),
        ([7, 7], None),
        ([7, 7, 7], Match(at=2, length=2)),
        ([1, 2, 9, 1, 2], Match(at=2, length=2)),
        ([1, 2, 8, 1, 2, 9, 1, 2], Match(at=5, length=2)),
        # Three tokens before two, though two were there later.
        ([5, 1, 2, 8, 6, 1, 2, 9, 5, 1, 2], Match(at=3, length=3)),
        # Of two places with the same three tokens the later one.
        ([1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3], Match(at=7, length=3)),
        ([*range(40), 99, *range(40)], Match(at=40, length=LONGEST)),
    ],
)
def test_the_latest_place_is_found(tokens: list[int], match: Match | None) -> None:
    """By its last three tokens, else by its last two."""
    assert Lookup().match(tokens) == match


def test_a_copy_goes_on_where_it_was_though_later_places_begin_alike() -> None:
    """Rows of a table: ``: "`` was seen a moment ago in the answer, but the answer is copying, and
    more of what came before fits where it copies from."""
    rows = [[40 + i, 1, 2, 3, 60 + i, 4] for i in range(4)]
    source = [t for row in rows for t in row]
    tokens, lookup = [*source, 9, *source[:2]], Lookup()
    for token in source[2:]:
        match = lookup.match(tokens)
        assert match is not None
        assert drafts(tokens, match.at, 1) == [token] or tokens[-1] == 4
        tokens.append(token)


@given(st.lists(st.integers(0, 3), max_size=120), st.lists(st.integers(1, 9), max_size=40))
def test_whatever_is_found_is_there(tokens: list[int], strides: list[int]) -> None:
    """Tokens arrive one or several at a time; a match is always a true one, its length is the true
    length, and one is found whenever the last two tokens were there before."""
    lookup, n = Lookup(), 0
    for stride in strides:
        n += stride
        some = tokens[:n]
        match = lookup.match(some)
        lengths = [in_common(some, at) for at in range(2, len(some))]
        if match is None:
            assert max(lengths, default=0) < 2
        else:
            assert 2 <= match.at < len(some)
            assert match.length == in_common(some, match.at) >= 2
            assert match.length >= min(3, *lengths) or max(lengths) == 2


@given(st.lists(st.integers(), min_size=1, max_size=20), st.integers(0, 30), st.data())
def test_drafts_go_round_when_the_tokens_end(
    tokens: list[int], n: int, data: st.DataObject
) -> None:
    """What a sequence says that repeats itself is the repeated part, as often as is asked for."""
    at = data.draw(st.integers(0, len(tokens) - 1))
    expected = list(tokens)
    while len(expected) < at + n:
        expected.append(expected[at + (len(expected) - at) % (len(tokens) - at)])
    assert drafts(tokens, at, n) == expected[at : at + n]
