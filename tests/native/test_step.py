"""The native step against the Python one: equal schedules, equal tokens."""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from collections.abc import Iterator

import llama_cpp
import numpy as np
import pytest
from llama_cpp import llama_cpp as C

from tidemill.backends.llama import attention
from tidemill.backends.llama.grammar import Grammar, from_schema
from tidemill.backends.llama.model import Model, silence
from tidemill.backends.llama.sampling import Chooser
from tidemill.backends.llama.stepper import Stepper
from tidemill.backends.llama.weights import resolve
from tidemill.errors import TidemillError
from tidemill.native import step as native
from tidemill.native._step import Choice, Step
from tidemill.scheduler.loop import Chunk, Loop, Observation, Sampled, Ticket
from tidemill.types import FinishReason, Lane, Sampling, TokenLogprob

pytestmark = pytest.mark.llama

SIZES = {
    name: ctypes.sizeof(getattr(C, name))
    for name in ("llama_context_params", "llama_model_params", "llama_batch")
}


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    """The weights, loaded into this process, and attention as an engine has it."""
    silence(4)
    assert attention.offer() is None
    model = Model(resolve("smollm2"), 0)
    yield model
    model.close()


def address(pointer: object) -> int:
    """Where a sampler that ctypes holds lies; 0 for None."""
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


class NativeStepper(Stepper):
    """The Python stepper with the native call in place of its inner loop."""

    threads = 2

    def open(self) -> None:
        """Also after a context was lost."""
        super().open()
        self._native = Step(self._contexts[0].handle, self.threads)
        self._choices: dict[int, Choice] = {}

    def step(self, chunks: list[Chunk[Chooser]]) -> Observation:
        """One call for all sequences."""
        context = self._contexts[0]
        context.step()
        rc, chosen = self._native.run(
            [(c.seq, c.start, c.tokens, c.drafts, self._choice(c.chooser)) for c in chunks]
        )
        context.stepped()
        assert rc == 0
        asked = [c for c in chunks if c.chooser is not None]
        return Observation(
            sampled={
                chunk.key: [
                    Sampled(
                        token=token,
                        end=end,
                        piece=b"" if end else self._model.piece(token),
                        logprob=None if logprob is None else self._logprob(token, logprob, top),
                    )
                    for token, end, logprob, top in some
                ]
                for chunk, some in zip(asked, chosen, strict=True)
            }
        )

    def _choice(self, chooser: Chooser | None) -> Choice | None:
        if chooser is None:
            return None
        grammar = chooser._grammar
        return self._choices.setdefault(
            id(chooser),
            Choice(
                chain=address(chooser._chain),
                grammar=address(grammar.sampler) if grammar else 0,
                top=chooser.logprobs,
            ),
        )

    def _logprob(self, token: int, logprob: float, top: list[tuple[int, float]]) -> TokenLogprob:
        def name(t: int) -> str:
            return self._model.piece(t).decode("utf-8", "replace")

        return TokenLogprob(
            token=name(token), logprob=logprob, top=tuple((name(t), p, ()) for t, p in top)
        )


class Recorder:
    """Keeps one answer."""

    def __init__(self, done: threading.Semaphore) -> None:
        self.sampled: list[Sampled] = []
        self.reason: FinishReason | None = None
        self._done = done

    def reused(self, tokens: int) -> None:
        """Prompts that begin alike share what was computed."""

    def take(self, sampled: Sampled) -> None:
        """No stop strings here."""
        self.sampled.append(sampled)

    def finish(self, reason: FinishReason) -> None:
        """Called once."""
        self.reason = reason

    def fail(self, error: TidemillError) -> None:
        """A failure fails the test."""
        raise error

    def close(self) -> None:
        """One answer fewer to wait for."""
        self._done.release()


def choosers(model: Model) -> list[Chooser]:
    """Sixteen: greedy, seeded chains, biases and penalties, grammars, with and without logprobs."""
    gbnf = from_schema(
        {
            "type": "object",
            "properties": {"colour": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}},
            "required": ["colour", "n"],
            "additionalProperties": False,
        },
        param="schema",
    )

    def grammar() -> Grammar:
        return Grammar(model, gbnf, param="schema")

    warm = Sampling(temperature=0.9, top_p=0.9, top_k=40, min_p=0.01)
    made = [Chooser(model, Sampling(), logprobs=(None, 0, 5)[k % 3]) for k in range(6)]
    for seed in range(4):
        sampling = Sampling(temperature=1.2, seed=seed, frequency_penalty=0.5 * (seed % 2))
        made.append(Chooser(model, sampling, logprobs=20 if seed == 3 else None))
    made.append(Chooser(model, Sampling(logit_bias={17: 5.0, 3: -100.0}, repeat_penalty=1.3)))
    made.append(Chooser(model, Sampling(temperature=0.7, top_k=1, seed=1)))
    for seed in range(2):
        made.append(Chooser(model, Sampling(), grammar=grammar(), logprobs=seed or None))
        sampling = Sampling(temperature=warm.temperature, top_p=warm.top_p, top_k=40, seed=seed)
        made.append(Chooser(model, sampling, grammar=grammar()))
    return made


def answers(stepper: Stepper, model: Model) -> list[Recorder]:
    """Sixteen requests of 32 tokens through the loop; all are there before its first step."""
    stepper.open()
    loop: Loop[Chooser] = Loop(stepper)
    done = threading.Semaphore(0)
    made = choosers(model)
    records = [Recorder(done) for _ in made]
    for key, (chooser, record) in enumerate(zip(made, records, strict=True)):
        text = "Once upon a time " + "there was a mill by the sea, and " * (1 + key % 5) + "every"
        prompt = model.tokenize(text, special=True, parse=False)
        loop.submit(
            Ticket(
                key=key, lane=Lane.BATCH, prompt=prompt, limit=32, chooser=chooser, answer=record
            )
        )
    engine = threading.Thread(target=loop.run)
    engine.start()
    for _ in records:
        assert done.acquire(timeout=120)
    loop.close()
    engine.join()
    for chooser in made:
        chooser.close()
    return records


def test_sixteen_requests_on_eight_slots_get_the_same_tokens(model: Model) -> None:
    """At equal schedules the native step and the Python one agree, whatever chooses the token."""
    size = {"slots": 8, "context": 256, "threads": 1, "headroom": 0}
    python = answers(Stepper(model, **size), model)
    extension = answers(NativeStepper(model, **size), model)
    assert sum(len(p.sampled) for p in python) > 300
    for p, e in zip(python, extension, strict=True):
        assert [s.token for s in p.sampled] == [s.token for s in e.sampled]
        assert (p.reason, [s.piece for s in p.sampled]) == (
            e.reason,
            [s.piece for s in e.sampled],
        )
        for ours, theirs in zip(p.sampled, e.sampled, strict=True):
            assert (ours.logprob is None) == (theirs.logprob is None)
            if ours.logprob is not None and theirs.logprob is not None:
                assert theirs.logprob.logprob == pytest.approx(ours.logprob.logprob, abs=1e-5)
                assert [t[0] for t in theirs.logprob.top] == [t[0] for t in ours.logprob.top]


def test_logprobs_match_a_float64_reference(model: Model) -> None:
    """Log-softmax over the whole vocabulary, in doubles, from the logits of the same step."""
    stepper = NativeStepper(model, slots=1, context=256, threads=1, headroom=0)
    stepper.open()
    prompt = model.tokenize("The tide comes in and", special=True, parse=False)
    [[(token, end, logprob, top)]] = stepper._native.run([(0, 0, prompt, [], Choice(top=20))])[1]
    raw = np.ctypeslib.as_array(
        C.llama_get_logits(stepper._contexts[0].handle), shape=(model.n_vocab,)
    )
    exact = raw.astype(np.float64) - raw.max()
    exact -= math.log(np.exp(exact).sum())
    order = np.lexsort((np.arange(model.n_vocab), -raw))[:20]
    assert (token, end) == (int(raw.argmax()), False)
    assert logprob == pytest.approx(exact[token], abs=1e-5)
    assert [t for t, _ in top] == [int(t) for t in order]
    assert [p for _, p in top] == pytest.approx(list(exact[order]), abs=1e-5)
    stepper.close()


def test_a_step_that_llama_cpp_would_abort_on_is_refused_before(model: Model) -> None:
    """Too many rows, none, no tokens, a wrong shape: an error here, not the end of the process."""
    stepper = NativeStepper(model, slots=1, context=256, threads=1, headroom=0)
    stepper.open()
    run = stepper._native.run
    rows = int(C.llama_n_batch(stepper._contexts[0].handle))
    for chunks, message in (
        ([(0, 0, [1] * (rows + 1), [], None)], "more rows"),
        ([(0, 0, [1] * (rows - 1), [1, 1], Choice())], "more rows"),
        ([], "at least one row"),
        ([(0, 0, [], [], None)], "at least one token"),
        ([(0, 0, [1], [1], None)], "drafts need a choice"),
        ([(0, 0, [1], None)], r"a chunk is \(seq, start, tokens, drafts, choice\)"),
    ):
        with pytest.raises(ValueError, match=message):
            run(chunks)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="address 0"):
        Step(0)
    with pytest.raises(ValueError, match="at least one thread"):
        Step(stepper._contexts[0].handle, 0)
    assert run([(0, 0, [1, 2, 3], [], None)]) == (0, [])
    assert run([(0, 3, [1] * (rows - 2), [], None)])[0] == 1, "no room is an answer"
    assert run([(0, 3, [model.n_vocab + 5], [], None)])[0] < 0, "and so is a bad token"
    stepper.close()


def test_other_python_threads_run_while_the_step_computes(model: Model) -> None:
    """Nobody is made to give the GIL up here, so a thread that waits for it ran during the step."""
    stepper = NativeStepper(model, slots=1, context=256, threads=1, headroom=0)
    stepper.open()
    gate, ran = threading.Lock(), threading.Event()
    gate.acquire()

    def other() -> None:
        with gate:
            ran.set()

    thread = threading.Thread(target=other)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)
    try:
        gate.release()
        assert not ran.is_set()
        stepper._native.run([(0, 0, [1] * 200, [], None)])
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    stepper.close()


def test_a_libllama_of_another_shape_is_refused() -> None:
    """Version and struct sizes must be those that the step was built with."""
    loaded = native.load(version=llama_cpp.__version__, sizes=SIZES)
    assert (loaded.Step, loaded.Choice) == (Step, Choice)
    with pytest.raises(ImportError, match=r"0\.3\.36, 0\.3\.37 is installed"):
        native.load(version="0.3.37", sizes=SIZES)
    for sizes in ({}, {**SIZES, "llama_batch": 64}):
        with pytest.raises(ImportError, match="reinstall tidemill"):
            native.load(version=llama_cpp.__version__, sizes=sizes)
