"""The replica as the server sees it: a real model in a real process."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

from tidemill.backends.llama.llama_replica import LlamaReplica
from tidemill.backends.llama.model import Model
from tidemill.errors import ContextLengthExceeded, RequestRefused
from tidemill.types import Embedding, Generation, Lane, Piece, Sampling

pytestmark = [pytest.mark.anyio, pytest.mark.llama]

STORY = "Once upon a time there was a little fox who lived"


def text_of(prompt: str = STORY, **fields: Any) -> Generation:
    """A completion of a raw prompt."""
    return Generation(model="smollm2", text=prompt, **{"max_tokens": 16, **fields})


def chat_of(content: str = "Name three colours.", **fields: Any) -> Generation:
    """A chat completion with one message."""
    messages = ({"role": "user", "content": content},)
    return Generation(model="smollm2", messages=messages, **{"max_tokens": 16, **fields})


async def pieces(engine: LlamaReplica, generation: Generation) -> list[Piece]:
    """All pieces of an answer; only the last has an end."""
    out = [piece async for piece in engine.generate(generation)]
    assert [p.finish is not None for p in out] == [False] * (len(out) - 1) + [True]
    assert out[-1].usage is not None
    return out


async def one(engine: LlamaReplica, generation: Generation) -> Piece:
    """The only piece of an answer that does not stream."""
    (piece,) = await pieces(engine, generation)
    return piece


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that the engine process does by itself."""
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - a child process has no event to wait on
            await asyncio.sleep(0.01)


async def test_the_card_tells_what_the_model_can_do(engine: LlamaReplica) -> None:
    """Name, context, chat and embeddings; its template has no tools."""
    card = engine.card
    assert (card.id, card.context_length) == ("smollm2", 256)
    assert (card.chat, card.embeddings, card.tools) == (True, True, False)
    status = engine.status()
    assert (status.healthy, status.slots, status.reason) == (True, 4, None)


async def test_greedy_answers_repeat(engine: LlamaReplica) -> None:
    """The same request twice gives the same words and the same usage."""
    first, second = await one(engine, text_of()), await one(engine, text_of())
    assert first.text
    assert first == second
    assert first.finish == "length"
    assert first.usage is not None
    assert (first.usage.input, first.usage.output) == (11, 16)


async def test_a_stream_is_the_answer_in_pieces(engine: LlamaReplica) -> None:
    """Joined, the pieces are what a single answer would be."""
    whole = await one(engine, text_of())
    parts = await pieces(engine, text_of(stream=True))
    assert len(parts) > 8
    assert "".join(p.text for p in parts) == whole.text
    assert parts[-1].usage == whole.usage


async def test_sixteen_answers_share_four_slots(engine: LlamaReplica) -> None:
    """More requests than slots all finish, each with its own answer."""
    asked = [chat_of(f"Say a word that begins with {c}.", max_tokens=6) for c in "abcdefghijklmnop"]
    answers = await asyncio.gather(*(one(engine, g) for g in asked))
    assert all(a.usage is not None and a.usage.output > 0 for a in answers)
    assert len({a.text for a in answers}) > 1
    status = engine.status()
    assert (status.active, status.waiting, status.parked) == (0, 0, 0)


async def test_a_chat_ends_by_itself(engine: LlamaReplica) -> None:
    """The end token is neither shown nor counted."""
    answer = await one(engine, chat_of("Say hello.", max_tokens=100))
    assert answer.finish == "stop"
    assert "<|im_end|>" not in answer.text
    assert answer.usage is not None
    assert 0 < answer.usage.output < 100


async def test_stop_strings_end_the_text_wherever_tokens_cut_them(engine: LlamaReplica) -> None:
    """Any part of the answer is found as a stop string, and nothing of it is shown."""
    whole = (await one(engine, text_of(max_tokens=12))).text
    for start in range(3, len(whole) - 4, 7):
        stop = whole[start : start + 4]
        answer = await one(engine, text_of(max_tokens=12, stop=(stop, "never said")))
        assert answer.text == whole[: whole.find(stop)]
        assert answer.finish == "stop"


async def test_stop_strings_of_many_bytes(engine: LlamaReplica) -> None:
    """A character of several tokens is found as a stop string; without it, it comes out whole."""
    prompt = "🦀🐙🦀🐙🦀🐙🦀🐙🦀🐙🦀🐙🦀"
    parts = await pieces(engine, text_of(prompt, stream=True, max_tokens=18))
    text = "".join(p.text for p in parts)
    assert "🐙" in text
    assert "\ufffd" not in text.rstrip("\ufffd")
    stopped = await one(engine, text_of(prompt, max_tokens=18, stop=("🐙",)))
    assert stopped.text == text[: text.find("🐙")]
    assert stopped.finish == "stop"


async def test_seeded_sampling_repeats(engine: LlamaReplica) -> None:
    """The same seed gives the same text, other seeds give others."""

    def at(seed: int) -> Generation:
        return text_of(sampling=Sampling(temperature=1.0, top_p=0.95, top_k=50, seed=seed))

    first, again = await one(engine, at(7)), await one(engine, at(7))
    assert first.text == again.text
    assert len({(await one(engine, at(seed))).text for seed in range(4)}) > 1


async def test_logit_bias_and_penalties_move_the_choice(engine: LlamaReplica, model: Model) -> None:
    """A token with a bias of 100 is all that is said; a ban is kept; penalties end repetition."""
    greedy = await one(engine, text_of(logprobs=0, max_tokens=4))
    said = greedy.logprobs[0].token
    (token,) = model.tokenize(said, special=False, parse=False)
    banned = await one(engine, text_of(max_tokens=4, sampling=Sampling(logit_bias={token: -100.0})))
    assert not banned.text.startswith(said)
    forced = await one(engine, text_of(max_tokens=3, sampling=Sampling(logit_bias={token: 100.0})))
    assert forced.text == said * 3
    laughing = "ha ha ha ha ha ha"
    stuck = await one(engine, text_of(laughing, max_tokens=12))
    freed = await one(
        engine, text_of(laughing, max_tokens=12, sampling=Sampling(frequency_penalty=2.0))
    )
    assert len(set(stuck.text.split())) < len(set(freed.text.split()))


async def test_logprobs_come_with_every_token(engine: LlamaReplica) -> None:
    """One entry a token, the chosen one first among the likeliest of a greedy answer."""
    answer = await one(engine, text_of(logprobs=3, max_tokens=8))
    assert answer.usage is not None
    assert len(answer.logprobs) == answer.usage.output == 8
    assert "".join(p.token for p in answer.logprobs) == answer.text
    for p in answer.logprobs:
        assert bytes(p.bytes).decode() == p.token
        assert len(p.top) == 3
        assert p.top[0][:2] == (p.token, p.logprob)
        assert [t[1] for t in p.top] == sorted((t[1] for t in p.top), reverse=True)
        assert sum(math.exp(t[1]) for t in p.top) <= 1.000001


async def test_logprobs_end_with_the_text(engine: LlamaReplica) -> None:
    """Tokens that a stop string swallowed have no entry."""
    whole = await one(engine, text_of(logprobs=0))
    stop = "".join(p.token for p in whole.logprobs[5:7])
    answer = await one(engine, text_of(logprobs=0, stop=(stop,)))
    assert answer.text == whole.text[: whole.text.find(stop)]
    assert "".join(p.token for p in answer.logprobs) == answer.text


async def test_an_answer_matches_its_schema(engine: LlamaReplica) -> None:
    """The grammar holds the model to the schema, greedy and sampled."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
    for sampling in (Sampling(), Sampling(temperature=1.5, seed=3)):
        answer = await one(
            engine,
            chat_of("Describe a person.", json_schema=schema, max_tokens=120, sampling=sampling),
        )
        assert answer.finish == "stop", answer.text
        person = json.loads(answer.text)
        assert list(person) == ["name", "age", "tags"]
        assert isinstance(person["age"], int)
        assert len(person["name"]) <= 12
        assert set(person["tags"]) <= {"red", "blue"}


async def test_any_json_object(engine: LlamaReplica) -> None:
    """The empty schema asks for an object, whatever is in it."""
    answer = await one(engine, chat_of("Give me JSON.", json_schema={}, max_tokens=60))
    if answer.finish == "stop":
        assert isinstance(json.loads(answer.text), dict)
    else:
        assert answer.text.startswith("{")


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "https://example.org/schema.json"},
        {"type": "object", "properties": {"a": {"$ref": "file:///etc/passwd"}}},
        {"$ref": "#/$defs/missing"},
        {"type": "unicorn"},
        {"type": "integer", "minimum": 3},
        {"type": "string", "pattern": "no anchors"},
        {"type": "string", "minLength": 10_000_000},
    ],
)
async def test_a_bad_schema_is_refused(engine: LlamaReplica, schema: dict[str, Any]) -> None:
    """Before a token is computed, naming the parameter; nothing is fetched."""
    with pytest.raises(RequestRefused) as caught:
        await one(engine, chat_of(json_schema=schema))
    assert caught.value.param == "response_format"
    assert caught.value.status == 400


async def test_the_context_ends_at_the_exact_token(engine: LlamaReplica) -> None:
    """Prompt and answer together fill the context and no more; a longer prompt is refused."""
    word = (1_000,)
    full = await one(engine, Generation(model="m", tokens=word * 250))
    assert full.usage is not None
    assert (full.usage.input + full.usage.output, full.finish) in ((256, "length"), (250, "stop"))
    longest = await one(engine, Generation(model="m", tokens=word * 255, max_tokens=9))
    assert longest.usage is not None
    assert longest.usage.output <= 1
    none = await one(engine, Generation(model="m", tokens=word * 256))
    assert (none.text, none.finish) == ("", "length")
    with pytest.raises(ContextLengthExceeded) as caught:
        await one(engine, Generation(model="m", tokens=word * 257))
    assert str(caught.value) == "Prompt length 257 exceeds model context 256"


async def test_a_request_can_lower_its_context(engine: LlamaReplica) -> None:
    """``max_context`` caps prompt and answer, and is what the message names."""
    capped = await one(engine, text_of(max_tokens=None, max_context=15))
    assert capped.usage is not None
    assert (capped.usage.input, capped.usage.output, capped.finish) == (11, 4, "length")
    with pytest.raises(ContextLengthExceeded) as caught:
        await one(engine, text_of(max_context=10))
    assert str(caught.value) == "Prompt length 11 exceeds model context 10"


async def test_echo_puts_the_prompt_in_front(engine: LlamaReplica) -> None:
    """As text or as tokens; with no answer asked for, the prompt alone."""
    plain = await one(engine, text_of())
    echoed = await one(engine, text_of(echo=True))
    assert echoed.text == STORY + plain.text
    alone = await one(engine, text_of(echo=True, max_tokens=0))
    assert alone.text == STORY
    with pytest.raises(RequestRefused, match="echo"):
        await one(engine, text_of(echo=True, logprobs=1))


async def test_tools_are_refused_by_this_model(engine: LlamaReplica) -> None:
    """Its template has no place for them."""
    with pytest.raises(RequestRefused) as caught:
        await one(engine, chat_of(tools=({"type": "function", "function": {"name": "f"}},)))
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("generation", "param"),
    [
        (Generation(model="m", text=""), "prompt"),
        (Generation(model="m", tokens=()), "prompt"),
        (Generation(model="m", tokens=(10**6,)), "prompt"),
        (text_of(sampling=Sampling(logit_bias={10**6: 1.0})), "logit_bias"),
        (text_of(sampling=Sampling(repeat_penalty=0.0)), "repeat_penalty"),
    ],
)
async def test_what_cannot_run_is_refused(
    engine: LlamaReplica, generation: Generation, param: str
) -> None:
    """Each with the parameter that is wrong; the engine goes on."""
    with pytest.raises(RequestRefused) as caught:
        await one(engine, generation)
    assert caught.value.param == param
    assert engine.status().healthy


async def test_what_no_message_can_hold_is_refused(engine: LlamaReplica) -> None:
    """Lone surrogates and numbers beyond 64 bits fail the request, not the connection."""
    for schema in ({"const": "\ud83d"}, {"const": 2**70}):
        with pytest.raises(RequestRefused):
            await one(engine, chat_of(json_schema=schema))
    assert (await one(engine, text_of())).text


async def test_closing_the_iterator_frees_the_slot(engine: LlamaReplica) -> None:
    """Four readers leave after a piece; others get their slots and the engine is empty again."""
    for _ in range(4):
        async with aclosing(engine.generate(text_of(stream=True, max_tokens=None))) as answer:
            async for _piece in answer:
                break
    await until(lambda: engine.status().active == 0)
    assert engine.status().waiting == 0


async def test_a_cancelled_reader_frees_the_slot_too(engine: LlamaReplica) -> None:
    """A client that hangs up is a cancelled coroutine."""
    started = asyncio.Event()

    async def read() -> None:
        async for _piece in engine.generate(text_of(stream=True, max_tokens=None)):
            started.set()

    reader = asyncio.create_task(read())
    await started.wait()
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    await until(lambda: engine.status().active == 0)


async def test_interactive_goes_before_batch(engine: LlamaReplica) -> None:
    """With every slot and the queue full of lines, a person's answer still comes first."""
    finished: list[str] = []

    async def run(name: str, generation: Generation) -> None:
        await one(engine, generation)
        finished.append(name)

    lines = [
        asyncio.create_task(run("line", text_of(f"{STORY} {i}", max_tokens=120))) for i in range(8)
    ]
    await until(lambda: engine.status().active >= 3)
    await run("person", text_of(lane=Lane.INTERACTIVE, max_tokens=8))
    assert finished == ["person"]
    for line in lines:
        line.cancel()
    await asyncio.gather(*lines, return_exceptions=True)


async def test_a_displaced_line_says_what_it_would_have_said(engine: LlamaReplica) -> None:
    """Four people take all slots; the lines are parked, come back and end with the same words; the
    status counts it."""
    before = engine.status()
    alone = await one(engine, text_of(max_tokens=60))
    lines = [asyncio.create_task(one(engine, text_of(max_tokens=60))) for _ in range(3)]
    await until(lambda: engine.status().active == 3)
    people = [one(engine, text_of(f"{i}", lane=Lane.INTERACTIVE, max_tokens=10)) for i in range(4)]
    await asyncio.gather(*people)
    for answer in await asyncio.gather(*lines):
        assert answer.usage == alone.usage
        assert answer.text[:40] == alone.text[:40]
    after = engine.status()
    assert (after.active, after.parked) == (0, 0)
    assert after.parks - before.parks >= 2
    assert after.resumes - before.resumes >= 2
    assert after.held > 0
    assert after.arena.bytes == after.arena.free + after.arena.used > 0


async def test_count_is_the_usage(engine: LlamaReplica) -> None:
    """Prompt tokens can be known before anything is computed, template included."""
    for generation in (chat_of(), text_of(), Generation(model="m", tokens=(5, 6), max_tokens=1)):
        answer = await one(engine, generation)
        assert answer.usage is not None
        assert await engine.count(generation) == answer.usage.input
    embedding = Embedding(model="m", inputs=("One sentence.", "Another one.", "A third."))
    embedded = await engine.embed(embedding)
    assert await engine.count(embedding) == embedded.usage.input > 3


def cosine(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """Of two vectors of length one."""
    return sum(x * y for x, y in zip(a, b, strict=True))


async def test_embeddings_do_not_depend_on_their_neighbours(engine: LlamaReplica) -> None:
    """Together or one by one the vectors point the same way, have length one, and keep order."""
    inputs = tuple(f"Sentence number {i} about {w}." for i, w in enumerate(["cats", "war", "tea"]))
    together = await engine.embed(Embedding(model="m", inputs=inputs * 14))
    assert len(together.vectors) == 42
    assert all(abs(cosine(v, v) - 1) < 1e-5 for v in together.vectors)
    for i, text in enumerate(inputs):
        alone = await engine.embed(Embedding(model="m", inputs=(text,)))
        assert cosine(alone.vectors[0], together.vectors[i]) > 0.999
        assert cosine(alone.vectors[0], together.vectors[i + 39]) > 0.999
    assert together.usage.input > 42
    assert together.usage.output == 0


async def test_embeddings_tell_what_is_computed_and_stop_when_nobody_waits(
    engine: LlamaReplica,
) -> None:
    """A hundred inputs take decodes of 32: who leaves after the first knows what was computed, and
    the rest is not. Who stays hears of every decode but the last, which is the answer."""
    inputs = tuple(f"Word {i}" for i in range(100))
    asked = Embedding(model="m", inputs=inputs)
    told: list[int] = []
    tokens = (await engine.embed(asked, told.append)).usage.input
    assert told == sorted(told)
    assert len(told) == 3
    assert 0 < told[0] < told[-1] < tokens
    heard = asyncio.Event()
    seen: list[int] = []

    def first(tokens: int) -> None:
        seen.append(tokens)
        heard.set()

    leaving = asyncio.create_task(engine.embed(asked, first))
    await heard.wait()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert seen[0] == told[0]
    assert len((await engine.embed(Embedding(model="m", inputs=("next",)))).vectors) == 1


async def test_embeddings_of_tokens_are_those_of_their_text(engine: LlamaReplica) -> None:
    """Inputs may be text or tokens, mixed."""
    both = await engine.embed(Embedding(model="m", inputs=("hello", (28_120,))))
    assert len(both.vectors) == 2


@pytest.mark.parametrize("inputs", [(), ("",), ((),), ((10**6,),)])
async def test_what_cannot_be_embedded_is_refused(engine: LlamaReplica, inputs: Any) -> None:
    """Nothing, an empty text, an unknown token."""
    with pytest.raises(RequestRefused) as caught:
        await engine.embed(Embedding(model="m", inputs=inputs))
    assert caught.value.param == "input"


async def test_other_dimensions_are_refused(engine: LlamaReplica) -> None:
    """The model makes vectors of one size; cutting them would not keep their meaning."""
    assert len((await engine.embed(
        Embedding(model="m", inputs=("a",), dimensions=576))).vectors[0]) == 576  # fmt: skip
    with pytest.raises(RequestRefused) as caught:
        await engine.embed(Embedding(model="m", inputs=("a",), dimensions=64))
    assert caught.value.param == "dimensions"


async def test_an_input_too_long_to_embed_is_refused(engine: LlamaReplica) -> None:
    """With the same sentence as a prompt."""
    with pytest.raises(ContextLengthExceeded, match="Prompt length 300 exceeds model context 256"):
        await engine.embed(Embedding(model="m", inputs=((1_000,) * 300,)))


SYSTEM = "You are the keeper of a tide mill. You answer in one short sentence and never guess. " * 5
"""More than enough tokens to be worth sharing."""


async def test_prompts_that_begin_alike_say_what_was_cached(engine: LlamaReplica) -> None:
    """Eight questions under one system prompt compute it once; the counts add up and the engine's
    totals show it."""
    before = engine.status()
    asked = [
        Generation(
            model="smollm2",
            messages=(
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"What is {i} and {i}?"},
            ),
            max_tokens=3,
            owner="mill",
        )
        for i in range(8)
    ]
    usages = [
        (await task)[-1].usage for task in [asyncio.create_task(pieces(engine, g)) for g in asked]
    ]
    cached = [usage.cached for usage in usages if usage is not None]
    assert cached.count(0) == 1
    assert sorted(cached)[1] > 80
    assert all(u is not None and u.cached < u.input for u in usages)
    after = engine.status()
    assert after.tokens_reused - before.tokens_reused == sum(cached)
    computed = after.tokens_prefilled - before.tokens_prefilled
    assert computed + sum(cached) == sum(u.input for u in usages if u is not None)


async def test_a_chat_reuses_its_own_turns(engine: LlamaReplica) -> None:
    """The second turn of a conversation begins with what the first one computed."""
    first = chat_of(SYSTEM, lane=Lane.INTERACTIVE, owner="mill-2", max_tokens=8)
    said = await one(engine, first)
    assert first.messages is not None
    second = Generation(
        model="smollm2",
        messages=(
            *first.messages,
            {"role": "assistant", "content": said.text},
            {"role": "user", "content": "Why?"},
        ),
        lane=Lane.INTERACTIVE,
        owner="mill-2",
        max_tokens=4,
    )
    usage = (await one(engine, second)).usage
    assert usage is not None
    assert said.usage is not None
    assert usage.cached >= said.usage.input
    stranger = await one(engine, chat_of(SYSTEM, owner="mill-3", max_tokens=1))
    assert stranger.usage is not None
    assert stranger.usage.cached == 0


async def test_a_deterministic_answer_is_the_same_whatever_else_runs(engine: LlamaReplica) -> None:
    """Alone, beside eight others, and after its prompt was computed before: one text, nothing
    cached."""
    asked = chat_of(SYSTEM + " What do you do?", deterministic=True, owner="mill-4", max_tokens=24)
    alone = await one(engine, asked)
    noise = [
        asyncio.create_task(one(engine, chat_of(SYSTEM + str(i), owner="mill-4", max_tokens=20)))
        for i in range(8)
    ]
    beside = await asyncio.gather(one(engine, asked), one(engine, asked))
    await asyncio.gather(*noise)
    again = await one(engine, asked)
    assert alone.usage is not None
    assert alone.usage.cached == 0
    assert {alone.text, beside[0].text, beside[1].text, again.text} == {alone.text}
    assert alone == beside[0] == beside[1] == again
