"""Owners take turns, then deadline, then age."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tidemill.scheduler.queue import Queues, Turns, portioned
from tidemill.types import Waiting


def _turns(*batches: tuple[str, int, int]) -> Turns:
    turns = Turns()
    for owner, seq, expires_at in batches:
        turns.add(owner, seq, expires_at)
    return turns


def test_nothing_is_dealt_without_batches_or_room() -> None:
    """An empty queue or a full pool deals no share."""
    assert Turns().deal(10) == []
    assert _turns(("a", 1, 100)).deal(0) == []


def test_a_lone_owner_gets_everything_on_its_nearest_deadline() -> None:
    """Within an owner the batch that expires first is served first, the older one on a tie."""
    assert _turns(("a", 1, 200), ("a", 2, 100)).deal(8) == [(2, 8)]
    assert _turns(("a", 2, 100), ("a", 1, 100)).deal(8) == [(1, 8)]


def test_a_small_owner_is_not_stuck_behind_a_large_one() -> None:
    """Two owners share the free slots although one has many more batches."""
    turns = _turns(*(("big", seq, 100) for seq in range(1, 9)), ("small", 9, 999))
    assert dict(turns.deal(8)) == {1: 4, 9: 4}


def test_single_slots_alternate() -> None:
    """When slots come free one by one, owners take turns line by line."""
    turns = _turns(("a", 1, 100), ("b", 2, 100))
    assert [turns.deal(1)[0][0] for _ in range(4)] == [1, 2, 1, 2]


def test_a_dry_batch_gives_way_and_comes_back() -> None:
    """A batch whose lines all wait for a retry takes no share until it is wet again."""
    turns = _turns(("a", 1, 100), ("a", 2, 200))
    turns.dry(1)
    assert turns.deal(4) == [(2, 4)]
    turns.wet(1)
    assert turns.deal(4) == [(1, 4)]


def test_a_removed_batch_stays_away() -> None:
    """Waking a batch that ended does not bring it back."""
    turns = _turns(("a", 1, 100))
    turns.remove(1)
    turns.wet(1)
    turns.wet_all()
    assert len(turns) == 0
    assert turns.deal(4) == []


@given(
    owners=st.lists(st.integers(0, 5), min_size=1, max_size=20),
    free=st.lists(st.integers(1, 40), min_size=1, max_size=60),
)
def test_shares_are_exact_and_even_over_time(owners: list[int], free: list[int]) -> None:
    """Every deal hands out all slots; over any run, owners differ by at most one share per deal
    that had a remainder."""
    turns = _turns(*((f"o{owner}", seq, 100) for seq, owner in enumerate(owners)))
    owner_of = {seq: f"o{owner}" for seq, owner in enumerate(owners)}
    got: Counter[str] = Counter(dict.fromkeys(owner_of.values(), 0))
    for n in free:
        shares = turns.deal(n)
        assert sum(k for _, k in shares) == n
        assert all(k > 0 for _, k in shares)
        for seq, k in shares:
            got[owner_of[seq]] += k
        assert max(got.values()) - min(got.values()) <= 1


def _queues(*batches: tuple[int, *tuple[str, ...]]) -> Queues:
    queues = Queues(["local", "slow"])
    for seq, *places in batches:
        queues.add("a", seq, 100, places)
    return queues


def test_a_slow_place_never_takes_the_places_of_another() -> None:
    """Its lines in flight count against its own wants only."""
    queues = _queues((1, "slow"), (2, "local"))
    wants = {"local": 4, "slow": 8}
    assert sorted(queues.deal(100, wants, {})) == [("local", 2, 4), ("slow", 1, 8)]
    assert queues.deal(100, wants, {"slow": 8}) == [("local", 2, 4)]
    assert queues.deal(100, wants, {"slow": 8, "local": 4}) == []


def test_what_all_may_have_together_is_shared_evenly() -> None:
    """Also when one place came first and has everything: it gets no more until it is even."""
    queues = _queues((1, "slow"), (2, "local"))
    wants = {"local": 8, "slow": 8}
    assert sorted(queues.deal(6, wants, {})) == [("local", 2, 3), ("slow", 1, 3)]
    assert queues.deal(6, wants, {"slow": 5}) == [("local", 2, 1)]
    assert _queues((1, "slow")).deal(6, wants, {}) == [("slow", 1, 6)]


def test_one_line_at_a_time_alternates_between_places() -> None:
    """With room for a single line, none waits for ever."""
    queues = _queues((1, "slow"), (2, "local"))
    wants = {"local": 8, "slow": 8}
    assert [queues.deal(1, wants, {})[0][0] for _ in range(4)] == ["local", "slow"] * 2


def test_a_batch_for_several_places_is_dry_at_one_alone() -> None:
    """It stands in the turns of each, and leaves all of them at once."""
    queues = _queues((1, "local", "slow"))
    wants = {"local": 1, "slow": 1}
    assert len(queues.deal(9, wants, {})) == 2
    queues.dry(1, "slow")
    assert queues.deal(9, wants, {}) == [("local", 1, 1)]
    queues.wet(1)
    assert len(queues.deal(9, wants, {})) == 2
    queues.remove(1)
    queues.wet_all()
    assert len(queues) == 0


def test_places_say_where_lines_wait_and_until_when() -> None:
    """The nearest deadline of all owners' batches, and whether one of these is lifted; a place
    without lines is not named."""
    queues = Queues(["local", "slow", "idle"])
    for seq, owner, expires_at in ((1, "a", 300), (2, "a", 200), (3, "b", 250)):
        queues.add(owner, seq, expires_at, ["local"])
    queues.add("b", 4, 400, ["slow"])
    slow = Waiting(deadline=400)
    assert queues.waiting() == {"local": Waiting(deadline=200), "slow": slow}
    queues.lift({1})
    assert queues.waiting() == {"local": Waiting(deadline=200, lifted=True), "slow": slow}
    queues.dry(2, "local")
    queues.remove(4)
    assert queues.waiting() == {"local": Waiting(deadline=250, lifted=True)}
    queues.dry(1, "local")
    assert queues.waiting() == {"local": Waiting(deadline=250)}


@given(
    st.integers(0, 60), st.dictionaries(st.sampled_from("abcde"), st.integers(0, 40), min_size=1)
)
def test_portions_use_what_there_is(total: int, wants: dict[str, int]) -> None:
    """Nobody gets more than it wants, and nothing is left over that somebody wants."""
    portions = portioned(total, wants)
    assert all(portions[place] <= wants[place] for place in wants)
    if total >= len(wants):
        assert sum(portions.values()) == min(total, sum(wants.values()))
    assert all(portions[place] >= 1 for place in wants if wants[place])


def test_every_second_turn_is_a_lifted_one() -> None:
    """One owner of four has a batch that would be late: it has half of the turns, beginning at
    once; the three others share the rest."""
    turns = _turns(("a", 1, 900), ("b", 2, 100), ("c", 3, 100), ("d", 4, 100))
    turns.lift({1})
    assert [turns.deal(1)[0][0] for _ in range(8)] == [1, 2, 1, 3, 1, 4, 1, 2]
    assert turns.deal(7) == [(1, 4), (3, 1), (4, 1), (2, 1)]
    assert dict(turns.deal(7))[1] == 3, "the odd one was theirs last time"
    turns.lift(set())
    assert sorted(turns.deal(8)) == [(1, 2), (2, 2), (3, 2), (4, 2)]


def test_lifted_batches_go_first_among_their_owners() -> None:
    """Ahead of one with a nearer deadline, which has time; lifted both, the nearer one is first."""
    turns = _turns(("a", 1, 100), ("a", 2, 200))
    turns.lift({2})
    assert turns.deal(4) == [(2, 4)]
    assert turns.waiting() == Waiting(deadline=100, lifted=True)
    turns.lift({1, 2})
    assert turns.deal(4) == [(1, 4)]
    turns.lift({1, 7})
    turns.dry(1)
    turns.wet(1)
    assert turns.deal(4) == [(1, 4)]
    turns.remove(1)
    turns.add("a", 1, 300)
    assert turns.deal(4) == [(2, 4)], "what was lifted once is not so for ever"


def test_nobody_loses_by_being_lifted() -> None:
    """Where those who are lifted are not the fewer ones, half would be less than their share: all
    are dealt alike."""
    turns = _turns(("a", 1, 100), ("b", 2, 100), ("c", 3, 100))
    for lifted in ({1, 2}, {1, 2, 3}):
        turns.lift(lifted)
        assert sorted(turns.deal(9)) == [(1, 3), (2, 3), (3, 3)]


@given(
    owners=st.lists(st.integers(0, 6), min_size=1, max_size=20),
    lifts=st.lists(st.sets(st.integers(0, 19)), min_size=1, max_size=60),
    free=st.lists(st.integers(1, 9), min_size=60, max_size=60),
    mine=st.booleans(),
)
def test_nobody_starves_beside_lifted_batches(
    owners: list[int], lifts: list[set[int]], free: list[int], mine: bool
) -> None:
    """Whichever batches of the others are lifted and lowered at whatever moments, an owner is dealt
    a line within twice as many lines as there are owners; also if it is lifted itself."""
    turns = _turns(*((f"o{owner}", seq, 100 + seq) for seq, owner in enumerate(owners)))
    own = {seq for seq, owner in enumerate(owners) if owner == owners[0]}
    bound = 2 * len(set(owners))
    waited = 0
    for lifted, n in zip(lifts, free, strict=False):
        turns.lift((lifted - own) | (own if mine else set()))
        shares = turns.deal(n)
        assert sum(lines for _, lines in shares) == n
        if any(seq in own for seq, _ in shares):
            waited = 0
        else:
            waited += n
            assert waited < bound


@given(
    others=st.integers(2, 8),
    lifted=st.integers(1, 7),
    free=st.lists(st.integers(1, 9), max_size=40),
)
def test_lifted_batches_have_half_and_no_more(others: int, lifted: int, free: list[int]) -> None:
    """Over any run, what goes to the fewer ones who are lifted and what goes to the others differ
    by one line."""
    lifted = min(lifted, others - 1)
    turns = _turns(*((f"o{seq}", seq, 100) for seq in range(lifted + others)))
    turns.lift(set(range(lifted)))
    ahead = 0
    for n in free:
        shares = turns.deal(n)
        ahead += sum(k if seq < lifted else -k for seq, k in shares)
        assert ahead in (0, 1)
