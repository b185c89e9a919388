"""The planner, over any mix of sequences."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tidemill.scheduler.plan import Candidate, Limits, SlotClass, StepPlan, plan
from tidemill.types import Lane


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[Candidate], Limits]:
    """Limits, and any candidates that a loop could hand in: ids unique and within the slots, at
    least of the class that the sequence needs, those that wait in the order of their turns, one of
    them alone at most."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    slots = sum(sizes)
    limits = Limits(
        slots=slots,
        split=tuple(SlotClass(slots=n, context=100 << k) for k, n in enumerate(sizes)),
        rows=slots + draw(st.integers(0, 600)),
        prefill=draw(st.integers(1, 600)),
        prefill_shared=draw(st.integers(1, 128)),
        prefill_lines=draw(st.sampled_from([0, 600, 1200])),
        headroom=draw(st.integers(0, 14)),
        moves=draw(st.integers(0, 3)),
    )
    ids = draw(st.lists(st.integers(0, slots - 1), unique=True))
    seqs: list[int | None] = [*ids, *[None] * draw(st.integers(0, 2 * slots))]
    orders = draw(st.permutations(range(len(seqs))))
    candidates = []
    for seq, order in zip(seqs, orders, strict=True):
        decoding = draw(st.booleans())
        candidates.append(
            Candidate(
                key=100 + order,
                lane=draw(st.sampled_from(Lane)),
                order=order,
                left=1 if decoding else draw(st.integers(1, 2000)),
                decoding=decoding,
                seq=seq,
                klass=draw(st.integers(0, len(sizes) - 1 if seq is None else limits.class_of(seq))),
            )
        )
    candidates.sort(key=lambda c: c.order)
    if candidates and draw(st.booleans()):
        i = draw(st.integers(0, len(candidates) - 1))
        left = min(candidates[i].left, limits.prefill_shared, limits.rows)
        candidates[i] = msgspec.structs.replace(candidates[i], alone=True, left=left)
    return candidates, limits


def after(candidates: list[Candidate], step: StepPlan) -> dict[int, Candidate]:
    """Who is on an id once displacements and admissions are carried out, by key."""
    return {
        c.key: c
        for c in candidates
        if (c.seq is not None and c.key not in step.displace)
        or c.key in {a.key for a in step.admit}
    }


@given(scenes())
def test_a_step_never_exceeds_its_rows_or_its_slots(scene: tuple[list[Candidate], Limits]) -> None:
    """Rows stay within the batch, sequences within the slots, each has an id to itself, and of a
    class with enough room."""
    candidates, limits = scene
    step = plan(candidates, limits)
    needs = {c.key: c.klass for c in candidates}
    for placed in (*step.admit, *step.move, *step.rows):
        assert limits.class_of(placed.seq) >= needs[placed.key]
    assert sum(r.count for r in step.rows) <= limits.rows
    seqs = [r.seq for r in step.rows]
    assert len(seqs) == len(set(seqs)) <= limits.slots
    assert all(0 <= seq < limits.slots for seq in seqs)


@given(scenes())
def test_rows_are_sorted_by_sequence_id(scene: tuple[list[Candidate], Limits]) -> None:
    """Ascending ids let the engine compute all sequences in one pass."""
    step = plan(*scene)
    assert [r.seq for r in step.rows] == sorted(r.seq for r in step.rows)


@given(scenes())
def test_everybody_on_an_id_progresses(scene: tuple[list[Candidate], Limits]) -> None:
    """Each sequence that has or gets an id computes at least one token, at most what it has left;
    one that is computed alone does so every other step, and nobody else in that step."""
    candidates, limits = scene
    mixed, single = plan(candidates, limits), plan(candidates, limits, alone=True)
    live = after(candidates, mixed)
    solo = {key for key, c in live.items() if c.alone}
    assert {r.key for r in single.rows} == (solo or live.keys())
    if solo != live.keys():
        assert {r.key for r in mixed.rows} == live.keys() - solo
    for step in (mixed, single):
        assert all(1 <= r.count <= live[r.key].left for r in step.rows)
        assert step.alone == bool(solo & {r.key for r in step.rows})


@given(scenes())
def test_ids_are_taken_lowest_first(scene: tuple[list[Candidate], Limits]) -> None:
    """Admissions get the lowest free ids of a class, so that the live ids stay dense; whoever is
    computed alone gets the highest, out of the way."""
    candidates, limits = scene
    step = plan(candidates, limits)
    before = {c.seq for c in candidates if c.seq is not None}
    classes = [[seq for seq in ids if seq not in before] for ids in limits.ids]
    lonely = {c.key for c in candidates if c.alone}
    for a in step.admit:
        if free := classes[limits.class_of(a.seq)]:
            assert a.seq == free.pop(-1 if a.key in lonely else 0)


@given(scenes())
def test_holes_are_filled_from_above(scene: tuple[list[Candidate], Limits]) -> None:
    """A move goes down to the lowest free id of its class; when moves are left, the shared ids of
    each are dense."""
    candidates, limits = scene
    step = plan(candidates, limits)
    assert len(step.move) <= limits.moves
    live = after(candidates, step)
    seqs = {a.key: a.seq for a in step.admit}
    for move in step.move:
        seq = live[move.key].seq
        assert seq is not None
        assert move.seq < seq
        assert limits.class_of(move.seq) == limits.class_of(seq)
        assert move.key not in seqs
        assert not live[move.key].alone
    if len(step.move) < limits.moves and not step.admit and not step.alone:
        taken = {r.seq for r in step.rows} | {c.seq for c in live.values() if c.alone}
        for ids in limits.ids:
            rows = [r.seq for r in step.rows if r.seq in ids]
            assert not rows or all(seq in taken for seq in ids if seq < max(rows))


@given(scenes())
def test_admissions_go_by_lane_then_arrival(scene: tuple[list[Candidate], Limits]) -> None:
    """Of those who need a class, whoever enters comes before whoever still waits; only one that is
    computed alone can be passed by, while another has that turn."""
    candidates, limits = scene
    step = plan(candidates, limits)
    for klass in range(len(limits.classes)):
        own = {c.key: c for c in candidates if c.seq is None and c.klass == klass}
        waiting = sorted(own.values(), key=lambda c: (c.lane, c.order))
        entered = [a.key for a in step.admit if a.key in own]
        assert entered == [c.key for c in waiting[: len(entered)]]
    two = [
        Candidate(key=1, lane=Lane.BATCH, order=1, left=1, seq=0, alone=True),
        Candidate(key=2, lane=Lane.BATCH, order=2, left=1, alone=True),
        Candidate(key=3, lane=Lane.BATCH, order=3, left=1),
    ]
    assert [a.key for a in plan(two, Limits(slots=3, rows=3)).admit] == [3]


@given(scenes())
def test_headroom_stays_free_of_batch_lines(scene: tuple[list[Candidate], Limits]) -> None:
    """Nobody below INTERACTIVE enters into the headroom of a class, yet one id of each is always
    open to them."""
    candidates, limits = scene
    step = plan(candidates, limits)
    live = after(candidates, step)
    admitted = {a.key for a in step.admit}
    seqs = {c.key: c.seq for c in candidates} | {a.key: a.seq for a in step.admit}
    for ids in limits.ids:
        behind = [c for c in live.values() if c.lane is not Lane.INTERACTIVE and seqs[c.key] in ids]
        if any(c.key in admitted for c in behind):
            assert len(behind) <= max(1, len(ids) - limits.headroom)
    if not live:
        assert not candidates


@given(scenes())
def test_interactive_waits_only_for_interactive(scene: tuple[list[Candidate], Limits]) -> None:
    """An INTERACTIVE sequence that gets no id finds every id with enough room taken by its like."""
    candidates, limits = scene
    step = plan(candidates, limits)
    live = after(candidates, step)
    seqs = {c.key: c.seq for c in candidates} | {a.key: a.seq for a in step.admit}
    lanes = {seqs[key]: c.lane for key, c in live.items()}
    for c in candidates:
        if c.lane is Lane.INTERACTIVE and c.key not in live:
            for ids in limits.ids[c.klass :]:
                assert all(lanes.get(seq) is Lane.INTERACTIVE for seq in ids)


@given(scenes())
def test_a_line_waits_only_for_ids_with_room(scene: tuple[list[Candidate], Limits]) -> None:
    """Whoever below INTERACTIVE gets no id finds its class and all longer ones full up to the
    headroom."""
    candidates, limits = scene
    step = plan(candidates, limits)
    live = after(candidates, step)
    seqs = {c.key: c.seq for c in candidates} | {a.key: a.seq for a in step.admit}
    waiting = [c for c in candidates if c.key not in live and c.key not in step.displace]
    solo = any(c.alone for c in live.values())
    for c in waiting:
        if c.lane is Lane.INTERACTIVE or (c.alone and solo):
            continue
        for klass, ids in enumerate(limits.ids):
            here = [other for key, other in live.items() if seqs[key] in ids]
            behind = sum(other.lane is not Lane.INTERACTIVE for other in here)
            room = len(ids) > len(here) and behind < max(1, len(ids) - limits.headroom)
            assert klass < c.klass or not room


@given(scenes())
def test_an_id_is_lent_only_while_nobody_needs_it(scene: tuple[list[Candidate], Limits]) -> None:
    """When a line gets an id of a longer class than it needs, no line of its lane that does need
    that class is left waiting."""
    candidates, limits = scene
    step = plan(candidates, limits)
    by_key = {c.key: c for c in candidates}
    entered = {a.key for a in step.admit}
    for a in step.admit:
        c, klass = by_key[a.key], limits.class_of(a.seq)
        if c.lane is not Lane.INTERACTIVE and klass > c.klass:
            assert not any(
                w.seq is None and w.key not in entered and not w.alone
                for w in candidates
                if w.klass == klass and w.lane <= c.lane
            )


@given(scenes())
def test_only_interactive_displaces_and_only_when_full(
    scene: tuple[list[Candidate], Limits],
) -> None:
    """A displaced sequence is the youngest of the lowest lane of its class, and its id is used at
    once."""
    candidates, limits = scene
    step = plan(candidates, limits)
    displaced = [c for c in candidates if c.key in step.displace]
    stayed = [c for c in candidates if c.seq is not None and c.key not in step.displace]
    for c in displaced:
        assert c.lane is not Lane.INTERACTIVE
        if not c.alone:
            assert c.seq is not None
            ids = limits.ids[limits.class_of(c.seq)]
            assert all((s.lane, s.order) < (c.lane, c.order) for s in stayed if s.seq in ids)
            assert c.seq in {a.seq for a in step.admit}
    lanes = {c.key: c.lane for c in candidates}
    entered = [a for a in step.admit if lanes[a.key] is Lane.INTERACTIVE]
    assert len(displaced) <= len(entered)


def test_interactive_alone_takes_the_turn_of_a_line_that_is_alone() -> None:
    """Only one is computed alone at a time, and a person goes first."""
    line = Candidate(key=1, lane=Lane.BATCH, order=1, left=1, decoding=True, seq=3, alone=True)
    chat = Candidate(key=2, lane=Lane.INTERACTIVE, order=2, left=9, alone=True)
    step = plan([line, chat], Limits(slots=4, rows=516))
    assert (step.displace, [(r.key, r.seq) for r in step.rows]) == ((1,), [(2, 3)])


@given(scenes())
def test_prompts_stay_within_their_budget(scene: tuple[list[Candidate], Limits]) -> None:
    """Prompt rows beyond one each respect the budget, the small one beside INTERACTIVE."""
    candidates, limits = scene
    step = plan(candidates, limits)
    live = after(candidates, step)
    if step.alone:
        return
    prompts = [r for r in step.rows if live[r.key].left > 1]
    floor = len(prompts)
    total = sum(r.count for r in prompts)
    assert total <= max(floor, limits.prefill, limits.prefill_shared, limits.prefill_lines)
    talking = any(c.lane is Lane.INTERACTIVE and (c.decoding or c.alone) for c in live.values())
    if talking:
        assert total <= max(floor, limits.prefill_shared)
    if any(c.lane is Lane.INTERACTIVE for c in live.values()):
        assert total <= max(floor, limits.prefill, limits.prefill_shared)
        lengthened = [
            r for r in prompts if r.count > 1 and live[r.key].lane is not Lane.INTERACTIVE
        ]
        assert sum(r.count for r in lengthened) <= max(floor, limits.prefill_shared)


@given(scenes())
def test_a_hurried_step_is_for_interactive_prompts(scene: tuple[list[Candidate], Limits]) -> None:
    """It moves nobody out of the way that another step would not, and leaves out only others; where
    there is no such prompt to compute, it is the step that it would have been anyway."""
    candidates, limits = scene
    step, calm = plan(candidates, limits, hurry=True), plan(candidates, limits)
    assert (step.displace, step.admit, step.move) == (calm.displace, calm.admit, calm.move)
    there = after(candidates, step)
    if not step.hurried:
        assert step == calm
        return
    waited_for = [there[rows.key] for rows in step.rows]
    assert all(c.lane is Lane.INTERACTIVE for c in waited_for)
    assert any(not c.decoding for c in waited_for)
    left_out = there.keys() - {rows.key for rows in step.rows}
    assert any(not there[key].alone for key in left_out)
    assert all(there[key].alone or there[key].lane is not Lane.INTERACTIVE for key in left_out)
    assert not calm.hurried


def test_an_idle_engine_plans_nothing() -> None:
    """No candidates, no rows."""
    assert plan([], Limits(slots=4, rows=516)) == StepPlan()


def test_a_long_prompt_is_cut_and_shrinks_beside_a_conversation() -> None:
    """A batch prompt of 2,000 tokens takes 512 rows alone, and 128 beside somebody who reads."""
    long = Candidate(key=1, lane=Lane.BATCH, order=1, left=2000, seq=0)
    chat = Candidate(key=2, lane=Lane.INTERACTIVE, order=2, left=1, decoding=True, seq=1)
    limits = Limits(slots=4, rows=516)
    assert [r.count for r in plan([long], limits).rows] == [512]
    assert [r.count for r in plan([long, chat], limits).rows] == [128, 1]


def test_an_interactive_prompt_uses_the_full_budget() -> None:
    """Its own first token is what it waits for: only what is behind it is held back."""
    chat = Candidate(key=1, lane=Lane.INTERACTIVE, order=9, left=400, seq=1)
    line = Candidate(key=2, lane=Lane.BATCH, order=1, left=400, seq=0)
    rows = plan([chat, line], Limits(slots=4, rows=516)).rows
    assert [(r.key, r.count) for r in rows] == [(2, 1), (1, 400)]


def test_lines_among_themselves_have_a_budget_of_their_own() -> None:
    """Nobody feels their step, which is given up when somebody comes; from then on it is less."""
    lines = [Candidate(key=k, lane=Lane.BATCH, order=k, left=700, seq=k) for k in (0, 1)]
    limits = Limits(slots=4, rows=1028, prefill_lines=1024)
    assert [r.count for r in plan(lines, limits).rows] == [700, 324]
    chat = Candidate(key=9, lane=Lane.INTERACTIVE, order=9, left=200, seq=2)
    rows = plan([*lines, chat], limits).rows
    assert [r.count for r in rows] == [1, 1, 200]


def test_a_full_engine_makes_way_for_interactive() -> None:
    """The youngest batch line gives up its id; the job and the older line keep theirs."""
    live = [
        Candidate(key=1, lane=Lane.BATCH, order=1, left=1, decoding=True, seq=0),
        Candidate(key=2, lane=Lane.BATCH, order=3, left=1, decoding=True, seq=1),
        Candidate(key=3, lane=Lane.JOB, order=5, left=1, decoding=True, seq=2),
    ]
    chat = Candidate(key=4, lane=Lane.INTERACTIVE, order=6, left=10)
    step = plan([*live, chat], Limits(slots=3, rows=515, headroom=1))
    assert step.displace == (2,)
    assert [(a.key, a.seq) for a in step.admit] == [(4, 1)]


def test_a_short_sequence_borrows_a_long_id_that_nobody_waits_for() -> None:
    """With the short class full, it takes a free id of the long one; where a long sequence needs
    that, somebody of the own class makes way for a person."""
    limits = Limits(
        slots=4, rows=516, headroom=1,
        split=(SlotClass(slots=2, context=100), SlotClass(slots=2, context=1000)),
    )  # fmt: skip
    short = [
        Candidate(key=1, lane=Lane.BATCH, order=1, left=1, decoding=True, seq=0),
        Candidate(key=2, lane=Lane.BATCH, order=2, left=1, decoding=True, seq=1),
    ]
    long = Candidate(key=3, lane=Lane.BATCH, order=3, left=1, decoding=True, seq=2, klass=1)
    more = Candidate(key=4, lane=Lane.BATCH, order=4, left=9)
    assert [(a.key, a.seq) for a in plan([*short, more], limits).admit] == [(4, 2)]
    assert plan([*short, long, more], limits).admit == ()
    chat = Candidate(key=5, lane=Lane.INTERACTIVE, order=5, left=9)
    assert [(a.key, a.seq) for a in plan([*short, long, chat], limits).admit] == [(5, 3)]
    waits = Candidate(key=6, lane=Lane.INTERACTIVE, order=6, left=9, klass=1)
    step = plan([*short, long, chat, waits], limits)
    assert [(a.key, a.seq) for a in step.admit] == [(6, 3), (5, 1)]
    assert step.displace == (2,)
