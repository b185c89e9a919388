"""Steps of llama.cpp in this process, against the numbers themselves."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from llama_cpp import llama_cpp as C
from numpy.typing import NDArray

from tidemill.backends.llama import grammar, tools
from tidemill.backends.llama.answer import Answer
from tidemill.backends.llama.grammar import Grammar
from tidemill.backends.llama.markup import THINKING, Markup
from tidemill.backends.llama.model import Model
from tidemill.backends.llama.sampling import Chooser, token_logprob
from tidemill.backends.llama.stepper import Stepper, restriction
from tidemill.errors import RequestRefused, TidemillError
from tidemill.scheduler.loop import Chunk, Loop, Sampled, Ticket
from tidemill.scheduler.slots import Slots
from tidemill.types import Lane, Piece, Sampling

pytestmark = pytest.mark.llama

PROMPT = "The three primary colours are red, blue and"


@pytest.fixture(scope="module")
def stepper(model: Model) -> Iterator[Stepper]:
    """Three slots of 256 tokens on one thread."""
    stepper = Stepper(model, slots=3, context=256, threads=1, headroom=0)
    stepper.open()
    yield stepper
    stepper.close()


def chunk(
    chooser: Chooser | None, tokens: list[int], *, seq: int = 0, start: int = 0
) -> Chunk[Chooser]:
    """Rows of one sequence; its key is its id."""
    return Chunk(key=seq, seq=seq, start=start, tokens=tokens, chooser=chooser)


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


def logits_after(
    stepper: Stepper, model: Model, tokens: list[int], *, cuts: tuple[int, ...] = (), seq: int = 0
) -> NDArray[np.float32]:
    """The logits after a prompt that is computed in chunks."""
    watching = Watching(model)
    edges = [0, *cuts, len(tokens)]
    for start, stop in zip(edges, edges[1:], strict=False):  # noqa: RUF007 - named edges read better
        last = stop == len(tokens)
        seen = stepper.step(
            [chunk(watching if last else None, tokens[start:stop], seq=seq, start=start)]
        )
        assert seen.fate == "done"
        assert len(seen.sampled) == last
    return watching.seen[0]


def test_a_prompt_in_chunks_is_a_prompt_at_once(stepper: Stepper, model: Model) -> None:
    """Wherever the prompt is cut, the next token is the same and the numbers nearly so."""
    tokens = model.tokenize(PROMPT * 6, special=True, parse=False)
    whole = logits_after(stepper, model, tokens)
    stepper.forget(0)
    for cuts in ((1,), (len(tokens) - 1,), (7, 20, 33)):
        cut = logits_after(stepper, model, tokens, cuts=cuts)
        stepper.forget(0)
        assert cut.argmax() == whole.argmax()
        # Other chunks are other row counts, other kernels and another rounding.
        assert np.corrcoef(cut, whole)[0, 1] > 0.99


def test_logprobs_match_a_float64_reference(stepper: Stepper, model: Model) -> None:
    """Log-softmax over the whole vocabulary, for the chosen token and the likeliest."""
    logits = logits_after(stepper, model, model.tokenize(PROMPT, special=True, parse=False))
    stepper.forget(0)
    exact = logits.astype(np.float64)
    exact = exact - exact.max()
    exact = exact - np.log(np.exp(exact).sum())
    order = np.argsort(-exact, kind="stable")[:20]
    entry = token_logprob(model, logits, 17, 20)
    assert entry.logprob == pytest.approx(exact[17], abs=1e-5)
    assert [t[1] for t in entry.top] == pytest.approx(list(exact[order]), abs=1e-5)
    assert [bytes(t[2]) for t in entry.top] == [model.piece(int(t)) for t in order]


def test_a_parked_sequence_goes_on_bit_identically(stepper: Stepper, model: Model) -> None:
    """Parked, its id given to another and resumed on a third, its next logits are the same."""
    tokens = model.tokenize(PROMPT, special=True, parse=False)
    expected, actual = Watching(model), Watching(model)
    logits_after(stepper, model, tokens)
    stepper.step([chunk(expected, [tokens[5]], start=len(tokens))])
    stepper.forget(0)

    logits_after(stepper, model, tokens)
    parking = Slots(stepper, parking=1 << 24)
    slot = parking.reserve(Lane.BATCH)
    assert slot is not None
    parking.start(slot, 0)
    assert parking.park(slot, 0)
    stepper.forget(0)
    logits_after(stepper, model, tokens[::-1])
    assert parking.resume(slot, 2)
    assert parking.arena.used == 0
    stepper.step([chunk(actual, [tokens[5]], seq=2, start=len(tokens))])
    for seq in range(3):
        stepper.forget(seq)
    assert np.array_equal(expected.seen[0], actual.seen[0])


def test_parking_is_a_budget(stepper: Stepper, model: Model) -> None:
    """A state that does not fit is refused and nothing changes; one whose owner is gone makes room
    for the next; what is kept can be brought back again."""
    tokens = model.tokenize(PROMPT * 3, special=True, parse=False)
    logits_after(stepper, model, tokens)
    parking = Slots(stepper, parking=stepper.state_size(0) + 1024)
    first, second = parking.reserve(Lane.BATCH), parking.reserve(Lane.BATCH)
    assert first is not None
    assert second is not None
    parking.start(first, 0)
    assert parking.park(first, 0)
    parking.start(second, 0)
    assert not parking.park(second, 0)
    parking.release(second)
    assert parking.put_aside(0) is None
    parking.release(first)
    assert parking.arena.used == 0
    aside = parking.put_aside(0)
    assert aside is not None
    assert parking.fetch(aside, 1, keep=True)
    assert parking.fetch(aside, 2, keep=False)
    assert stepper.state_size(1) == stepper.state_size(2) == stepper.state_size(0)
    assert parking.stats["used"] == parking.arena.used == 0
    parking.check()
    for seq in range(3):
        stepper.forget(seq)


def test_a_copied_beginning_is_the_beginning(stepper: Stepper, model: Model) -> None:
    """Copied to another id and cut, the memory of a prompt gives the numbers that it gives where
    it was computed; the original is untouched."""
    tokens = model.tokenize(PROMPT * 3, special=True, parse=False)
    cut = len(tokens) - 5
    expected = logits_after(stepper, model, tokens, cuts=(cut,))
    stepper.forget(0)
    logits_after(stepper, model, [*tokens[:cut], 9, 8, 7])
    assert stepper.copy(0, 2)
    stepper.trim(2, cut)
    copied, original = Watching(model), Watching(model)
    stepper.step([chunk(copied, tokens[cut:], seq=2, start=cut)])
    stepper.trim(0, cut)
    stepper.step([chunk(original, tokens[cut:], start=cut)])
    for seq in range(3):
        stepper.forget(seq)
    assert np.array_equal(copied.seen[0], original.seen[0])
    # Computed in one step with more rows before it, the same up to rounding.
    assert np.corrcoef(copied.seen[0], expected)[0, 1] > 0.99


def test_a_copy_within_a_device_waits_for_the_next_step(model: Model) -> None:
    """Where the memory is a GPU's, a copy is only noted; until the step that makes it nobody reads
    or writes what it touches, and then the numbers are the same."""
    stepper = Stepper(model, slots=4, context=256, threads=1, headroom=0)
    stepper.open()
    tokens = model.tokenize(PROMPT * 3, special=True, parse=False)
    logits_after(stepper, model, tokens[:-1])
    saved = bytearray(stepper.state_size(0))
    state = memoryview(saved)
    assert stepper.save(0, state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "on_gpu", True)
        assert stepper.copy(0, 2)
        assert not stepper.copy(2, 3)
        assert stepper.state_size(2) == 0
        assert not stepper.load(0, state)
        assert not stepper.load(2, state)
    copied, original = Watching(model), Watching(model)
    stepper.step([chunk(copied, tokens[-1:], seq=2, start=len(tokens) - 1)])
    stepper.step([chunk(original, tokens[-1:], start=len(tokens) - 1)])
    assert stepper.load(3, state)
    stepper.close()
    assert np.array_equal(copied.seen[0], original.seen[0])


@pytest.mark.parametrize(
    ("fact", "value", "why"),
    [
        ("llama_model_is_recurrent", True, "it is recurrent"),
        ("llama_model_is_hybrid", True, "some of its layers are recurrent"),
        ("llama_model_n_swa", 4096, "its attention has a sliding window"),
    ],
)
def test_memory_that_cannot_be_cut_is_not_shared(
    model: Model, monkeypatch: pytest.MonkeyPatch, fact: str, value: object, why: str
) -> None:
    """llama.cpp would refuse, or end the process: such a model copies, parks and moves nothing."""
    assert restriction(model) is None
    monkeypatch.setattr(C, fact, lambda handle: value)
    assert restriction(model) == why
    stepper = Stepper(model, slots=2, context=256, threads=1, headroom=0)
    assert not stepper.reuses
    assert stepper.limits.moves == 0
    assert stepper.state_size(0) == 0


def test_a_sequence_beyond_its_context_finds_no_room(stepper: Stepper, model: Model) -> None:
    """llama.cpp refuses the rows and keeps everything else as it was."""
    tokens = [1_000] * 250
    logits_after(stepper, model, tokens)
    assert stepper.step([chunk(None, [1_000] * 10, start=250)]).fate == "no_room"
    before = logits_after(stepper, model, [5, 6, 7], seq=1)
    stepper.forget(1)
    assert stepper.step([chunk(None, [1_000] * 6, start=250)]).fate == "done"
    assert np.array_equal(before, logits_after(stepper, model, [5, 6, 7], seq=1))
    for seq in range(3):
        stepper.forget(seq)


def test_sequences_in_one_step_do_not_mix(stepper: Stepper, model: Model) -> None:
    """Three prompts in one step choose what each chooses alone."""
    prompts = [model.tokenize(t, special=True, parse=False) for t in
               (PROMPT, "Once upon a", "def main():\n    print(")]  # fmt: skip
    alone = []
    for tokens in prompts:
        alone.append(int(logits_after(stepper, model, tokens).argmax()))
        stepper.forget(0)
    greedy = Chooser(model, Sampling())
    seen = stepper.step([chunk(greedy, tokens, seq=i) for i, tokens in enumerate(prompts)])
    for seq in range(3):
        stepper.forget(seq)
    assert [[s.token for s in seen.sampled[i]] for i in range(3)] == [[token] for token in alone]


def test_more_rows_than_the_batch_holds_are_refused(stepper: Stepper) -> None:
    """llama.cpp would end the process."""
    with pytest.raises(AssertionError, match="rows in a step"):
        stepper.step([chunk(None, [1] * (stepper.limits.rows + 1))])


def test_a_lost_context_is_rebuilt(model: Model) -> None:
    """An invalid token is a fatal error to llama.cpp: the step is lost, the next one works."""
    stepper = Stepper(model, slots=1, context=256, threads=1, headroom=0)
    stepper.open()
    seen = stepper.step([chunk(Chooser(model, Sampling()), [model.n_vocab + 5])])
    assert (seen.fate, seen.reason) == ("lost", "llama_decode returned -1")
    assert stepper.step([chunk(Chooser(model, Sampling()), [5, 6])]).fate == "done"
    stepper.close()


def test_a_grammar_is_applied_by_rejection(model: Model) -> None:
    """The best token that fits is chosen, from the likeliest or from all, greedy and sampled."""
    gbnf = grammar.from_schema({"enum": ["yes", "no"]}, param="p")
    (quote,) = model.tokenize('"', special=False, parse=False)
    far = np.zeros(model.n_vocab, dtype=np.float32)
    far[quote] = -50.0  # behind nearly all others
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=1)):
        chooser = Chooser(model, sampling, grammar=Grammar(model, gbnf, param="p"))
        text = b""
        for _ in range(8):
            token = chooser.choose(far)
            assert token is not None
            if model.is_end(token):
                break
            text += model.piece(token)
        chooser.close()
        assert text in (b'"yes"', b'"no"')


@pytest.mark.parametrize("text", ['"\\u0000"', '"a\\nb"', '"\x7f"'])
def test_strings_hold_no_raw_control_characters(model: Model, text: str) -> None:
    """JSON forbids them, escaped they are fine."""
    gbnf = grammar.from_schema({"type": "string"}, param="p")
    held = Grammar(model, gbnf, param="p")
    tokens = model.tokenize(text, special=False, parse=False)
    allowed = True
    for token in tokens:
        allowed = held.allows(token)
        if not allowed:
            break
        held.accept(token)
    held.close()
    assert allowed == ("\x7f" not in text)


def test_a_left_recursive_grammar_is_refused(model: Model) -> None:
    """llama.cpp gives no grammar, which would end the process at its first use."""
    with pytest.raises(RequestRefused, match="too large or left-recursive"):
        Grammar(model, 'root ::= root "a"', param="response_format")


def answer_of(model: Model, markup: Markup | None, text: str, *, stream: bool) -> list[Piece]:
    """The pieces of an answer whose tokens are those of ``text``."""
    sent: list[Piece | TidemillError] = []
    form = tools.format_of("<tool_call>")
    answer = Answer(sent.append, chooser=None, prompt_tokens=3, stream=stream, markup=markup,
                    calls=form)  # fmt: skip
    for token in model.tokenize(text, special=False, parse=True):
        assert answer.take(Sampled(token=token, piece=model.piece(token))) is None
    answer.finish("stop")
    answer.close()
    return [piece for piece in sent if isinstance(piece, Piece)]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_and_calls_are_told_apart(model: Model, stream: bool) -> None:
    """Think tags and tool calls leave the text, wherever tokens cut them."""
    text = (
        '<think>\nHm < 3.\n</think>\n\nHere: <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    )
    markup = Markup(thinks=THINKING[0], inside=False, calls=tools.format_of("<tool_call>"))
    pieces = answer_of(model, markup, text, stream=stream)
    assert "".join(p.reasoning for p in pieces) == "Hm < 3.\n"
    assert "".join(p.text for p in pieces) == "Here: "
    assert pieces[-1].finish == "tool_calls"
    assert pieces[-1].tool_calls[0]["function"] == {"name": "f", "arguments": "{}"}
    assert pieces[-1].usage is not None
    assert 0 < pieces[-1].usage.reasoning < pieces[-1].usage.output


def test_a_call_that_cannot_be_read_stays_text(model: Model) -> None:
    """Nothing of what the model said is lost."""
    markup = Markup(thinks=None, inside=False, calls=tools.format_of("<tool_call>"))
    (piece,) = answer_of(model, markup, 'a <tool_call>{"name": ', stream=False)
    assert (piece.text, piece.finish, piece.tool_calls) == ('a <tool_call>{"name": ', "stop", ())


def test_an_answer_that_begins_within_its_reasoning(model: Model) -> None:
    """Some templates open the think tag themselves."""
    markup = Markup(thinks=THINKING[0], inside=True, calls=None)
    (piece,) = answer_of(model, markup, "So.\n</think>\nYes <", stream=False)
    assert (piece.reasoning, piece.text) == ("So.\n", "Yes <")


@pytest.mark.parametrize("template", ["<tool_call>", '{"name": function name, "parameters": {}}'])
def test_a_forced_call_is_a_call(model: Model, template: str) -> None:
    """With ``tool_choice: required`` even a model that knows no tools writes a call of one."""
    form = tools.format_of(template)
    assert form is not None
    assert form.begin is not None
    function = {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "blue"]}},
            "required": ["colour"],
        },
    }
    offered = ({"type": "function", "function": function},)
    schema = tools.forced_schema(offered, "required", form.arguments)
    assert schema is not None
    gbnf = grammar.from_schema(schema, begin=form.begin, end=form.end, param="tools")
    chooser = Chooser(model, Sampling(), grammar=Grammar(model, gbnf, param="tools"))
    sent: list[Piece | TidemillError] = []
    answer = Answer(
        sent.append, chooser=chooser, prompt_tokens=3, stream=False,
        markup=Markup(thinks=None, inside=False, calls=form), calls=form, tools=offered,
    )  # fmt: skip
    prompt = model.tokenize(PROMPT, special=True, parse=False)
    stepper = Stepper(model, slots=1, context=256, threads=1, headroom=0)
    stepper.open()
    loop = Loop(stepper)
    loop.submit(
        Ticket(key=1, lane=Lane.BATCH, prompt=prompt, limit=80, chooser=chooser, answer=answer)
    )
    while not sent:
        loop._collect()
        loop.turn()
    stepper.close()
    piece = sent[0]
    assert isinstance(piece, Piece)
    assert piece.finish == "tool_calls"
    assert piece.text == ""
    assert piece.tool_calls[0]["function"]["name"] == "pick"
    assert piece.tool_calls[0]["function"]["arguments"] in (
        '{"colour": "red"}', '{"colour": "blue"}',
    )  # fmt: skip
