"""The engine process dies, and the server does not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.backends.llama.poisoned import DEADLY
from tests.backends.llama.poisoned import ENDLESS as HANGING
from tidemill.backends.llama import supervisor
from tidemill.backends.llama.blackbox import Blackbox, shared_file
from tidemill.backends.llama.llama_replica import LlamaReplica, replica
from tidemill.backends.llama.supervisor import CRASHES, WITHIN_S, Deaths
from tidemill.errors import (
    EngineCrash,
    EngineDown,
    EngineLost,
    EngineUnavailable,
    RequestRefused,
    SettingsError,
    refusal,
)
from tidemill.ports import Replica
from tidemill.types import Embedding, EngineSpec, Generation

ASKED = Generation(model="m", text="Once upon a time", max_tokens=4)
ENDLESS = Generation(model="m", text="Once upon a time", stream=True)


async def text(engine: LlamaReplica, generation: Generation = ASKED) -> str:
    """An answer's text."""
    return "".join([piece.text async for piece in engine.generate(generation)])


async def dead(engine: LlamaReplica) -> None:
    """Wait until the server has noticed that its engine process is gone."""
    async with asyncio.timeout(120):
        while engine.status().healthy:  # noqa: ASYNC110 - a child process has no event to wait on
            await asyncio.sleep(0.01)


def kill(engine: LlamaReplica, how: signal.Signals = signal.SIGKILL) -> int:
    """End the engine process; returns the pid that it had."""
    pid = engine.pid
    assert pid is not None
    os.kill(pid, how)
    return pid


@pytest.mark.anyio
@pytest.mark.llama
async def test_a_replica_is_a_replica(engine: LlamaReplica) -> None:
    """It has everything that the server's seam asks for."""
    seam: Replica = engine
    assert seam.status().slots == 4


@pytest.mark.anyio
@pytest.mark.llama
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGABRT])
async def test_a_killed_engine_costs_the_answers_in_flight_and_one_restart(
    engine: LlamaReplica, how: signal.Signals
) -> None:
    """Whoever has heard something is told to try again, which works, in a new process; whoever has
    not is answered there."""
    expected = await text(engine)
    restarts = engine.status().restarts
    answer = engine.generate(ENDLESS)
    assert (await anext(answer)).finish is None
    waiting = [asyncio.create_task(text(engine)) for _ in range(6)]
    await asyncio.sleep(0)
    pid = kill(engine, how)
    with pytest.raises(EngineLost, match=f"killed by {how.name}"):
        async for _piece in answer:
            pass
    for outcome in await asyncio.gather(*waiting):
        assert outcome.startswith(expected[:3])
    assert await text(engine) == expected
    assert engine.pid not in (None, pid)
    status = engine.status()
    assert (status.healthy, status.restarts) == (True, restarts + 1)
    assert (status.active, status.waiting, status.parked) == (0, 0, 0)


@pytest.mark.anyio
@pytest.mark.llama
async def test_an_engine_that_keeps_dying_is_unhealthy_until_it_answers(
    engine: LlamaReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three deaths without an answer in between: requests are refused with the reason, not held;
    after a pause it is tried again."""
    before = await text(engine)
    monkeypatch.setattr(supervisor, "WITHIN_S", 3600.0)  # a start may take long here
    for _ in range(CRASHES - 1):
        kill(engine)
        await dead(engine)
        await asyncio.wait_for(engine.count(ASKED), 120)
    kill(engine)
    await dead(engine)
    with pytest.raises(EngineUnavailable, match="keeps ending"):
        await asyncio.wait_for(engine.count(ASKED), 120)
    status = engine.status()
    assert not status.healthy
    assert status.reason == "The engine process keeps ending: killed by SIGKILL."
    assert engine.pid is None
    with pytest.raises(EngineDown, match="keeps ending") as caught:
        await text(engine)
    waits = refusal(caught.value)
    assert (waits.retry, waits.spend, waits.rest) == (True, False, True)
    async with asyncio.timeout(120):
        while not engine.status().healthy:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.05)
    assert await text(engine) == before


@pytest.fixture
async def weak(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[LlamaReplica]:
    """An engine that two tokens kill; its parameter is the time of a step, a minute by default."""
    monkeypatch.setattr(supervisor, "CHILD", (str(Path(__file__).with_name("poisoned.py")),))
    engine = LlamaReplica(
        EngineSpec(
            model="smollm2",
            slots=4,
            context_length=256,
            threads=1,
            step_timeout_s=getattr(request, "param", 60.0),
        )
    )
    await engine.start()
    yield engine
    await engine.close()


def of_tokens(*tokens: int) -> Generation:
    """A short completion of a prompt of tokens."""
    return Generation(model="m", tokens=tokens, max_tokens=12)


@pytest.mark.anyio
@pytest.mark.llama
async def test_a_line_that_kills_the_engine_is_found_and_the_others_go_on(
    weak: LlamaReplica,
) -> None:
    """Two of nine kill it. Each is the end of three processes and fails by its own name; all
    others are answered, and nobody had to ask twice."""
    asked = [of_tokens(1_000 + i, 1_001) for i in range(9)]
    asked[2], asked[7] = of_tokens(5, DEADLY), of_tokens(6, DEADLY, 7)
    answers = await asyncio.wait_for(
        asyncio.gather(*(text(weak, g) for g in asked), return_exceptions=True), 280
    )
    for i, answer in enumerate(answers):
        if i in (2, 7):
            assert isinstance(answer, EngineCrash)
            assert "died 3 times" in answer.message
            assert "killed by SIGABRT" in answer.message
            failed = refusal(answer)
            assert (failed.status_code, failed.code, failed.retry) == (500, "engine_crash", False)
        else:
            assert isinstance(answer, str)
            assert answer
    status = weak.status()
    assert status.healthy
    assert 4 <= status.restarts <= 6
    assert status.waiting == 0


@pytest.mark.anyio
@pytest.mark.llama
@pytest.mark.parametrize("weak", [5.0], indirect=True)
async def test_a_step_that_never_ends_is_ended(weak: LlamaReplica) -> None:
    """Even with the interpreter stuck; whoever hung it is found like whoever kills it."""
    hung = asyncio.create_task(text(weak, of_tokens(5, HANGING)))
    fine = [text(weak, of_tokens(1_000 + i, 1_001)) for i in range(3)]
    assert all(await asyncio.wait_for(asyncio.gather(*fine), 180))
    with pytest.raises(EngineCrash, match="a step did not end in time"):
        await asyncio.wait_for(hung, 180)


def test_a_blackbox_names_who_was_at_work() -> None:
    """Those in the step, or the one that was being read, and nobody when all was done."""
    with shared_file() as file:
        ours, theirs = Blackbox(file.fileno()), Blackbox(file.fileno())
        assert ours.suspects() == frozenset()
        theirs.computing([7, 8, 9])
        assert ours.suspects() == {7, 8, 9}
        theirs.computing([10])
        assert ours.suspects() == {10}
        theirs.reading(11)
        assert ours.suspects() == {11}
        theirs.reading(0)
        theirs.computing(())
        assert ours.suspects() == frozenset()
        theirs.computing(list(range(1, 257)))
        assert len(ours.suspects()) == 256
        ours.clear()
        assert theirs.suspects() == frozenset()
        ours.close()
        theirs.close()


@pytest.mark.anyio
@pytest.mark.llama
async def test_an_engine_ends_with_its_server(engine: LlamaReplica, tmp_path: Path) -> None:
    """A server that is killed outright leaves no engine process behind."""
    script = (
        "import asyncio, sys\n"
        "from tidemill.backends.llama import replica\n"
        "from tidemill.types import EngineSpec\n"
        "async def main():\n"
        "    r = replica(EngineSpec(model='smollm2', slots=1, context_length=256, threads=1))\n"
        "    await r.start()\n"
        "    print(r.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=subprocess.PIPE, cwd=tmp_path
    )
    assert server.stdout is not None
    pid = 0
    while not pid:
        line = await asyncio.wait_for(server.stdout.readline(), 120)
        pid = int(line) if line.strip().isdigit() else 0
    server.kill()
    await server.wait()
    async with asyncio.timeout(120):
        while _runs(pid):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)


def _runs(pid: int) -> bool:
    """True until the process has ended, reaped by anybody or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.anyio
@pytest.mark.llama
async def test_closing_ends_the_process_and_tells_whoever_waits() -> None:
    """No process is left, and nothing can be asked any more."""
    closing = replica(EngineSpec(model="smollm2", slots=1, context_length=256, threads=1))
    with pytest.raises(EngineUnavailable, match="was not started"):
        await text(closing)
    await closing.start()
    pid = closing.pid
    assert pid is not None
    answer = closing.generate(ENDLESS)
    await anext(answer)
    await closing.close()
    with pytest.raises(EngineLost, match="was stopped"):
        async for _piece in answer:
            pass
    with pytest.raises(EngineUnavailable, match="was stopped"):
        await text(closing)
    assert not _runs(pid)
    assert not closing.status().healthy


@pytest.mark.anyio
@pytest.mark.llama
async def test_an_embeddings_replica_embeds_and_does_nothing_else(engine: LlamaReplica) -> None:
    """Its card says so, a completion is refused, and its vectors are those of the chat engine."""
    asked = Embedding(model="m", inputs=("a cat", "a dog sleeps"))
    embedding = replica(EngineSpec(model="smollm2", name="vectors", embedding=True, threads=1))
    await embedding.start()
    card = embedding.card
    assert (card.id, card.chat, card.embeddings, card.tools) == ("vectors", False, True, False)
    assert card.context_length == 2048
    vectors = (await embedding.embed(asked)).vectors
    with pytest.raises(RequestRefused, match="embeddings only"):
        await text(embedding)
    await embedding.close()
    for mine, other in zip(vectors, (await engine.embed(asked)).vectors, strict=True):
        assert sum(a * b for a, b in zip(mine, other, strict=True)) > 0.999


@pytest.mark.anyio
@pytest.mark.llama
async def test_a_file_that_llama_cannot_load_is_one_sentence(tmp_path: Path) -> None:
    """It begins like a GGUF and is none: the start fails, and no process is left."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\x03" * 64)
    broken = replica(EngineSpec(model=str(path)))
    with pytest.raises(EngineUnavailable, match=r"cannot load the model .*broken\.gguf\.$"):
        await broken.start()
    assert broken.pid is None
    await broken.close()


@pytest.mark.anyio
async def test_an_engine_without_its_library_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The package is an extra of the server."""
    monkeypatch.setattr("tidemill.backends.llama.llama_replica.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install 'tidemill\[llama\]'"):
        await replica(EngineSpec(model="smollm2")).start()


@pytest.mark.anyio
async def test_a_model_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    """Before any process is started."""
    with pytest.raises(SettingsError, match="Cannot read the model"):
        await replica(EngineSpec(model=str(tmp_path / "none.gguf"))).start()


def test_pauses_grow_and_an_answer_ends_them() -> None:
    """None after the first death, then 0.5, 1, 2 ... seconds up to half a minute."""
    deaths, pauses = Deaths(), []
    for i in range(10):
        deaths.add(float(i))
        pauses.append(deaths.pause_s)
    assert pauses == [0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    deaths.clear()
    deaths.add(11.0)
    assert deaths.pause_s == 0
    assert not deaths.looping


def test_three_quick_deaths_are_a_loop_and_slow_ones_are_not() -> None:
    """Without an answer between them, within a minute."""
    quick, slow = Deaths(), Deaths()
    for i in range(CRASHES):
        quick.add(i * WITHIN_S / CRASHES)
        slow.add(i * WITHIN_S * 3)
    assert quick.looping
    assert not slow.looping
