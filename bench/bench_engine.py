"""The engine against llama.cpp's own programs, and against itself. Run: make bench-engine

Same requests, same number of compute threads, medians of interleaved repetitions. llama-server gets
the file as the user has it, with its best number of slots for each kind of request, and once the
weights that the engine uses; batched-bench and the bare loop get them as Q8_0. What was not
compared is said in the last line, which is the only one made for a machine::

    engine: A x llama-server, B x batched-bench, prefix C x, ttft D x idle
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from openai import OpenAI

from bench import llama_tools
from bench.conftest import request_line
from tests.worlds.server import Server

if TYPE_CHECKING:
    from tidemill.backends.llama.layout import Weights

_ENDED = ("completed", "failed", "expired", "cancelled")
PROMPT, ANSWER = 100, 64
WORDS = (Path(__file__).with_name("prose.txt").read_text("utf-8")).split()
_unique = itertools.count()


def words(n: int, start: int) -> str:
    """``n`` words of prose, other ones for each ``start``."""
    return " ".join(WORDS[(start * 37 + i) % len(WORDS)] for i in range(n))


def lines(n: int, *, system: str = "", answer: int = ANSWER) -> list[bytes]:
    """Requests of about ``PROMPT`` tokens, each with a beginning of its own after ``system``."""
    made = []
    for no in range(n):
        text = f"{next(_unique)}: {words(70, no)}. Continue this story."
        messages = [{"role": "user", "content": text}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        made.append(
            request_line(no, "smollm2", text, messages=messages, max_tokens=answer, temperature=0)
        )
    return made


def run_batch(client: OpenAI, requests: list[bytes], folder: Path) -> tuple[float, int]:
    """Generated tokens/s from the upload to the results, and prompt tokens that were cached."""
    path = folder / "in.jsonl"
    path.write_bytes(b"".join(requests))
    begun = time.perf_counter()
    with path.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    batch: Any = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.status not in _ENDED:
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    client.files.content(batch.output_file_id).read()
    took = time.perf_counter() - begun
    assert batch.request_counts.completed == len(requests), batch
    return batch.usage.output_tokens / took, batch.usage.input_tokens_details.cached_tokens


def first_token_s(client: OpenAI) -> float:
    """Seconds until a streamed chat shows its first character."""
    text = f"{next(_unique)} {words(30, next(_unique))}?"
    begun = time.perf_counter()
    stream = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": text}],
        max_tokens=4,
        temperature=0,
        stream=True,
    )
    took = 0.0
    for event in stream:
        if not took and event.choices and event.choices[0].delta.content:
            took = time.perf_counter() - begun
    return took


def p95(values: list[float]) -> float:
    """The 95th percentile."""
    return sorted(values)[max(0, -(-len(values) * 95 // 100) - 1)]


def bare_loop(files: Weights, *, sequences: int, threads: int, reference: bool = False) -> float:
    """Generated tokens/s of the loop and its engine alone, over one block of requests.
    ``reference``: with the steps in Python."""
    from tidemill.backends.llama import attention
    from tidemill.backends.llama.model import Model
    from tidemill.backends.llama.native_stepper import stepper_class
    from tidemill.backends.llama.sampling import Chooser
    from tidemill.backends.llama.stepper import Stepper
    from tidemill.errors import TidemillError
    from tidemill.scheduler.loop import Loop, Sampled, Ticket
    from tidemill.types import FinishReason, Lane, Sampling

    made = itertools.count()

    class Counted:
        def reused(self, tokens: int) -> None:
            """Nothing is."""

        def take(self, sampled: Sampled) -> FinishReason | None:
            next(made)
            return None

        def finish(self, reason: FinishReason) -> None:
            done.release()

        def fail(self, error: TidemillError) -> None:
            raise error

        def close(self) -> None:
            """Nothing to free."""

    done = threading.Semaphore(0)
    weights = Model(files.path, 0, files.adapters)
    kind = Stepper if reference else stepper_class()[0]
    attention.offer()
    context = 256 * -(-(PROMPT + ANSWER) // 256)
    stepper = kind(weights, slots=sequences, context=context, threads=threads, headroom=0)
    stepper.open()
    loop: Loop[Chooser] = Loop(stepper)
    greedy = Chooser(weights, Sampling())
    for key in range(sequences):
        prompt = weights.tokenize(words(PROMPT, key), special=True, parse=False)[:PROMPT]
        prompt[0] = 1_000 + key
        loop.submit(
            Ticket(
                key=key, lane=Lane.BATCH, prompt=prompt, limit=ANSWER, chooser=greedy,
                answer=Counted(),
            )
        )  # fmt: skip
    engine = threading.Thread(target=loop.run)
    begun = time.perf_counter()
    engine.start()
    for _ in range(sequences):
        done.acquire()
    took = time.perf_counter() - begun
    loop.close()
    engine.join()
    weights.close()
    return next(made) / took


def interactive(client: OpenAI, n: int, folder: Path, batch: list[bytes]) -> tuple[float, float]:
    """95th percentile of the time to the first token, idle and beside a batch, in seconds."""
    first_token_s(client)
    idle = [first_token_s(client) for _ in range(n)]
    worker = threading.Thread(target=run_batch, args=(client, batch, folder))
    worker.start()
    time.sleep(3)
    beside: list[float] = []
    while len(beside) < n and worker.is_alive():
        beside.append(first_token_s(client))
    worker.join()
    if len(beside) < n:
        print(f"(the batch ended after {len(beside)} of {n} chats)")
    return p95(idle), p95(beside)


def rated(name: str, repetitions: int, *runs: Callable[[], float]) -> list[float]:
    """Medians of runs that take turns."""
    figures: list[list[float]] = [[] for _ in runs]
    for _ in range(repetitions):
        for kept, run in zip(figures, runs, strict=True):
            kept.append(run())
    medians = [statistics.median(kept) for kept in figures]
    print(f"{name}: " + " against ".join(f"{m:.1f}" for m in medians) + " generated tokens/s")
    return medians


class Comparison:
    """Requests of one kind, new ones each time, so that nothing of an earlier run is reused."""

    def __init__(
        self, name: str, client: OpenAI, folder: Path, make: Callable[[], list[bytes]]
    ) -> None:
        self._name, self._client, self._folder, self._make = name, client, folder, make

    def run(self) -> float:
        """Generated tokens/s of ours."""
        return run_batch(self._client, self._make(), self._folder)[0]

    def against(
        self,
        programs: Path,
        weights: Weights,
        counts: list[int],
        threads: int,
        repetitions: int,
    ) -> list[float]:
        """Medians of ours and of llama-server's with the best of these numbers of slots."""

        def started(slots: int) -> llama_tools.LlamaServer:
            return llama_tools.LlamaServer(
                programs, weights, slots=slots, context=1024, threads=threads
            )

        tried = {}
        for slots in counts if len(counts) > 1 else ():
            with started(slots) as theirs:
                theirs.answer(lines(slots))
                tried[slots] = theirs.answer(self._make())
            print(f"{self._name}: llama-server with {slots} slots: {tried[slots]:.1f}")
        best = max(tried, key=lambda slots: tried[slots], default=counts[0])
        with started(best) as theirs:
            theirs.answer(lines(best))
            name = f"{self._name} (against llama-server with {best} slots)"
            return rated(name, repetitions, self.run, lambda: theirs.answer(self._make()))


def main(arguments: list[str] | None = None) -> None:
    """Print the figures, then one line."""
    options: Any = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--requests", type=int, default=64)
    options.add_argument("--slots", type=int, default=32)
    options.add_argument("--their-slots", default="8,16,32", help="llama-server's; the best counts")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--repetitions", type=int, default=3)
    options.add_argument("--chats", type=int, default=40)
    options.add_argument("--weights", default="auto", choices=("auto", "as-is", "q8_0", "q4_0"))
    options.add_argument("--tools", type=Path, help="where llama.cpp's programs are or are built")
    given = options.parse_args(arguments)
    from tidemill.backends.llama.layout import Weights, laid_out
    from tidemill.backends.llama.model import silence
    from tidemill.backends.llama.weights import resolve

    silence(4)
    given_file = resolve("smollm2")
    model = laid_out(given_file, given.weights, on_gpu=False, threads=1, say=print)
    programs = llama_tools.build(given.tools.resolve()) if given.tools else None
    n, slots, threads = given.requests, given.slots, given.threads
    ratios = {"llama-server": "not compared", "batched-bench": "not compared"}

    # llama-batched-bench takes no adapter.
    plain_file = laid_out(given_file, "q8_0", on_gpu=False, threads=1, say=print)
    loop_runs = [lambda: bare_loop(plain_file, sequences=slots, threads=threads)]
    if programs is not None:
        loop_runs.append(
            lambda: llama_tools.batched_bench(
                programs,
                plain_file.path,
                prompt=PROMPT,
                answer=ANSWER,
                sequences=slots,
                threads=threads,
            )
        )
    bare = rated("bare loop (against batched-bench)", given.repetitions, *loop_runs)
    if len(bare) > 1:
        ratios["batched-bench"] = f"{bare[0] / bare[1]:.2f} x batched-bench"

    settings: dict[str, Any] = {
        "slots": slots, "threads": threads, "max_context_length": 1024, "weights": given.weights,
        "model_name": "smollm2",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, Server("llama", **settings) as server:
        client = OpenAI(base_url=f"{server.base_url}/v1", api_key="-", timeout=3_600)
        place = Path(folder)
        run_batch(client, lines(slots), place)
        whole_prompts = Comparison("batch", client, place, lambda: lines(n))
        shared_prompts = Comparison(
            "shared prompt", client, place, lambda: lines(n, system=words(300, next(_unique)))
        )
        # The same length of prompt, and nothing in common.
        apart = [
            line.replace(b'"line-0"', b'"line-%d"' % no)
            for no in range(n)
            for line in lines(1, system=f"{no} {words(300, no)}")
        ]
        if programs is not None:
            counts = [int(count) for count in given.their_slots.split(",")]
            file = Weights(given_file)
            whole, again = (
                kind.against(programs, file, counts, threads, given.repetitions)
                for kind in (whole_prompts, shared_prompts)
            )
            ratios["llama-server"] = f"{whole[0] / whole[1]:.2f} x llama-server"
            prefix = f"{again[0] / again[1]:.2f} x llama-server's"
            print("and with equal weights:")
            for kind in (whole_prompts, shared_prompts):
                kind.against(programs, model, [slots], threads, 1)
        else:
            whole = rated("batch", given.repetitions, whole_prompts.run)
            again = rated("shared prompt", given.repetitions, shared_prompts.run)
            prefix = ""
        print(f"from file to results: {whole[0] / bare[0]:.2f} x the bare loop")
        alone, _ = run_batch(client, apart, place)
        print(f"prompts as long with nothing in common: {alone:.1f} generated tokens/s")
        prefix = prefix or f"{again[0] / alone:.2f} x none shared"
        _, cached = run_batch(client, lines(n, system=words(300, next(_unique))), place)
        print(f"prompt tokens that were cached in a batch of {n}: {cached}")
        long = lines(4 * slots, answer=4 * ANSWER)
        idle, beside = interactive(client, given.chats, place, long)
        print(f"first token, 95th percentile: {idle * 1e3:.0f} ms idle, {beside * 1e3:.0f} beside")
    print(
        f"engine: {ratios['llama-server']}, {ratios['batched-bench']}, prefix {prefix}, "
        f"ttft {beside / idle:.2f} x idle"
    )


if __name__ == "__main__":
    main()
