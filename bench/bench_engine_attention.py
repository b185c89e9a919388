"""What this package's attention saves a step on this machine's CPU. Run this file with Python.

Each case runs in a process of its own: with llama.cpp's attention, with this package's, and with
this package's that is told what the sequences have in common. Medians of steps in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

STEPS = 24
KINDS = ("llama.cpp", "ours", "shared")
CASES = [(8, 0, 100), (16, 0, 100), (32, 0, 100), (16, 400, 60), (32, 400, 60), (4, 0, 2000)]
"""Sequences, tokens that they have in common, tokens of their own."""


def measure(kind: str, sequences: int, common: int, own: int, threads: int) -> tuple[float, float]:
    """Milliseconds for all prompts' own tokens, and of one step of one token each."""
    from tidemill.backends.llama import attention
    from tidemill.backends.llama.layout import laid_out
    from tidemill.backends.llama.model import Model, silence
    from tidemill.backends.llama.native_stepper import stepper_class
    from tidemill.backends.llama.sampling import Chooser
    from tidemill.backends.llama.weights import resolve
    from tidemill.scheduler.steps import Chunk
    from tidemill.types import Sampling

    silence(4)
    files = laid_out(resolve("smollm2"), "auto", on_gpu=False, threads=1, say=lambda _: None)
    if kind != "llama.cpp":
        why = attention.offer()
        assert why is None, why
        if kind == "ours":
            attention._share[:] = [lambda beginnings: None]
    model = Model(files.path, 0, files.adapters)
    step_class, _ = stepper_class()
    context = 256 * -(-(common + own + STEPS + 1) // 256)
    stepper = step_class(model, slots=sequences, context=context, threads=threads, headroom=0)
    stepper.open()
    greedy = Chooser(model, Sampling())

    def tokens(start: int, n: int) -> list[int]:
        return [1_000 + (start * 131 + i * 7) % 20_000 for i in range(n)]

    for start in range(0, common, 500):
        piece = tokens(0, common)[start : start + 500]
        stepper.step([Chunk(key=0, seq=0, start=start, tokens=piece, chooser=None)])
    for seq in range(1, sequences if common else 0):
        stepper.copy(0, seq)
    begun = time.perf_counter()
    together = max(1, 500 // own)
    for first in range(0, sequences, together):
        group = range(first, min(sequences, first + together))
        for start in range(0, own, 500):
            stepper.step(
                [
                    Chunk(
                        key=seq, seq=seq, start=common + start, chooser=None,
                        tokens=tokens(seq + 1, own)[start : start + 500],
                    )
                    for seq in group
                ]
            )  # fmt: skip
    prompts = time.perf_counter() - begun
    took: list[float] = []
    for i in range(STEPS):
        chunks: list[Any] = [
            Chunk(key=seq, seq=seq, start=common + own + i, tokens=[500 + i], chooser=greedy)
            for seq in range(sequences)
        ]
        begun = time.perf_counter()
        stepper.step(chunks)
        took.append(time.perf_counter() - begun)
    return 1e3 * prompts, 1e3 * statistics.median(took)


def main() -> None:
    """A line for each case: prompts, then a step, by whose attention, and how they compare."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.one:
        kind, *numbers = given.one
        print(*measure(kind, *map(int, numbers), given.threads))
        return
    for case in CASES:
        rows = {}
        for kind in KINDS if case[1] else KINDS[:2]:
            command = [sys.executable, __file__, "--threads", str(given.threads), "--one", kind]
            said = subprocess.run(
                [*command, *map(str, case)], capture_output=True, text=True, check=True
            ).stdout
            rows[kind] = [float(number) for number in said.split()[-2:]]
        sequences, common, own = case
        print(f"{sequences} sequences, {common} tokens in common and {own} of their own:")
        for kind, (prompts, step) in rows.items():
            theirs = rows["llama.cpp"]
            print(
                f"  {kind:9} prompts {prompts:7.0f} ms ({theirs[0] / prompts:.2f})"
                f"   step {step:6.1f} ms ({theirs[1] / step:.2f})"
            )


if __name__ == "__main__":
    main()
