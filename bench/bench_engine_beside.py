"""What the engine's work costs others, and what others cost it. Run: make bench-engine

One table row for each question, as the ratio of runs that take turns: steps beside a busy thread
of the same process (in C++ and in Python), 256 slots against 16, a batch beside a busy process and
with a schema on every line, a chat beside a full batch, embeddings together and one by one, memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil
from openai import OpenAI

from bench.bench_engine import ANSWER, bare_loop, lines, p95, run_batch, words
from tests.worlds.server import Server

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 12},
        "good": {"type": "boolean"},
    },
    "required": ["title", "words", "good"],
    "additionalProperties": False,
}


def say(question: str, one: float, other: float, unit: str) -> None:
    """A row: both figures and their ratio."""
    print(f"{question:58} {one:9.1f} {other:9.1f} {unit:10} {one / other:5.2f}", flush=True)


def turns(n: int, *runs: Callable[[], float]) -> list[float]:
    """Medians of runs that take turns."""
    figures = [[run() for run in runs] for _ in range(n)]
    return [statistics.median(column) for column in zip(*figures, strict=True)]


def gaps_ms(client: OpenAI, no: int) -> list[float]:
    """Milliseconds between the pieces of a streamed answer."""
    stream = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": f"{no} {words(40, no)}. Tell me more."}],
        max_tokens=32,
        temperature=0,
        stream=True,
    )
    times = [time.perf_counter() for event in stream if event.choices]
    return [1e3 * (b - a) for a, b in pairwise(times)]


@contextmanager
def busy_process() -> Iterator[None]:
    """A process that computes for as long as this lasts."""
    process = multiprocessing.get_context("spawn").Process(target=spin, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


@contextmanager
def busy_thread() -> Iterator[None]:
    """A thread of this process that holds the interpreter's lock whenever it can."""
    over = threading.Event()
    thread = threading.Thread(target=spin, args=(over,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def spin(over: threading.Event | None = None) -> None:
    """Compute, until told otherwise."""
    while over is None or not over.is_set():
        sum(range(1_000))


def with_schema(requests: list[bytes]) -> list[bytes]:
    """The same requests, to be answered as ``SCHEMA`` says."""
    made = []
    for line in requests:
        asked = json.loads(line)
        schema = {"name": "text", "schema": SCHEMA, "strict": True}
        asked["body"]["response_format"] = {"type": "json_schema", "json_schema": schema}
        made.append(json.dumps(asked).encode() + b"\n")
    return made


def engine_mib() -> float:
    """Memory of the engine process that runs now."""
    for child in psutil.Process().children(recursive=True):
        if "tidemill.backends.llama.child" in child.cmdline():
            return float(child.memory_info().rss) / (1 << 20)
    raise SystemExit("there is no engine process")


def embedded_per_s(client: OpenAI, together: int, n: int = 96) -> float:
    """Inputs of 30 words embedded in a second, in requests of ``together``."""
    inputs = [f"{time.perf_counter_ns()} {words(30, k)}" for k in range(n)]
    begun = time.perf_counter()
    for k in range(0, n, together):
        client.embeddings.create(model="smollm2", input=inputs[k : k + together])
    return n / (time.perf_counter() - begun)


def beside_a_server(n: int, repetitions: int) -> None:
    """Rows that need a server."""
    settings: dict[str, Any] = {
        "slots": 16, "threads": 1, "max_context_length": 1024, "model_name": "smollm2",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, Server("llama", **settings) as server:
        client = OpenAI(base_url=f"{server.base_url}/v1", api_key="-", timeout=3_600)
        place = Path(folder)

        def batch() -> float:
            return run_batch(client, lines(n), place)[0]

        def disturbed() -> float:
            with busy_process():
                return batch()

        def schema() -> float:
            return run_batch(client, with_schema(lines(n)), place)[0]

        run_batch(client, lines(16), place)
        alone, neighbour, valid = turns(repetitions, batch, disturbed, schema)
        say("batch beside a busy process / alone", neighbour, alone, "tokens/s")
        say("batch with a schema on every line / without", valid, alone, "tokens/s")
        idle = [gap for no in range(8) for gap in gaps_ms(client, no)]
        full = threading.Thread(
            target=run_batch, args=(client, lines(64, answer=4 * ANSWER), place)
        )
        full.start()
        time.sleep(3)
        beside = [gap for no in range(8, 16) for gap in gaps_ms(client, no)]
        if not full.is_alive():
            print("(the batch ended before the chats)")
        full.join()
        say("between tokens of a chat beside a batch / idle, median",
            statistics.median(beside), statistics.median(idle), "ms")  # fmt: skip
        say("the same, 95th percentile", p95(beside), p95(idle), "ms")
        many, one = turns(
            repetitions, lambda: embedded_per_s(client, 32), lambda: embedded_per_s(client, 1)
        )
        say("embeddings, 32 in a request / one by one", many, one, "inputs/s")


def in_this_process(repetitions: int, *, slots: int) -> None:
    """Rows about the loop alone."""
    from tidemill.backends.llama.layout import laid_out
    from tidemill.backends.llama.model import silence
    from tidemill.backends.llama.weights import resolve

    silence(4)
    files = laid_out(resolve("smollm2"), "auto", on_gpu=False, threads=1, say=print)
    for reference in (False, True):

        def alone(reference: bool = reference) -> float:
            return bare_loop(files, sequences=16, threads=1, reference=reference)

        def disturbed(reference: bool = reference) -> float:
            with busy_thread():
                return bare_loop(files, sequences=16, threads=1, reference=reference)

        with_thread, without = turns(repetitions, disturbed, alone)
        where = "Python" if reference else "C++"
        say(f"steps in {where} beside a busy thread / alone", with_thread, without, "tokens/s")
    many, few = turns(
        1,
        lambda: bare_loop(files, sequences=slots, threads=1),
        lambda: bare_loop(files, sequences=16, threads=1),
    )
    say(f"{slots} slots / 16 slots", many, few, "tokens/s")


def memory() -> None:
    """Rows about what a slot takes."""
    taken = {}
    for slots in (1, 16, 64):
        settings: dict[str, Any] = {
            "slots": slots, "threads": 1, "max_context_length": 256, "interactive_headroom": 0,
        }  # fmt: skip
        with Server("llama", **settings):
            taken[slots] = engine_mib()
    for more in (16, 64):
        say(f"memory of the engine with {more} slots of 256 tokens / 1 slot",
            taken[more], taken[1], "MiB")  # fmt: skip
    print(f"a slot of 256 tokens takes {(taken[64] - taken[16]) / 48:.1f} MiB")


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    options: Any = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--requests", type=int, default=32)
    options.add_argument("--repetitions", type=int, default=2)
    options.add_argument("--slots", type=int, default=256, help="to be compared with 16")
    given = options.parse_args(arguments)
    print(f"{'':58} {'this':>9} {'that':>9} {'':10} ratio")
    in_this_process(given.repetitions, slots=given.slots)
    beside_a_server(given.requests, given.repetitions)
    memory()


if __name__ == "__main__":
    main()
