"""Drafts in a step of llama.cpp: what is chosen is what the logits say; refused ones are gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from llama_cpp import llama_cpp as C
from numpy.typing import NDArray

from tidemill.backends.llama.child import _speculation
from tidemill.backends.llama.grammar import Grammar, from_schema
from tidemill.backends.llama.model import Model
from tidemill.backends.llama.native_stepper import stepper_class
from tidemill.backends.llama.sampling import Chooser
from tidemill.backends.llama.stepper import Stepper
from tidemill.scheduler.loop import Chunk, Sampled
from tidemill.types import EngineSpec, Sampling

pytestmark = pytest.mark.llama

N = 4
"""Drafts of a step here."""


@pytest.fixture(scope="module", params=["python", "fastest"])
def stepper(model: Model, request: pytest.FixtureRequest) -> Iterator[Stepper]:
    """Two slots of 256 tokens on one thread, in Python and as it is used."""
    kind = Stepper if request.param == "python" else stepper_class()[0]
    stepper = kind(model, slots=2, context=256, threads=1, headroom=0)
    stepper.open()
    yield stepper
    stepper.close()


@pytest.fixture
def prompt(stepper: Stepper, model: Model) -> Iterator[list[int]]:
    """A prompt of which all but the last token is computed, on both ids."""
    tokens = model.tokenize("One, two, three, four, five, six,", special=True, parse=False)
    chunks = [
        Chunk[Chooser](key=s, seq=s, start=0, tokens=tokens[:-1], chooser=None) for s in (0, 1)
    ]
    assert stepper.step(chunks).fate == "done"
    yield tokens
    for seq in (0, 1):
        stepper.forget(seq)


def step(
    stepper: Stepper, prompt: list[int], chooser: Chooser, drafts: list[int], *, seq: int = 0
) -> list[Sampled]:
    """The last token of the prompt with drafts; the memory is as before."""
    start = len(prompt) - 1
    chunk = Chunk(
        key=7, seq=seq, start=start, tokens=prompt[-1:], drafts=drafts, chooser=chooser
    )  # fmt: skip
    chosen = stepper.step([chunk]).sampled[7]
    stepper.trim(seq, start)
    return chosen


def logits(stepper: Stepper, model: Model, rows: int) -> NDArray[np.float32]:
    """Those of the step before."""
    raw = C.llama_get_logits(stepper._contexts[0].handle)
    return np.ctypeslib.as_array(raw, shape=(rows, model.n_vocab)).copy()


def schema(model: Model) -> Grammar:
    """An array of integers."""
    gbnf = from_schema({"type": "array", "items": {"type": "integer"}, "minItems": 3}, param="p")
    return Grammar(model, gbnf, param="p")


CHOOSERS: dict[str, Callable[[Model], Chooser]] = {
    "greedy": lambda model: Chooser(model, Sampling()),
    "greedy with log probabilities": lambda model: Chooser(model, Sampling(), logprobs=3),
    "drawn": lambda model: Chooser(model, Sampling(temperature=1.0, top_k=40, seed=5), logprobs=0),
    "penalties": lambda model: Chooser(
        model, Sampling(temperature=0.7, seed=1, frequency_penalty=1.5, repeat_penalty=1.2)
    ),
    "grammar": lambda model: Chooser(model, Sampling(), grammar=schema(model)),
    "drawn under a grammar": lambda model: Chooser(
        model, Sampling(temperature=0.9, seed=3), grammar=schema(model), logprobs=1
    ),
}


@pytest.mark.parametrize("kind", CHOOSERS)
def test_chosen_is_what_the_logits_say_one_after_another(
    stepper: Stepper, model: Model, prompt: list[int], kind: str
) -> None:
    """However many drafts are kept: the tokens and their probabilities are what a chooser of the
    same seed and grammar makes of the rows in order, so that no refused draft has moved it."""
    wrong = model.tokenize(" tide", special=False, parse=False)[0]
    known: list[int] = []
    for kept in range(N + 1):
        drafts = (known + [wrong] * N)[:N]
        chooser, by_hand = CHOOSERS[kind](model), CHOOSERS[kind](model)
        chosen = step(stepper, prompt, chooser, drafts)
        rows = logits(stepper, model, N + 1)
        expected = [by_hand.choose(row) for row in rows[: kept + 1]]
        chooser.close()
        by_hand.close()
        assert [one.token for one in chosen] == expected
        assert not any(one.end for one in chosen)
        if chooser.logprobs is not None:
            exact = rows[: kept + 1].astype(np.float64)
            exact -= np.log(np.exp(exact - exact.max()).sum(axis=1))[:, None] + exact.max()
            for one, row in zip(chosen, exact, strict=True):
                assert one.logprob is not None
                assert one.logprob.logprob == pytest.approx(row[one.token], abs=1e-4)
                assert len(one.logprob.top) == chooser.logprobs
        known = [one.token for one in chosen]
    assert len(known) == N + 1


def test_rows_of_drafts_are_rows_of_a_prompt(
    stepper: Stepper, model: Model, prompt: list[int]
) -> None:
    """The logits after the last draft are those after a prompt that ends with it, up to the
    rounding of a last layer with one row of output."""
    drafts = [500, 600, 700, 800]
    greedy = Chooser(model, Sampling())
    step(stepper, prompt, greedy, drafts)
    last = logits(stepper, model, N + 1)[-1]
    start = len(prompt) - 1
    stepper.step([Chunk(key=1, seq=1, start=start, tokens=[prompt[-1], *drafts], chooser=greedy)])
    plain = logits(stepper, model, 1)[0]
    assert plain.argmax() == last.argmax()
    assert np.corrcoef(plain, last)[0, 1] > 0.99


def test_refused_drafts_leave_no_trace(stepper: Stepper, model: Model, prompt: list[int]) -> None:
    """Two sequences were computed with other drafts, all refused and trimmed: what follows is the
    same to the last bit."""
    greedy, end = Chooser(model, Sampling()), len(prompt)
    after = []
    for seq, drafts in ((0, [500, 600, 700, 800]), (1, [900, 1_000, 1_100, 1_200])):
        chunk = Chunk(
            key=7, seq=seq, start=end - 1, tokens=prompt[-1:], drafts=drafts, chooser=greedy
        )  # fmt: skip
        [chosen] = stepper.step([chunk]).sampled[7]
        stepper.trim(seq, end)
        stepper.step([Chunk(key=7, seq=seq, start=end, tokens=[chosen.token], chooser=greedy)])
        after.append(logits(stepper, model, 1))
    assert np.array_equal(*after)


def test_the_end_ends_it_though_it_was_drafted(
    stepper: Stepper, model: Model, prompt: list[int]
) -> None:
    """Nothing is chosen after it."""
    eos = int(C.llama_vocab_eos(model.vocab))
    ends = Chooser(model, Sampling(logit_bias={eos: 100.0}))
    chosen = step(stepper, prompt, ends, [eos] * N)
    ends.close()
    assert [(one.token, one.end) for one in chosen] == [(eos, True)]


def test_drafts_and_plain_sequences_share_a_step(
    stepper: Stepper, model: Model, prompt: list[int]
) -> None:
    """Each gets its own rows: one with drafts, one without, in either order."""
    greedy = Chooser(model, Sampling())
    start = len(prompt) - 1
    wanted = step(stepper, prompt, greedy, [])[0].token
    for first, second in (([wanted, 5], []), ([], [wanted, 5])):
        seen = stepper.step(
            [
                Chunk(key=seq, seq=seq, start=start, tokens=prompt[-1:], drafts=drafts,
                      chooser=greedy)
                for seq, drafts in enumerate((first, second))
            ]
        )  # fmt: skip
        for seq, drafts in enumerate((first, second)):
            tokens = [one.token for one in seen.sampled[seq]]
            assert tokens[0] == wanted
            assert len(tokens) == (2 if drafts else 1)
            stepper.trim(seq, start)


def test_off_is_off(model: Model) -> None:
    """And it is on where nothing is said."""
    assert _speculation(EngineSpec(model="smollm2", speculation="off"), model) is None
    assert _speculation(EngineSpec(model="smollm2"), model) is not None
