"""The slot pool in use (C++ where it was built) and the Python model, against each other."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tidemill import native
from tidemill.native import IllegalTransition, StaleHandle, State, model
from tidemill.native.slots import ALIGN, MOVES

PICK = st.integers(0, 1 << 16)
CLASS = st.integers(0, 2)
SEQ = st.none() | st.integers(0, 5)


class TwoPools(RuleBasedStateMachine):
    """Every rule is applied to both pools; their answers, states and accounts must be equal."""

    steps = 0

    @initialize(slots=st.integers(1, 24), live=st.integers(1, 5), blocks=st.integers(0, 12))
    def build(self, slots: int, live: int, blocks: int) -> None:
        size: dict[str, Any] = {"slots": slots, "live": live, "arena_bytes": blocks * ALIGN + 3}
        self.pools: tuple[Any, Any] = (native.SlotPool(**size), model.SlotPool(**size))
        self.handles: list[int] = []
        self.gone: list[int] = []
        self.gates: list[tuple[Any, Any]] = []
        self.tickets: list[int] = []
        self.out: dict[int, tuple[bytearray, bytearray]] = {}
        self.before: dict[int, State] = {}

    # --- helpers

    def both(self, verb: str, *args: Any) -> Any:
        answers: list[Any] = []
        for pool in self.pools:
            try:
                answers.append(getattr(pool, verb)(*args))
            except (StaleHandle, IllegalTransition, ValueError) as exc:
                answers.append((type(exc), str(exc)))
        core, oracle = (
            bytes(a) if isinstance(a, memoryview) else a for a in map(self._plain, answers)
        )
        assert core == oracle, (verb, args)
        return core

    @staticmethod
    def _plain(answer: Any) -> Any:
        if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], memoryview):
            return answer[0], bytes(answer[1])
        return answer

    def pick(self, n: int, *states: State) -> int:
        """A handle, mostly one that the verb can use; now and then any, or one that is gone."""
        fit = [h for h in self.handles if not states or self.pools[1].state(h) in states]
        if n % 13 == 0 or not fit:
            fit = self.handles + self.gone + [12345]
        return fit[n % len(fit)]

    # --- the life of a slot

    @rule(n=st.integers(1, 5), klass=CLASS)
    def reserve(self, n: int, klass: int) -> None:
        self.handles += self.both("reserve", n, klass)

    @rule(n=PICK)
    def stage(self, n: int) -> None:
        self.both("stage", self.pick(n, State.RESERVED))

    @rule(n=PICK, seq=SEQ)
    def start(self, n: int, seq: int | None) -> None:
        self.both("start", self.pick(n, State.STAGED), seq)

    @rule()
    def start_head(self) -> None:
        if (handle := self.both("head")) is not None and self.both("state", handle) == State.STAGED:
            self.both("start", handle)

    @rule(n=PICK, weight=st.integers(0, 6 * ALIGN))
    def weigh(self, n: int, weight: int) -> None:
        self.both("weigh", self.pick(n, State.PREFILL, State.ACTIVE), weight)

    @rule(n=PICK)
    def activate(self, n: int) -> None:
        self.both("activate", self.pick(n, State.PREFILL))

    @rule(n=PICK)
    def requeue(self, n: int) -> None:
        self.both("requeue", self.pick(n, State.ACTIVE, State.PARKED, State.PREFILL))

    @rule(n=PICK)
    def finish(self, n: int) -> None:
        self.both("finish", self.pick(n))

    @rule(n=PICK)
    def release(self, n: int) -> None:
        handle = self.pick(n, State.DONE)
        if self.both("release", handle) is None:
            self.handles.remove(handle)
            self.gone.append(handle)

    @rule(n=PICK, klass=CLASS)
    def lift(self, n: int, klass: int) -> None:
        self.both("lift", self.pick(n), klass)

    @rule(n=PICK, seq=SEQ)
    def move(self, n: int, seq: int | None) -> None:
        self.both("move", self.pick(n, State.PREFILL, State.ACTIVE), seq)

    # --- park and resume

    @rule(n=PICK, nbytes=st.integers(1, 5 * ALIGN), held=st.booleans())
    def park(self, n: int, nbytes: int, held: bool) -> None:
        self.copy("park", self.pick(n, State.ACTIVE, State.PREFILL), nbytes, held)

    @rule(klass=CLASS, nbytes=st.integers(1, 5 * ALIGN))
    def park_victim(self, klass: int, nbytes: int) -> None:
        if (handle := self.both("victim", klass)) is not None:
            self.copy("park", handle, nbytes, False)

    @rule(n=PICK, held=st.booleans())
    def resume(self, n: int, held: bool) -> None:
        handle = self.pick(n, State.PARKED)
        nbytes = self.both("parked", handle)
        self.copy("resume", handle, nbytes if isinstance(nbytes, int) else 9, held)

    def copy(self, verb: str, handle: int, nbytes: int, held: bool) -> None:
        """Submit a copy; one that is not held back is waited for, so that both saw its end."""
        gates = (native.Gate(), model.Gate())
        answers = []
        data = [bytearray(random.Random(handle).randbytes(nbytes)) for _ in range(2)]
        if verb == "resume":
            data = [bytearray(nbytes), bytearray(nbytes)]
        for pool, gate, buffer in zip(self.pools, gates, data, strict=True):
            try:
                answers.append(getattr(pool, verb)(handle, buffer, gate))
            except (StaleHandle, IllegalTransition, ValueError) as exc:
                answers.append((type(exc), str(exc)))
        assert answers[0] == answers[1]
        if not isinstance(answers[0], int):
            return
        self.gates.append(gates)
        self.tickets.append(answers[0])
        if verb == "resume":
            self.out[answers[0]] = (data[0], data[1])
        if not held:
            self.land()

    @rule()
    def land(self) -> None:
        """Open all gates and wait for the last copy of both lanes."""
        for pair in self.gates:
            for gate in pair:
                gate.open()
        settled: list[list[int]] = [[], []]
        for ticket in self.tickets:
            for k, pool in enumerate(self.pools):
                settled[k] += pool.wait(ticket)
        assert sorted(settled[0]) == sorted(settled[1])
        for core, oracle in self.out.values():
            assert core == oracle
        self.gates.clear()
        self.tickets.clear()
        self.out.clear()

    @precondition(lambda self: self.gates)
    @rule()
    def poll(self) -> None:
        """No gate of the copies in flight is open, so nothing has ended."""
        assert self.both("poll") == []

    @rule(n=PICK, nbytes=st.integers(0, 5 * ALIGN))
    def park_open(self, n: int, nbytes: int) -> None:
        handle = self.pick(n, State.ACTIVE, State.PREFILL)
        views: list[Any] = []
        for pool in self.pools:
            try:
                views.append(pool.park_open(handle, nbytes))
            except (StaleHandle, IllegalTransition, ValueError) as exc:
                views.append((type(exc), str(exc)))
        if isinstance(views[0], memoryview):
            assert len(views[0]) == len(views[1]) == nbytes
            for view in views:
                view[:] = random.Random(handle).randbytes(nbytes)
        else:
            assert views[0] == views[1]

    @rule(n=PICK, used=st.integers(0, 5 * ALIGN))
    def park_close(self, n: int, used: int) -> None:
        self.both("park_close", self.pick(n, State.DRAINING), used)

    @rule(n=PICK, seq=SEQ)
    def resume_open(self, n: int, seq: int | None) -> None:
        self.both("resume_open", self.pick(n, State.PARKED), seq)

    @rule(n=PICK, ok=st.booleans())
    def resume_close(self, n: int, ok: bool) -> None:
        self.both("resume_close", self.pick(n, State.DRAINING), ok)

    @rule(n=PICK)
    def resume_keep(self, n: int) -> None:
        self.both("resume_keep", self.pick(n, State.DRAINING))

    # --- after every step

    @invariant()
    def equal(self) -> None:
        """Both add up, agree on everything that can be seen, and moved only along the table."""
        if not hasattr(self, "pools"):
            return
        TwoPools.steps += 1
        for pool in self.pools:
            pool.check()
        core, oracle = (pool.stats() for pool in self.pools)
        for stats in (core, oracle):
            for name in ("kind", "note", "pinned"):
                del stats["arena"][name]
        assert core == oracle
        assert core["free"] + core["used"] == core["slots"]
        assert self.both("live") is not None
        now = {}
        for handle in self.handles:
            now[handle] = State(self.both("state", handle))
            for look in ("seq", "klass", "age", "parked"):
                self.both(look, handle)
        for handle, state in now.items():
            was = self.before.get(handle, State.FREE)
            assert state is was or reachable(was, state), (was, state)
        self.before = now
        for klass in (None, 0, 1, 2):
            self.both("head", klass)
            self.both("waiting", klass)
        for klass in range(3):
            self.both("victim", klass)


def reachable(frm: State, to: State) -> bool:
    """One rule makes one move, or two where a copy begins and ends within it."""
    return to in MOVES[frm] or (
        (State.DRAINING in MOVES[frm] and to in MOVES[State.DRAINING]) or to is State.FREE
    )


def test_the_two_pools_agree_over_ten_thousand_steps() -> None:
    """300 walks of up to 60 rules, each rule followed by a comparison of everything visible."""
    TwoPools.steps = 0
    run_state_machine_as_test(
        TwoPools,
        settings=settings(
            max_examples=300,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert TwoPools.steps >= 10_000
