"""What needs a CUDA device: run with ``-m gpu`` on a machine that has one."""

from __future__ import annotations

import pytest

from tidemill.native import HAVE_CORE

pytestmark = pytest.mark.gpu


def test_the_arena_is_pinned_and_keeps_what_is_parked() -> None:
    """States go out and come back through the two streams, several of them in flight."""
    assert HAVE_CORE
    from tidemill.native._core import SlotPool

    pool = SlotPool(slots=8, live=4, arena_bytes=1 << 22, arena="cuda")
    arena = pool.stats()["arena"]
    assert (arena["kind"], arena["pinned"]) == ("cuda", True)
    states = [bytes([k]) * (100_000 + k) for k in range(4)]
    handles = pool.reserve(4, 2)
    tickets = []
    for handle, state in zip(handles, states, strict=True):
        pool.stage(handle)
        assert pool.start(handle) is not None
        pool.activate(handle)
        tickets.append(pool.park(handle, state))
    for ticket in tickets:
        assert ticket is not None
        pool.wait(ticket)
    assert pool.stats()["states"]["PARKED"] == 4
    for handle, state in zip(handles, states, strict=True):
        back = bytearray(len(state))
        ticket = pool.resume(handle, back)
        assert ticket is not None
        pool.wait(ticket)
        assert back == state
        pool.finish(handle)
        pool.release(handle)
    pool.check()
    assert pool.stats()["arena"]["used"] == 0


@pytest.mark.llama
def test_a_sequence_is_copied_and_parked_bit_for_bit() -> None:
    """On the device, and to the host and back: the next log probabilities are the same numbers."""
    from llama_cpp import llama_cpp as C

    from tidemill.backends.llama.model import Model, silence
    from tidemill.backends.llama.native_stepper import stepper_class
    from tidemill.backends.llama.sampling import Chooser
    from tidemill.backends.llama.weights import resolve
    from tidemill.scheduler.steps import Chunk, Sampled
    from tidemill.types import Sampling

    assert C.llama_supports_gpu_offload(), "llama-cpp-python was built without CUDA"
    silence(4)
    model = Model(resolve("smollm2"), -1)
    kind, _ = stepper_class()
    stepper = kind(model, slots=4, context=256, threads=1, headroom=0)
    stepper.open()
    greedy = Chooser(model, Sampling(), logprobs=20)

    def step(seq: int, start: int, tokens: list[int]) -> list[Sampled]:
        chunk = Chunk(key=seq, seq=seq, start=start, tokens=tokens, chooser=greedy)
        seen = stepper.step([chunk])
        assert seen.fate == "done"
        return seen.sampled[seq]

    step(0, 0, [500 + k for k in range(100)])
    state = bytearray(stepper.state_size(0))
    assert stepper.save(0, memoryview(state)) > 0
    assert stepper.copy(0, 1)
    own = step(0, 100, [42])
    assert step(1, 100, [42]) == own
    assert stepper.load(2, memoryview(state))
    assert step(2, 100, [42]) == own
    greedy.close()
    stepper.close()
    model.close()
