"""Stop strings and characters, over any way that tokens can cut them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tidemill.backends.llama.stops import StopBuffer, held

TEXT = st.text(alphabet="ab«é漢🦀", max_size=30)
STOPS = st.lists(st.text(alphabet="ab«é漢🦀", min_size=1, max_size=4), max_size=3)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """``data`` in pieces that end at ``places``, wherever in a character they are."""
    edges = [0, *sorted(p % (len(data) + 1) for p in places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@given(TEXT, STOPS, st.lists(st.integers(0, 200), max_size=12))
def test_the_text_ends_before_the_first_stop_however_it_is_cut(
    text: str, stops: list[str], places: list[int]
) -> None:
    """Pieces may cut stop strings and characters anywhere: what is shown is the same."""
    buffer = StopBuffer(stops)
    shown, stopped_at = "", None
    for i, piece in enumerate(cut(text.encode(), places)):
        shown += buffer.feed(piece)
        if buffer.stopped:
            stopped_at = i
            break
    shown += buffer.end()
    ends = [text.find(stop) for stop in stops if stop in text]
    assert (stopped_at is not None) == bool(ends)
    if ends:
        # A piece may complete a later stop string before an earlier, longer one is complete.
        assert any(shown == text[:end] for end in ends)
        assert not any(stop in shown for stop in stops)
    else:
        assert shown == text


@given(TEXT, STOPS, st.lists(st.integers(0, 200), max_size=12))
def test_nothing_is_held_back_without_cause(text: str, stops: list[str], places: list[int]) -> None:
    """After each piece only what may begin a stop string, or an open character, is missing."""
    buffer, shown, fed = StopBuffer(stops), "", b""
    for piece in cut(text.encode(), places):
        shown += buffer.feed(piece)
        fed += piece
        if buffer.stopped:
            return
        missing = fed[len(shown.encode()) :]
        assert len(missing) <= max((len(s.encode()) for s in stops), default=1) + 2


def test_the_longest_possible_beginning_is_held() -> None:
    """Of two beginnings at the end of the text the longer one counts."""
    assert held(b"xxab", [b"abc", b"bz"]) == 2
    assert held(b"xxa", [b"abc"]) == 1
    assert held(b"abc", [b"abc"]) == 0
    assert held("", ["a"]) == 0


def test_a_half_character_at_the_end_is_replaced() -> None:
    """An answer cut within a character shows that something is missing."""
    buffer = StopBuffer(())
    assert buffer.feed("é".encode()[:1]) == ""
    assert buffer.end() == "\ufffd"


def test_an_empty_stop_string_stops_nothing() -> None:
    """It would otherwise match before the first word."""
    buffer = StopBuffer(["", "x"])
    assert buffer.feed(b"abc") == "abc"
