"""What it costs to copy, park, move and leave holes, next to computing again.

Run it with ``python bench/bench_engine_memory.py``. One line per length of a sequence, best of
five, in milliseconds, on one thread; then a step of eight sequences on neighbouring ids and on
others, which is what the move of sequences into holes saves.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

LENGTHS = (32, 100, 400, 1_500)
CONTEXT = 2_048


def best_ms(run: Callable[[], object], before: Callable[[], object], n: int = 5) -> float:
    """Milliseconds of the fastest of ``n`` runs."""
    times = []
    for _ in range(n):
        before()
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return min(times) * 1e3


def main() -> None:
    """Print both tables."""
    from tidemill.backends.llama.model import Model, silence
    from tidemill.backends.llama.native_stepper import stepper_class
    from tidemill.backends.llama.sampling import Chooser
    from tidemill.backends.llama.weights import resolve
    from tidemill.scheduler.slots import PARKING_BYTES, Slots
    from tidemill.scheduler.steps import Chunk
    from tidemill.types import Sampling

    silence(4)
    model = Model(resolve("smollm2"), 0)
    kind, _ = stepper_class()
    stepper = kind(model, slots=16, context=CONTEXT, threads=1, headroom=0)
    stepper.open()
    slots = Slots(stepper, parking=PARKING_BYTES)
    greedy = Chooser(model, Sampling())

    def compute(length: int) -> None:
        for start in range(0, length, 512):
            tokens = [1_000 + i for i in range(start, min(length, start + 512))]
            stepper.step([Chunk(key=0, seq=0, start=start, tokens=tokens, chooser=None)])

    aside: list[int] = []

    def park_once() -> None:
        aside.append(slots.put_aside(0) or 0)

    print(f"{'tokens':>6} {'compute':>9} {'copy':>7} {'park':>7} {'resume':>7}")
    for length in LENGTHS:
        again = best_ms(partial(compute, length), lambda: stepper.forget(0), 2)
        copy = best_ms(lambda: stepper.copy(0, 1), lambda: stepper.forget(1))
        park_once()
        park = best_ms(park_once, lambda: slots.release(aside.pop()))
        resume = best_ms(
            lambda: slots.fetch(aside[0], 1, keep=True),
            lambda: stepper.forget(1),
        )
        slots.release(aside.pop())
        stepper.forget(0)
        stepper.forget(1)
        print(f"{length:6} {again:9.1f} {copy:7.2f} {park:7.2f} {resume:7.2f}")

    def steps(ids: list[int]) -> None:
        for at in range(1, 9):
            stepper.step(
                [Chunk(key=i, seq=i, start=at, tokens=[50 + at], chooser=greedy) for i in ids]
            )

    def begin(ids: list[int]) -> None:
        for i in range(16):
            stepper.forget(i)
        stepper.step([Chunk(key=i, seq=i, start=0, tokens=[5], chooser=greedy) for i in ids])

    layouts = {
        "0 to 7": list(range(8)),
        "0 to 6 and 8": [*range(7), 8],
        "every second": list(range(0, 16, 2)),
    }
    for name, ids in layouts.items():
        took = best_ms(partial(steps, ids), partial(begin, ids)) / 8
        print(f"a step of eight sequences, ids {name}: {took:.1f} ms")
    stepper.close()


if __name__ == "__main__":
    main()
