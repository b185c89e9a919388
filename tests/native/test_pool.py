"""The slot pool, C++ and Python: what each verb does and what it refuses."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from tidemill import native as chosen
from tidemill.native import IllegalTransition, StaleHandle, State, model
from tidemill.native.slots import ALIGN, MOVES, Pool

IMPLEMENTATIONS: dict[str, Any] = {"chosen": chosen, "model": model}


@pytest.fixture(params=IMPLEMENTATIONS)
def native(request: pytest.FixtureRequest) -> Any:
    """What the package chose, C++ where it was built, and the model: ``SlotPool`` and ``Gate``."""
    return IMPLEMENTATIONS[request.param]


def staged(pool: Pool, klass: int = 2) -> int:
    [handle] = pool.reserve(1, klass)
    pool.stage(handle)
    return handle


def active(pool: Pool, klass: int = 2, nbytes: int = 0) -> int:
    handle = staged(pool, klass)
    assert pool.start(handle) is not None
    pool.activate(handle)
    pool.weigh(handle, nbytes)
    return handle


def parked(pool: Pool, data: bytes, klass: int = 2) -> int:
    handle = active(pool, klass)
    view = pool.park_open(handle, len(data))
    assert view is not None
    view[:] = data
    pool.park_close(handle, len(data))
    return handle


def finished(pool: Pool) -> int:
    handle = staged(pool)
    assert pool.finish(handle)
    return handle


def test_a_group_is_reserved_whole_or_not_at_all(native: Any) -> None:
    """Eight of ten slots are taken; three more do not fit and nothing of them is taken."""
    pool = native.SlotPool(slots=10)
    assert len(pool.reserve(8, 0)) == 8
    assert pool.reserve(3, 0) == []
    assert pool.stats()["free"] == 2
    assert len(pool.reserve(2, 0)) == 2
    with pytest.raises(ValueError, match="at least one slot"):
        pool.reserve(0, 0)
    with pytest.raises(ValueError, match="no class 3 among 3"):
        pool.reserve(1, 3)
    pool.check()


def test_a_released_handle_is_stale_although_its_slot_is_in_use_again(native: Any) -> None:
    """The generation tells the old request from the new one in the same slot."""
    pool = native.SlotPool(slots=1)
    [old] = pool.reserve(1, 0)
    assert pool.finish(old)
    pool.release(old)
    [new] = pool.reserve(1, 0)
    assert new & 0xFFFFFFFF == old & 0xFFFFFFFF
    assert new >> 32 == (old >> 32) + 1
    for handle in (old, 0, new + 1):
        with pytest.raises(StaleHandle):
            pool.state(handle)


def test_every_verb_leaves_from_its_own_states_and_refuses_the_others(native: Any) -> None:
    """Six verbs from five states each: a refusal names the state and changes nothing."""
    verbs: dict[str, tuple[Any, set[State], State]] = {
        "stage": (lambda p, h: p.stage(h), {State.RESERVED}, State.STAGED),
        "start": (lambda p, h: p.start(h), {State.STAGED}, State.PREFILL),
        "activate": (lambda p, h: p.activate(h), {State.PREFILL}, State.ACTIVE),
        "park": (lambda p, h: p.park_open(h, 8), {State.PREFILL, State.ACTIVE}, State.DRAINING),
        "resume": (lambda p, h: p.resume_open(h), {State.PARKED}, State.DRAINING),
        "release": (lambda p, h: p.release(h), {State.DONE}, State.FREE),
    }
    make: dict[State, Any] = {
        State.RESERVED: lambda p: p.reserve(1, 0)[0],
        State.STAGED: staged,
        State.ACTIVE: active,
        State.PARKED: lambda p: parked(p, b"12345678"),
        State.DONE: finished,
    }
    for state, build in make.items():
        for name, (verb, leaves, to) in verbs.items():
            pool = native.SlotPool(slots=4, live=2, arena_bytes=4096)
            handle = build(pool)
            assert pool.state(handle) == state
            if state in leaves:
                assert to in MOVES[state]
                verb(pool, handle)
            else:
                with pytest.raises(IllegalTransition, match=state.name):
                    verb(pool, handle)
                assert pool.state(handle) == state, name
            pool.check()


def test_the_lowest_free_sequence_id_is_given_and_holes_are_closed(native: Any) -> None:
    """Ids 0, 1, 2; when 0 goes, the highest moves down to it and the rows stay ascending."""
    pool = native.SlotPool(slots=8, live=3)
    a, b, c = (active(pool) for _ in range(3))
    assert pool.start(staged(pool)) is None
    assert [pool.seq(h) for h in (a, b, c)] == [0, 1, 2]
    pool.finish(a)
    assert pool.seq(a) is None
    assert pool.move(c) == 0
    assert pool.move(b) is None
    assert pool.live() == [c, b]
    pool.check()


def test_a_sequence_id_can_be_named(native: Any) -> None:
    """A planner that has its own reasons names the id: it gets that one or none, never another."""
    pool = native.SlotPool(slots=8, live=3, arena_bytes=4096)
    first, second = staged(pool), staged(pool)
    assert pool.start(first, 2) == 2
    assert pool.start(second, 2) is None
    assert pool.state(second) == State.STAGED
    assert pool.start(second) == 0
    assert pool.move(second, 2) is None
    assert pool.move(second, 1) == 1
    assert pool.move(first, 0) == 0
    assert pool.live() == [first, second]
    with pytest.raises(ValueError, match="no sequence id 3 among 3"):
        pool.move(first, 3)
    waits = parked(pool, b"state")
    assert pool.resume_open(waits, 0) is None
    seq, view = pool.resume_open(waits, 2)
    assert (seq, bytes(view)) == (2, b"state")
    pool.check()


def test_a_parked_state_can_be_copied_and_kept(native: Any) -> None:
    """The id was needed for the copy only; what is parked can be read again."""
    pool = native.SlotPool(slots=2, live=1, arena_bytes=4096)
    handle = parked(pool, b"state")
    for _ in range(2):
        _, view = pool.resume_open(handle)
        assert bytes(view) == b"state"
        pool.resume_keep(handle)
        assert pool.state(handle) == State.PARKED
        assert pool.seq(handle) is None
        pool.check()
    with pytest.raises(IllegalTransition, match="not lent for it"):
        pool.resume_keep(handle)
    pool.resume_open(handle)
    assert pool.finish(handle) is False
    pool.resume_keep(handle)
    assert pool.state(handle) == State.DONE
    assert pool.stats()["arena"]["used"] == 0
    pool.check()


def test_who_waits_is_served_by_class_and_then_by_age(native: Any) -> None:
    """A requeued or parked slot keeps its age, and so its place before younger ones."""
    pool = native.SlotPool(slots=8, live=2, arena_bytes=4096)
    old, young, urgent = staged(pool, 2), staged(pool, 2), staged(pool, 0)
    assert pool.head() == urgent
    assert pool.head(2) == old
    assert pool.head(1) is None
    pool.start(old)
    assert pool.head(2) == young
    pool.requeue(old)
    assert pool.head(2) == old
    pool.lift(young, 1)
    pool.finish(urgent)
    assert pool.head() == young
    assert pool.waiting() == 2
    assert pool.waiting(1) == 1
    pool.check()


def test_the_victim_is_the_youngest_of_the_lowest_class_that_fits(native: Any) -> None:
    """Nobody of the same or a higher class makes way, and nobody whose state has no room."""
    pool = native.SlotPool(slots=8, live=8, arena_bytes=4 * ALIGN)
    interactive = active(pool, 0, nbytes=1)
    old, young, huge = (active(pool, 2, nbytes=n) for n in (1, ALIGN, 4 * ALIGN + 1))
    job = active(pool, 1, nbytes=1)
    assert pool.victim(0) == young
    pool.finish(young)
    assert pool.victim(0) == old
    assert pool.victim(1) == old
    pool.finish(old)
    assert pool.victim(0) == job
    assert pool.victim(1) is None
    pool.weigh(huge, 4 * ALIGN)
    assert pool.victim(1) == huge
    assert pool.state(interactive) == State.ACTIVE


def test_a_parked_state_comes_back_byte_for_byte_and_the_phase_with_it(native: Any) -> None:
    """A sequence parked in mid-prefill goes on with its prefill."""
    pool = native.SlotPool(slots=4, live=1, arena_bytes=1 << 16)
    handle = staged(pool)
    pool.start(handle)
    data = bytes(range(256)) * 40
    ticket = pool.park(handle, data)
    assert pool.wait(ticket) == [handle]
    assert pool.state(handle) == State.PARKED
    assert pool.seq(handle) is None
    assert pool.parked(handle) == len(data)
    out = bytearray(len(data))
    with pytest.raises(ValueError, match="10240 bytes"):
        pool.resume(handle, bytearray(len(data) - 1))
    assert pool.wait(pool.resume(handle, out)) == [handle]
    assert bytes(out) == data
    assert pool.state(handle) == State.PREFILL
    stats = pool.stats()
    assert (stats["parks"], stats["resumes"], stats["arena"]["used"]) == (1, 1, 0)
    pool.check()


def test_a_lent_block_shrinks_to_what_was_written(native: Any) -> None:
    """Bytes that the state did not need are free again at once."""
    pool = native.SlotPool(slots=4, live=2, arena_bytes=8 * ALIGN)
    handle = active(pool)
    view = pool.park_open(handle, 8 * ALIGN)
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    assert address % 4096 == 0
    view[:3] = b"abc"
    assert pool.state(handle) == State.DRAINING
    with pytest.raises(ValueError, match="were not lent"):
        pool.park_close(handle, 8 * ALIGN + 1)
    pool.park_close(handle, 3)
    assert pool.stats()["arena"]["used"] == ALIGN
    seq, back = pool.resume_open(handle)
    assert (seq, bytes(back)) == (0, b"abc")
    pool.resume_close(handle)
    assert pool.state(handle) == State.ACTIVE
    pool.check()


def test_a_state_that_could_not_be_saved_or_restored_is_not_lost(native: Any) -> None:
    """Nothing saved: it goes on. Not restorable: it is staged again, to be computed anew."""
    pool = native.SlotPool(slots=4, live=2, arena_bytes=4096)
    handle = active(pool)
    pool.park_open(handle, 100)
    pool.park_close(handle, 0)
    assert pool.state(handle) == State.ACTIVE
    assert pool.seq(handle) == 0
    other = parked(pool, b"useless")
    pool.resume_open(other)
    pool.resume_close(other, False)
    assert pool.state(other) == State.STAGED
    assert pool.parked(other) == 0
    with pytest.raises(IllegalTransition, match="not lent for it"):
        pool.resume_close(other)
    pool.check()


def test_a_full_arena_refuses_and_says_so(native: Any) -> None:
    """The sequence goes on; room that comes back in pieces becomes one piece again."""
    pool = native.SlotPool(slots=8, live=4, arena_bytes=3 * ALIGN)
    first, second, third = (parked(pool, b"x" * ALIGN) for _ in range(3))
    more = active(pool)
    assert pool.park(more, b"y") is None
    assert pool.park_open(more, 1) is None
    assert pool.state(more) == State.ACTIVE
    assert pool.stats()["refused"] == 2
    pool.finish(first)
    pool.finish(third)
    assert pool.stats()["arena"]["largest"] == ALIGN
    pool.requeue(second)
    assert pool.stats()["arena"]["largest"] == 3 * ALIGN
    pool.check()


def test_a_copy_that_is_held_back_keeps_its_slot_draining(native: Any) -> None:
    """Id and block stay taken until the gate opens and the copy has ended; copies end in order."""
    pool = native.SlotPool(slots=4, live=2, arena_bytes=1 << 16)
    first, second = active(pool), active(pool)
    gate = native.Gate()
    source = bytearray(b"a" * 1000)
    pool.park(first, source, gate)
    ticket = pool.park(second, b"b" * 1000)
    assert pool.poll() == []
    assert pool.state(first) == State.DRAINING
    assert pool.start(staged(pool)) is None
    with pytest.raises(IllegalTransition):
        pool.requeue(first)
    assert pool.stats()["in_flight"] == 2
    pool.check()
    source[:] = b"c" * 1000
    opener = threading.Timer(0.01, gate.open)
    opener.start()
    assert pool.wait(ticket) == [first, second]
    opener.join()
    _, view = pool.resume_open(first)
    assert bytes(view) == b"c" * 1000
    pool.check()


def test_a_slot_finished_during_its_copy_is_done_when_the_copy_ends(native: Any) -> None:
    """A cancelled request frees its id and its block, but never under a running copy."""
    pool = native.SlotPool(slots=4, live=1, arena_bytes=4096)
    handle = active(pool)
    gate = native.Gate()
    ticket = pool.park(handle, b"state", gate)
    assert pool.finish(handle) is False
    assert pool.state(handle) == State.DRAINING
    with pytest.raises(IllegalTransition, match="of a finished slot"):
        pool.finish(handle)
    gate.open()
    assert pool.wait(ticket) == [handle]
    assert pool.state(handle) == State.DONE
    pool.release(handle)
    assert pool.stats()["arena"]["used"] == 0
    pool.check()


def test_states_are_copied_from_and_to_addresses(native: Any) -> None:
    """What ctypes has in hand needs no Python buffer."""
    pool = native.SlotPool(slots=2, live=1, arena_bytes=4096)
    handle = active(pool)
    source = ctypes.create_string_buffer(b"twelve bytes", 12)
    target = ctypes.create_string_buffer(12)
    pool.wait(pool.park_at(handle, ctypes.addressof(source), 12))
    pool.wait(pool.resume_at(handle, ctypes.addressof(target), 12))
    assert target.raw == b"twelve bytes"


def test_an_event_or_an_arena_that_is_not_there_is_refused_with_a_reason(native: Any) -> None:
    """Nothing is silently weaker than what was asked for."""
    pool = native.SlotPool(slots=2, live=1, arena_bytes=4096, arena="host")
    handle = active(pool)
    with pytest.raises(ValueError, match="needs the CUDA arena"):
        pool.park(handle, b"state", 12345)
    with pytest.raises(ValueError, match="auto, host or cuda"):
        native.SlotPool(arena="disk")
    for bad in ({"slots": 0}, {"live": 257}, {"classes": 9}):
        with pytest.raises(ValueError, match="must be 1 to"):
            native.SlotPool(**bad)
    with pytest.raises(ValueError, match="no ticket"):
        pool.wait(2)


def test_the_default_pool_has_room_for_ten_thousand_requests(native: Any) -> None:
    """10,240 logical slots, of which 256 are live at once; all come and go, nothing is left."""
    pool = native.SlotPool(live=256)
    group = pool.reserve(10_240, 2)
    for handle in group:
        pool.stage(handle)
    served = []
    while (handle := pool.head()) is not None:
        while handle is not None and pool.start(handle) is not None:
            handle = pool.head()
        for live in pool.live():
            served.append(live)
            assert pool.finish(live)
            pool.release(live)
    assert served == group
    assert pool.stats()["free"] == 10_240
    pool.check()
