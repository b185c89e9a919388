"""Weights as they are against rewritten ones: speed and perplexity.

Run it with ``python bench/bench_engine_weights.py``. One table row per layout: tokens/s at one and
at sixteen sequences, prompt tokens/s (medians of interleaved repetitions, one thread), and the
perplexity of ``prose.txt``, in windows of 256 tokens, with the difference to the weights as they
are and its standard error. The last row is the weights as they are, computed in chunks of 16
tokens: what another rounding does by itself.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

WINDOW = 256
LAYOUTS = ("as-is", "auto", "q8_0", "q4_0")


class Layout:
    """A model in one layout, with a context of sixteen sequences."""

    def __init__(self, name: str, model: str) -> None:
        from tidemill.backends.llama.layout import laid_out
        from tidemill.backends.llama.model import Model
        from tidemill.backends.llama.native_stepper import stepper_class
        from tidemill.backends.llama.sampling import Chooser
        from tidemill.backends.llama.weights import resolve
        from tidemill.types import Sampling

        weights = laid_out(resolve(model), name, on_gpu=False, threads=1, say=print)
        self.files = [weights.path, *(Path(one.path) for one in weights.adapters)]
        self.model = Model(weights.path, 0, weights.adapters)
        kind, _ = stepper_class()
        self.stepper = kind(self.model, slots=16, context=512, threads=1, headroom=0)
        self.stepper.open()
        self.greedy = Chooser(self.model, Sampling())
        self.speeds: dict[str, list[float]] = {"1": [], "16": [], "prompt": []}

    def forget(self) -> None:
        """Empty the context."""
        for seq in range(16):
            self.stepper.forget(seq)

    def step(self, tokens: dict[int, tuple[int, list[int]]]) -> float:
        """Seconds of one step of ``{sequence: (start, tokens)}``."""
        from tidemill.scheduler.steps import Chunk

        chunks = [
            Chunk(key=seq, seq=seq, start=start, tokens=some, chooser=self.greedy)
            for seq, (start, some) in tokens.items()
        ]
        begun = time.perf_counter()
        seen = self.stepper.step(chunks)
        assert seen.fate == "done", seen
        return time.perf_counter() - begun

    def measure(self, steps: int) -> None:
        """Note one repetition."""
        for n in (1, 16):
            self.forget()
            self.step({seq: (0, [5]) for seq in range(n)})
            took = sum(
                self.step({seq: (k, [50 + k]) for seq in range(n)}) for k in range(1, steps + 1)
            )
            self.speeds[str(n)].append(n * steps / took)
        self.forget()
        self.speeds["prompt"].append(256 / self.step({0: (0, list(range(1_000, 1_256)))}))

    def losses(self, text: str, chunk: int = WINDOW) -> list[float]:
        """Negative log-likelihood of every token but the first of each window, each of which is
        computed in chunks."""
        import numpy as np
        from llama_cpp import llama_cpp as C

        tokens = self.model.tokenize(text, special=False, parse=False)
        out: list[float] = []
        for at in range(0, len(tokens) - 1, WINDOW):
            window = tokens[at : at + WINDOW]
            self.forget()
            rows = []
            for start in range(0, len(window), chunk):
                part = window[start : start + chunk]
                batch = C.llama_batch_init(len(part), 0, 1)
                for i, token in enumerate(part):
                    batch.token[i], batch.pos[i], batch.logits[i] = token, start + i, 1
                    batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                batch.n_tokens = len(part)
                assert C.llama_decode(self.stepper._contexts[0].handle, batch) == 0
                C.llama_batch_free(batch)
                shape = (len(part), self.model.n_vocab)
                logits = np.ctypeslib.as_array(
                    C.llama_get_logits(self.stepper._contexts[0].handle), shape=shape
                )
                rows.append(logits.astype(np.float64))
            exact = np.concatenate(rows)[:-1]
            exact -= exact.max(axis=1, keepdims=True)
            chosen = exact[np.arange(len(window) - 1), window[1:]]
            out += list(np.log(np.exp(exact).sum(axis=1)) - chosen)
        return out


def perplexity(losses: list[float], base: list[float]) -> str:
    """Perplexity, and how it differs from another's token by token."""
    apart = [a - b for a, b in zip(losses, base, strict=True)]
    text = f"{math.exp(statistics.fmean(losses)):.3f}"
    if any(apart):
        error = statistics.stdev(apart) / math.sqrt(len(apart))
        text += f"  {100 * math.expm1(statistics.fmean(apart)):+.2f} % ± {100 * error:.2f}"
    return text


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    options: Any = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", default="smollm2")
    options.add_argument("--repetitions", type=int, default=5)
    options.add_argument("--steps", type=int, default=12)
    given = options.parse_args(arguments)
    from tidemill.backends.llama.model import silence

    silence(4)
    layouts = {name: Layout(name, given.model) for name in LAYOUTS}
    for _ in range(given.repetitions):
        for layout in layouts.values():
            layout.measure(given.steps)
    text = Path(__file__).with_name("prose.txt").read_text("utf-8")
    losses = {name: layout.losses(text) for name, layout in layouts.items()}
    base = losses["as-is"]
    print(f"{'layout':8} {'MiB':>6} {'1 seq':>8} {'16 seqs':>8} {'prompt':>8}   perplexity")
    for name, layout in layouts.items():
        one, many, prompt = (statistics.median(layout.speeds[k]) for k in ("1", "16", "prompt"))
        size = sum(file.stat().st_size for file in layout.files) >> 20
        print(
            f"{name:8} {size:6} {one:8.0f} {many:8.0f} {prompt:8.0f}   "
            + perplexity(losses[name], base)
        )
    print(f"{'in 16s':41}   " + perplexity(layouts["as-is"].losses(text, 16), base))
    print(f"tokens/s on one thread; perplexity over {len(base)} tokens of prose.txt")


if __name__ == "__main__":
    main()
