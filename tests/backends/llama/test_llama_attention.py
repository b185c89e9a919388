"""Attention by this package's own code: what it computes, and what sequences have in common."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from llama_cpp import llama_cpp as C
from numpy.typing import NDArray

from tidemill.backends.llama import attention, context
from tidemill.backends.llama.attention import Beginnings
from tidemill.backends.llama.extension import extension
from tidemill.backends.llama.model import Model, silence
from tidemill.backends.llama.native_stepper import stepper_class
from tidemill.backends.llama.sampling import Chooser
from tidemill.backends.llama.weights import resolve
from tidemill.scheduler.plan import SlotClass
from tidemill.scheduler.steps import Chunk, Sampled
from tidemill.types import Sampling

pytestmark = pytest.mark.llama

IDS = 6
DOES = ["begin", "step", "step", "interrupt", "copy", "copy", "copy", "copy"]
DOES += ["cut", "park", "over", "forget"]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    """The weights, loaded into this process."""
    silence(4)
    model = Model(resolve("smollm2"), 0)
    yield model
    model.close()


@pytest.fixture(scope="module", autouse=True)
def offered() -> None:
    """Contexts of this module compute attention with this package's code."""
    assert attention.offer() is None


def claim(monkeypatch: pytest.MonkeyPatch, beginnings: list[tuple[int, int]]) -> None:
    """From now on every step is told this."""
    tell = extension().share
    monkeypatch.setattr(attention, "_share", [lambda _: tell(beginnings)])


def test_a_copy_has_what_its_source_had() -> None:
    """Both as far as the source went when it was copied, however far they go from there."""
    beginnings = Beginnings(4)
    beginnings.copied(0, 1, 100)
    assert beginnings.of(0) == beginnings.of(1) != beginnings.of(2)
    assert beginnings.of(1)[1] == 100
    beginnings.cut(1, 70)
    beginnings.cut(1, 80)
    assert (beginnings.of(0)[1], beginnings.of(1)[1]) == (100, 70)


def test_a_copy_of_a_copy_has_no_more_than_that() -> None:
    """A group is one beginning: what two of it have beyond that is not told."""
    beginnings = Beginnings(4)
    beginnings.copied(0, 1, 100)
    beginnings.cut(1, 60)
    beginnings.copied(1, 2, 90)
    assert beginnings.of(2) == (beginnings.of(0)[0], 60)
    beginnings.copied(0, 3, 40)
    assert beginnings.of(3) == (beginnings.of(0)[0], 40)


def test_what_is_forgotten_is_not_shared() -> None:
    """And whoever is left alone begins a new group with the next copy."""
    beginnings = Beginnings(4)
    beginnings.copied(0, 1, 100)
    old = beginnings.of(0)[0]
    beginnings.cut(0, 0)
    assert beginnings.of(0)[0] < 0
    beginnings.copied(1, 2, 130)
    assert beginnings.of(1) == beginnings.of(2)
    assert beginnings.of(2)[0] != old
    assert beginnings.of(2)[1] == 130


def scores(sampled: Sampled) -> dict[bytes, float]:
    """Log probabilities of the likeliest tokens."""
    assert sampled.logprob is not None
    return {bytes(t[2]) if t[2] is not None else b"": t[1] for t in sampled.logprob.top}


def apart(one: list[Sampled], other: list[Sampled]) -> float:
    """Mean difference of log probabilities of what both think likely, in nats. Activations are
    rounded to eight bits on the way, so that another order of sums shows in the second digit."""
    differences = [
        abs(ours[token] - theirs[token])
        for a, b in zip(one, other, strict=True)
        if not (a.end or b.end)
        for ours, theirs in [(scores(a), scores(b))]
        for token in sorted(ours.keys() & theirs.keys(), key=ours.__getitem__)[-5:]
    ]
    assert differences
    return sum(differences) / len(differences)


def walk(model: Model, seed: int) -> tuple[list[Sampled], int]:
    """A random life of some sequences: prompts, copies, cuts, drafts, states that are put
    aside. What was computed, and in how many steps sequences had something in common."""
    chance = random.Random(seed)
    kind, _ = stepper_class()
    stepper = kind(model, slots=IDS, context=512, threads=1, headroom=0)
    stepper.open()
    chooser = Chooser(model, Sampling(), logprobs=20)
    length = dict.fromkeys(range(IDS), 0)
    text = model.tokenize(
        "The mill by the sea turns twice a day, when the tide comes and when it goes. " * 20,
        special=True, parse=False,
    )  # fmt: skip
    computed: list[Sampled] = []
    shared = 0
    for _ in range(60):
        free = [seq for seq in length if not length[seq]]
        used = [seq for seq in length if length[seq]]
        does = chance.choice(["prompt", "copy", "cut", "step", "step", "drafts", "park", "forget"])
        if does == "prompt" and free:
            seq, n = free[0], chance.randrange(40, 120)
            at = chance.randrange(100)
            stepper.step([Chunk(key=seq, seq=seq, start=0, tokens=text[at : at + n], chooser=None)])
            length[seq] = n
        elif does == "copy" and free and used:
            source, to = chance.choice(used), free[0]
            assert stepper.copy(source, to)
            length[to] = chance.randrange(length[source] // 2, length[source]) + 1
            stepper.trim(to, length[to])
        elif does == "cut" and used:
            seq = chance.choice(used)
            length[seq] -= min(length[seq] - 1, chance.randrange(20))
            stepper.trim(seq, length[seq])
        elif does == "park" and used and free:
            seq, to = chance.choice(used), free[0]
            state = bytearray(stepper.state_size(seq))
            stepper.save(seq, memoryview(state))
            stepper.forget(seq)
            assert stepper.load(to, memoryview(state))
            length[to], length[seq] = length[seq], 0
        elif does == "forget" and len(used) > 3:
            stepper.forget(used[0])
            length[used[0]] = 0
        elif does in ("step", "drafts") and used:
            n = 4 if does == "drafts" else 1
            groups = [stepper._contexts[0]._beginnings.of(seq) for seq in used]
            long = [group for group, tokens in groups if group >= 0 and tokens >= 32]
            shared += len(long) > len(set(long))
            chunks = [
                Chunk(
                    key=seq, seq=seq, start=length[seq], chooser=chooser,
                    tokens=[text[(7 * seq + length[seq] + i) % len(text)] for i in range(n)],
                )
                for seq in used
            ]  # fmt: skip
            seen = stepper.step(chunks)
            assert seen.fate == "done"
            for seq in used:
                computed += seen.sampled[seq]
                length[seq] += n
    stepper.close()
    chooser.close()
    return computed, shared


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_sequences_have_in_common_changes_nothing(
    model: Model, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Read once for all or once for each: the same, however the sequences came to it."""
    told, shared = walk(model, seed)
    assert shared >= 5
    claim(monkeypatch, [])
    untold, _ = walk(model, seed)
    assert apart(told, untold) < 0.06


def test_what_one_context_has_in_common_is_not_said_of_another(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is told of its own sequences, and whoever computes next of nothing."""
    told: list[list[tuple[int, int]]] = []
    monkeypatch.setattr(attention, "_share", [lambda all_of: told.append(list(all_of))])
    stepper = stepper_class()[0](model, slots=2, context=256, threads=1, headroom=0)
    stepper.open()
    stepper.step([Chunk(key=0, seq=0, start=0, tokens=[500] * 40, chooser=None)])
    assert stepper.copy(0, 1)
    told.clear()
    stepper.step([Chunk(key=s, seq=s, start=40, tokens=[600], chooser=None) for s in (0, 1)])
    stepper.close()
    assert [[length for _, length in one] for one in told] == [[40, 40], []]


def memory(stepper: Any, seq: int) -> list[NDArray[np.uint8]]:
    """What an id remembers, as llama.cpp writes it: of each layer the keys, then of each the
    values, a row of bytes for each token."""
    state = bytearray(stepper.state_size(seq))
    stepper.save(seq, memoryview(state))
    words = np.frombuffer(state, dtype=np.uint32, count=len(state) // 4)
    at = 3 + int(np.flatnonzero(words[3:])[0])
    cells = int(words[at])
    at += 1
    assert words[at : at + 3 * cells : 3].tolist() == list(range(cells))  # positions, in order
    at += 3 * cells
    layers = int(words[at + 1])
    at = 4 * (at + 2)
    rows = []
    for _ in range(2 * layers):
        size = int.from_bytes(state[at + 4 : at + 12], "little")
        here = np.frombuffer(state, dtype=np.uint8, count=cells * size, offset=at + 12)
        rows.append(here.reshape(cells, size))
        at += 12 + cells * size
    return rows


def must_be_true(stepper: Any, length: dict[int, int]) -> int:
    """Compare what is said of all pairs with what they remember, bit for bit; how many pairs have
    something in common."""
    of = {seq: stepper._contexts[0]._beginnings.of(seq) for seq in range(IDS)}
    groups = Counter(group for group, _ in of.values() if group >= 0)
    known = {seq: memory(stepper, seq) for seq, (group, _) in of.items() if groups[group] > 1}
    for one, other in combinations(known, 2):
        if of[one][0] == of[other][0]:
            same = min(of[one][1], of[other][1])
            assert same <= min(length[one], length[other])
            for a, b in zip(known[one], known[other], strict=True):
                assert (a[:same] == b[:same]).all()
    return sum(n * (n - 1) // 2 for n in groups.values())


@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_said_to_be_in_common_is(model: Model, seed: int) -> None:
    """Whatever happens to memory: copies within a class and from another one and back, states that
    are put aside, steps that are interrupted, that find no room or lose the context."""
    chance = random.Random(seed)
    kind, _ = stepper_class()
    longer = (SlotClass(slots=1, context=512),)
    stepper = kind(model, slots=IDS, context=256, threads=1, headroom=0, longer=longer)
    stepper.open()
    chooser = Chooser(model, Sampling())
    length = dict.fromkeys(range(IDS + 1), 0)
    left = [0]  # operations until the step is interrupted; 0: it is not

    @C.ggml_abort_callback  # type: ignore[untyped-decorator,unused-ignore]
    def stop(_: int) -> bool:
        left[0] -= 1
        return left[0] == 0

    def watched() -> None:
        for one in stepper._contexts:
            C.llama_set_abort_callback(one.handle, stop, None)

    def step(ids: list[int], n: int) -> str:
        chunks = [
            Chunk(
                key=seq, seq=seq, start=length[seq], chooser=chooser,
                tokens=[500 + chance.randrange(9000) for _ in range(n)],
            )
            for seq in ids
        ]  # fmt: skip
        fate = stepper.step(chunks).fate
        if fate == "done":
            for seq in ids:
                length[seq] += n
        return fate

    watched()
    pairs, fates = 0, Counter[str]()
    for turn in range(55):
        free = [seq for seq in length if not length[seq]]
        used = [seq for seq in length if length[seq]]
        mine = [seq for seq in used if seq < IDS]
        does = chance.choice(DOES) if mine else "begin"
        if turn == 15:
            fates[step(mine[:2], 257)] += 1
        elif turn == 35:
            length[mine[0]] += 9  # a gap, which llama.cpp refuses
            fates[step(mine[:1], 1)] += 1
            length.update(dict.fromkeys(range(IDS), 0))
            watched()
        elif does == "begin" and free and free[0] < IDS:
            fates[step(free[:1], chance.randrange(60, 100))] += 1
        elif does == "copy" and free:
            source, to = chance.choice(used), chance.choice(free)
            if length[source] <= 200:
                assert stepper.copy(source, to)
                length[to] = chance.randrange(length[source] // 2, length[source]) + 1
                stepper.trim(to, length[to])
        elif does == "cut":
            seq = chance.choice(used)
            length[seq] -= chance.randrange(length[seq])
            stepper.trim(seq, length[seq])
        elif does == "step":
            some = sorted(chance.sample(mine, chance.randrange(len(mine)) + 1))
            fates[step(some, chance.choice([1, 3, 60, 120]))] += 1
        elif does == "interrupt" and (some := [seq for seq in mine if length[seq] < 200]):
            left[0] = chance.randrange(1, 600)
            fates[step(some, 50)] += 1
            left[0] = 0
        elif does in ("park", "over"):
            seq = chance.choice(used)
            to = chance.choice(free or used) if does == "park" else chance.choice(used)
            state = bytearray(stepper.state_size(seq))
            stepper.save(seq, memoryview(state))
            if does == "park":
                stepper.forget(seq)
                length[seq], had = 0, length[seq]
            else:
                had = length[seq]
            if had <= 200:
                assert stepper.load(to, memoryview(state))
                length[to] = had
        elif does == "forget" and len(used) > 3:
            seq = chance.choice(used)
            stepper.forget(seq)
            length[seq] = 0
        pairs += must_be_true(stepper, length)
    stepper.close()
    chooser.close()
    assert pairs > 20
    assert min(fates[fate] for fate in ("done", "interrupted", "no_room", "lost")) > 0


def test_a_false_claim_would_be_seen(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the claims reach the computation, and the test above can fail."""
    honest, _ = walk(model, 1)
    claim(monkeypatch, [(0, 30_000)] * IDS)
    assert walk(model, 1)[0]  # longer than anybody sees: passed over, and nothing breaks
    claim(monkeypatch, [(0, 40)] * IDS)
    lied, _ = walk(model, 1)
    assert apart(honest, lied) > 0.15


def test_it_computes_what_llama_cpp_computes(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its attention in separate operations, compared to the rounding of activations."""
    ours, _ = walk(model, 4)
    monkeypatch.setattr(context, "flash", lambda: C.LLAMA_FLASH_ATTN_TYPE_DISABLED)
    theirs, _ = walk(model, 4)
    assert apart(ours, theirs) < 0.15


def test_several_threads_compute_what_one_computes() -> None:
    """The same to rounding; in processes of their own, since ggml keeps its threads."""
    code = (
        "import sys; from tidemill.backends.llama import attention;"
        "from tidemill.backends.llama.model import Model, silence;"
        "from tidemill.backends.llama.native_stepper import stepper_class;"
        "from tidemill.backends.llama.sampling import Chooser;"
        "from tidemill.backends.llama.weights import resolve;"
        "from tidemill.scheduler.steps import Chunk; from tidemill.types import Sampling;"
        "silence(4); assert attention.offer() is None; m = Model(resolve('smollm2'), 0);"
        "s = stepper_class()[0](m, slots=3, context=256, threads=int(sys.argv[1]), headroom=0);"
        "s.open(); c = Chooser(m, Sampling(), logprobs=1);"
        "seen = s.step([Chunk(key=k, seq=k, start=0, tokens=list(range(500 + k, 560 + k)),"
        " chooser=c) for k in range(3)]);"
        "print(*(v[0].logprob.logprob for v in seen.sampled.values()))"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code, str(threads)], capture_output=True, text=True, check=True
        ).stdout.split()
        for threads in (1, 3)
    ]
    one, three = ([float(x) for x in numbers] for numbers in said)
    assert len(one) == 3
    assert three == pytest.approx(one, abs=0.2)
