"""Two contexts on one model: what one computed goes on in the other, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from tidemill.backends.llama.model import Model
from tidemill.backends.llama.native_stepper import stepper_class
from tidemill.backends.llama.sampling import Chooser
from tidemill.backends.llama.stepper import Stepper
from tidemill.errors import TidemillError
from tidemill.scheduler.loop import Chunk, Loop, Sampled, Ticket
from tidemill.scheduler.plan import SlotClass
from tidemill.scheduler.slots import Slots
from tidemill.types import FinishReason, Lane, Sampling

pytestmark = pytest.mark.llama

PROMPT = "A tide mill is a water mill that the sea drives, and it turns twice a day. "
SHORT, LONG = 256, 512


def open_stepper(kind: type[Stepper], model: Model) -> Stepper:
    """Ids 0 to 4 of 256 tokens, ids 5 and 6 of 512."""
    stepper = kind(
        model,
        slots=5,
        context=SHORT,
        threads=1,
        headroom=0,
        longer=(SlotClass(slots=2, context=LONG),),
    )
    stepper.open()
    return stepper


@pytest.fixture(scope="module")
def stepper(model: Model) -> Iterator[Stepper]:
    """The Python stepper, whose choosers see the logits."""
    stepper = open_stepper(Stepper, model)
    yield stepper
    stepper.close()


class Watching(Chooser):
    """A greedy chooser that keeps the logits it chose from."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, Sampling())
        self.greedy = False
        self.seen: list[NDArray[np.float32]] = []

    def choose(self, logits: NDArray[np.float32]) -> int | None:
        """Copies: the engine reuses its memory."""
        self.seen.append(logits.copy())
        return super().choose(logits)


class Kept:
    """The tokens of an answer, and how it ended."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.reason: FinishReason | None = None

    def reused(self, tokens: int) -> None:
        """Of no interest here."""

    def take(self, sampled: Sampled) -> FinishReason | None:
        """Noted."""
        self.tokens.append(sampled.token)
        return None

    def finish(self, reason: FinishReason) -> None:
        """Noted."""
        self.reason = reason

    def fail(self, error: TidemillError) -> None:
        """Fails the test."""
        raise error

    def close(self) -> None:
        """The end."""


def next_logits(
    stepper: Stepper, model: Model, seq: int, start: int, tokens: list[int]
) -> NDArray[np.float32]:
    """What follows after these tokens at this position."""
    watching = Watching(model)
    chunk = Chunk(key=seq, seq=seq, start=start, tokens=tokens, chooser=watching)
    assert stepper.step([chunk]).fate == "done"
    return watching.seen[0]


def test_another_context_computes_the_same_numbers(stepper: Stepper, model: Model) -> None:
    """The length of a context, and where in it an id is, change nothing."""
    tokens = model.tokenize(PROMPT * 6, special=True, parse=False)
    first, second = (next_logits(stepper, model, seq, 0, tokens) for seq in (1, 6))
    for seq in (1, 6):
        stepper.forget(seq)
    assert np.array_equal(first, second)


def test_a_state_goes_on_in_another_context_bit_identically(stepper: Stepper, model: Model) -> None:
    """Parked out of one and resumed into the other, and copied directly, from any id to any; what
    was saved is not changed by it."""
    tokens = model.tokenize(PROMPT * 4, special=True, parse=False)
    n = len(tokens) - 1
    for source, to in ((0, 6), (1, 5), (4, 5), (5, 0), (6, 3), (2, 3), (5, 6)):
        next_logits(stepper, model, source, 0, tokens[:n])
        saved = bytearray(stepper.state_size(source))
        assert stepper.save(source, memoryview(saved)) == len(saved)
        before = bytes(saved)
        assert stepper.load(to, memoryview(saved))
        assert bytes(saved) == before
        stepper.forget(to)
        assert stepper.copy(source, to)
        copied = next_logits(stepper, model, to, n, tokens[n:])
        stepper.forget(to)
        parking = Slots(stepper, parking=1 << 26)
        slot = parking.reserve(Lane.BATCH)
        assert slot is not None
        parking.start(slot, source)
        assert parking.park(slot, source)
        assert parking.resume(slot, to)
        moved = next_logits(stepper, model, to, n, tokens[n:])
        stayed = next_logits(stepper, model, source, n, tokens[n:])
        for seq in (source, to):
            stepper.forget(seq)
        assert np.array_equal(copied, stayed)
        assert np.array_equal(moved, stayed)


def test_a_state_for_which_there_is_no_room_is_refused(stepper: Stepper, model: Model) -> None:
    """Nothing else in the context changes, and the id can be used at once."""
    tokens = [1_000 + i for i in range(300)]
    next_logits(stepper, model, 5, 0, tokens)
    neighbour = next_logits(stepper, model, 1, 0, tokens[:20])
    assert not stepper.copy(5, 0)
    assert np.array_equal(next_logits(stepper, model, 0, 0, tokens[:20]), neighbour)
    for seq in (0, 1, 5):
        stepper.forget(seq)


def test_a_context_that_is_lost_is_rebuilt_and_the_other_untouched(
    stepper: Stepper, model: Model
) -> None:
    """An invalid token is a fatal error to llama.cpp."""
    tokens = model.tokenize(PROMPT, special=True, parse=False)
    expected = next_logits(stepper, model, 5, 0, tokens)
    broken = Chunk(key=0, seq=0, start=0, tokens=[model.n_vocab + 5], chooser=Watching(model))
    assert stepper.step([broken]).fate == "lost"
    assert stepper.state_size(5) > stepper.state_size(0)
    again = next_logits(stepper, model, 0, 0, tokens)
    for seq in (0, 5):
        stepper.forget(seq)
    assert np.array_equal(again, expected)


def test_an_answer_goes_on_across_its_first_context_and_ends_at_the_token(model: Model) -> None:
    """It says what it says with the long context from the start, and ends where that is full;
    with the stepper that is used here."""
    kind, _ = stepper_class()
    prompt = model.tokenize(PROMPT * 8, special=True, parse=False)[:200]
    answers = []
    for expected in (0, LONG):
        stepper = open_stepper(kind, model)
        loop: Loop[Chooser] = Loop(stepper)
        answer = Kept()
        chooser = Chooser(model, Sampling(logit_bias={0: -100.0, 2: -100.0}))
        loop.submit(
            Ticket(
                key=1, lane=Lane.BATCH, prompt=prompt, limit=LONG - len(prompt), chooser=chooser,
                answer=answer, expected=expected,
            )
        )  # fmt: skip
        while answer.reason is None:
            loop._collect()
            loop.turn()
        assert loop.gauges().parks == loop.gauges().resumes == (expected == 0)
        loop._memory.close()
        chooser.close()
        stepper.close()
        answers.append(answer)
    moved, stayed = answers
    assert len(moved.tokens) == LONG - len(prompt)
    assert (moved.tokens, moved.reason) == (stayed.tokens, "length")
