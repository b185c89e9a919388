"""The radix tree, against comparing everything with everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.scheduler.prefixes import Prefixes, common

tokens = st.lists(st.integers(0, 2), max_size=12)
scopes = st.sampled_from(["", "a", "b"])


def shared(a: list[int], b: list[int]) -> int:
    """How many tokens two sequences begin with alike."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | tokens, scopes), max_size=30), tokens)
def test_a_match_is_what_a_comparison_of_all_finds(
    moves: list[tuple[int, list[int] | None, str]], asked: list[int]
) -> None:
    """After any puts and drops, each holder is found at the length that it shares, and in no
    scope but its own."""
    tree = Prefixes()
    held: dict[int, tuple[list[int], str]] = {}
    for holder, has, scope in moves:
        if has is None:
            tree.drop(holder)
            held.pop(holder, None)
        else:
            tree.put(holder, has, scope)
            held[holder] = (has, scope)
    assert len(tree) == len(held)
    for scope in ("", "a", "b", "nobody's"):
        found: dict[int, int] = {}
        matches = tree.matches(asked, scope)
        assert [n for n, _ in matches] == sorted({n for n, _ in matches}, reverse=True)
        for length, holders in matches:
            for holder in holders:
                found.setdefault(holder, length)
        expected = {h: shared(t, asked) for h, (t, s) in held.items() if s == scope}
        assert found == {h: n for h, n in expected.items() if n}
    for holder in list(held):
        tree.drop(holder)
    assert tree.matches(asked, "") == []
    assert not tree._root.children


@given(tokens, tokens, st.integers(0, 3))
def test_common_counts_equal_tokens(a: list[int], b: list[int], start: int) -> None:
    """From a place in the second sequence on."""
    assert common(a, b, start) == shared(a, b[start:])
