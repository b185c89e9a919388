"""The engine process dies, and the server does not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.backends.llama.llama_replica import LlamaReplica, replica
from tidemill.backends.llama.supervisor import CRASHES, WITHIN_S, Deaths
from tidemill.errors import EngineLost, EngineUnavailable, RequestRefused, SettingsError
from tidemill.ports import Replica
from tidemill.types import Embedding, EngineSpec, Generation

ASKED = Generation(model="m", text="Once upon a time", max_tokens=4)
ENDLESS = Generation(model="m", text="Once upon a time", stream=True)


async def text(engine: LlamaReplica, generation: Generation = ASKED) -> str:
    """An answer's text."""
    return "".join([piece.text async for piece in engine.generate(generation)])


async def dead(engine: LlamaReplica) -> None:
    """Wait until the server has noticed that its engine process is gone."""
    async with asyncio.timeout(10):
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
    """Whoever waits is told to try again, and trying again works, in a new process."""
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
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, EngineLost) or outcome == expected
    assert await text(engine) == expected
    assert engine.pid not in (None, pid)
    status = engine.status()
    assert (status.healthy, status.restarts) == (True, restarts + 1)
    assert (status.active, status.waiting, status.parked) == (0, 0, 0)


@pytest.mark.anyio
@pytest.mark.llama
async def test_an_engine_that_keeps_dying_is_unhealthy_until_it_answers(
    engine: LlamaReplica,
) -> None:
    """Three deaths without an answer in between: requests are refused with the reason, not held;
    after a pause it is tried again."""
    before = await text(engine)
    for _ in range(CRASHES - 1):
        kill(engine)
        await dead(engine)
        await asyncio.wait_for(engine.count(ASKED), 30)
    kill(engine)
    await dead(engine)
    with pytest.raises(EngineUnavailable, match="keeps ending"):
        await asyncio.wait_for(engine.count(ASKED), 30)
    status = engine.status()
    assert not status.healthy
    assert status.reason == "The engine process keeps ending: killed by SIGKILL."
    assert engine.pid is None
    with pytest.raises(EngineUnavailable, match="keeps ending") as caught:
        await text(engine)
    assert not isinstance(caught.value, EngineLost)
    async with asyncio.timeout(30):
        while not engine.status().healthy:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.05)
    assert await text(engine) == before


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
        line = await asyncio.wait_for(server.stdout.readline(), 60)
        pid = int(line) if line.strip().isdigit() else 0
    server.kill()
    await server.wait()
    async with asyncio.timeout(10):
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
