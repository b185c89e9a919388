"""The native stepper behind the loop, and what happens where it was not built."""

from __future__ import annotations

import itertools
import threading

import pytest

from tidemill.backends.llama import extension, grammar
from tidemill.backends.llama.grammar import Grammar
from tidemill.backends.llama.model import Model
from tidemill.backends.llama.native_stepper import NativeStepper, stepper_class
from tidemill.backends.llama.sampling import Chooser
from tidemill.backends.llama.stepper import Stepper
from tidemill.errors import TidemillError
from tidemill.scheduler.loop import Chunk, Gauges, Loop, Observation, Sampled, Ticket
from tidemill.scheduler.speculation import Speculation
from tidemill.types import FinishReason, Lane, Sampling

pytestmark = pytest.mark.llama


class Kept:
    """Everything that was sampled for one answer."""

    def __init__(self) -> None:
        self.sampled: list[Sampled] = []
        self.cached = 0
        self.over = False

    def reused(self, tokens: int) -> None:
        """Noted."""
        self.cached = tokens

    def take(self, sampled: Sampled) -> FinishReason | None:
        """Noted."""
        self.sampled.append(sampled)
        return None

    def finish(self, reason: FinishReason) -> None:
        """Nothing to do."""

    def fail(self, error: TidemillError) -> None:
        """Fails the test."""
        raise error

    def close(self) -> None:
        """The end."""
        self.over = True


def run(kind: type[Stepper], model: Model, *, drafts: bool) -> tuple[list[Kept], Gauges]:
    """Nine requests on four slots, with a shared beginning: greedy, drawn, with log
    probabilities, under a grammar, and one alone. ``drafts``: as many as there can be, since this
    clock says that every step takes as long as any other."""
    gbnf = grammar.from_schema({"type": "array", "items": {"type": "integer"}}, param="p")
    choosers = [
        Chooser(model, Sampling()),
        Chooser(model, Sampling(), logprobs=3),
        Chooser(model, Sampling(temperature=0.9, top_p=0.9, top_k=40, seed=4)),
        Chooser(model, Sampling(frequency_penalty=1.0, logit_bias={500: -5.0}), logprobs=0),
        Chooser(model, Sampling(), grammar=Grammar(model, gbnf, param="p")),
        Chooser(model, Sampling(temperature=0.8, seed=2), grammar=Grammar(model, gbnf, param="p")),
        Chooser(model, Sampling()),
        Chooser(model, Sampling()),
        Chooser(model, Sampling(temperature=1.2, min_p=0.1, seed=9), logprobs=20),
    ]
    stepper = kind(model, slots=4, context=256, threads=1, headroom=1)
    stepper.open()
    ticks = itertools.count()
    speculation: Speculation[Chooser] = Speculation(now=lambda: float(next(ticks)))
    loop: Loop[Chooser] = Loop(stepper, speculation=speculation if drafts else None)
    answers = [Kept() for _ in choosers]
    begin = "A tide mill is a water mill that the sea drives, and it turns twice a day. " * 2
    for key, (chooser, answer) in enumerate(zip(choosers, answers, strict=True)):
        prompt = model.tokenize(begin + f"{key} means", special=True, parse=False)
        loop.submit(
            Ticket(
                key=key, lane=Lane.BATCH, prompt=prompt, limit=24, chooser=chooser, answer=answer,
                alone=key == 6,
            )
        )  # fmt: skip
    while not all(answer.over for answer in answers):
        loop._collect()
        loop.turn()
    for chooser in choosers:
        chooser.close()
    stepper.close()
    return answers, loop.gauges()


@pytest.mark.parametrize("drafts", [False, True])
def test_the_stepper_that_is_used_chooses_what_the_reference_chooses(
    model: Model, drafts: bool
) -> None:
    """Token for token, and log probabilities to float precision. Where the extension was not built
    the reference is what is used."""
    fastest, why = stepper_class()
    assert fastest is (NativeStepper if why is None else Stepper)
    fast, gauges = run(fastest, model, drafts=drafts)
    reference, same = run(Stepper, model, drafts=drafts)
    assert gauges == same
    assert (gauges.tokens_accepted > 0) == drafts
    for ours, theirs in zip(fast, reference, strict=True):
        assert [s.token for s in ours.sampled] == [s.token for s in theirs.sampled]
        assert [s.piece for s in ours.sampled] == [s.piece for s in theirs.sampled]
        assert ours.cached == theirs.cached
        for a, b in zip(ours.sampled, theirs.sampled, strict=True):
            assert (a.logprob is None) == (b.logprob is None)
            if a.logprob is not None and b.logprob is not None:
                assert a.logprob.logprob == pytest.approx(b.logprob.logprob, abs=1e-4)
                assert a.logprob.bytes == b.logprob.bytes
                assert [t[0] for t in a.logprob.top] == [t[0] for t in b.logprob.top]


def test_without_the_extension_steps_are_computed_in_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the reason is one sentence for the log."""
    monkeypatch.setattr(extension.llama_cpp, "__version__", "0.0.1")
    kind, why = stepper_class()
    assert kind is Stepper
    assert why is not None
    assert "tidemill" in why or "built" in why


def test_a_step_that_is_given_up_leaves_everything_as_it_was(model: Model) -> None:
    """The same step again computes the same numbers as where nobody interrupted, whatever part of
    it had been computed."""
    kind, why = stepper_class()
    greedy = Chooser(model, Sampling(), logprobs=20)
    prompts = [[500 + 7 * i + k for i in range(150)] for k in range(3)]

    def chunks(start: int, upto: int) -> list[Chunk[Chooser]]:
        return [
            Chunk(key=k, seq=k, start=start, tokens=tokens[start:upto], chooser=greedy)
            for k, tokens in enumerate(prompts)
        ]

    def chosen(*, interrupted: bool) -> Observation:
        stepper = kind(model, slots=3, context=256, threads=1, headroom=0)
        stepper.open()
        assert stepper.step(chunks(0, 20)).fate == "done"
        if interrupted:
            over = threading.Event()

            def interrupt() -> None:
                while not over.is_set():
                    stepper.interrupt()

            thread = threading.Thread(target=interrupt)
            thread.start()
            seen = stepper.step(chunks(20, 150))
            over.set()
            thread.join()
            assert seen.fate == "interrupted"
            assert seen.sampled == {}
        seen = stepper.step(chunks(20, 150))
        stepper.close()
        return seen

    calm = chosen(interrupted=False)
    assert calm.fate == "done"
    assert len(calm.sampled) == 3
    if why is None:  # the reference would ask Python too often
        assert chosen(interrupted=True) == calm
    greedy.close()
