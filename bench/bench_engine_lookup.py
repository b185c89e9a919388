"""What drafts that are looked up in the prompt bring, and what they cost where nothing is copied.

Run it with ``python bench/bench_engine_lookup.py``. The same requests with and without drafts, in
turns, on one compute thread: copies of a text, of JSON and of a table with a small change, and
ordinary chat lines. A row gives generated tokens per second with prompts included, by the clock and
by the processor time of the engine's thread (other programs disturb the first), their ratio, and
which part of the answers was drafted and kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tidemill import clock
from tidemill.backends.llama.layout import laid_out
from tidemill.backends.llama.model import Model, silence
from tidemill.backends.llama.native_stepper import stepper_class
from tidemill.backends.llama.sampling import Chooser
from tidemill.backends.llama.weights import resolve
from tidemill.errors import TidemillError
from tidemill.scheduler.loop import Loop, Sampled, Ticket
from tidemill.scheduler.speculation import Speculation
from tidemill.types import FinishReason, Lane, Sampling

PROSE = Path(__file__).with_name("prose.txt").read_text("utf-8").split("\n\n")
QUESTIONS = (
    "What is a tide?", "Write a short story about a miller.", "Why is the sky blue?",
    "Give me three tips for a job interview.", "Explain what a database index is.",
    "What should I cook with potatoes and eggs?", "Write a poem about the sea.",
    "How do I learn to play the piano?",
)  # fmt: skip


Turn = tuple[str, str]


def copies(n: int) -> list[str]:
    """Prompts whose answers nearly stand in them: a text without its end, a table with a header,
    JSON with another field."""
    return [(_text, _table, _rows)[no % 3](no) for no in range(n)]


def chats(n: int) -> list[str]:
    """Prompts whose answers are new."""
    return [_chat(f"{QUESTIONS[no % len(QUESTIONS)]} ({no})") for no in range(n)]


def _chat(text: str, example: Turn | None = None) -> str:
    turns = [
        *([("user", example[0]), ("assistant", example[1])] if example else []),
        ("user", text),
    ]
    said = "".join(f"<|im_start|>{who}\n{what}<|im_end|>\n" for who, what in turns)
    return f"{said}<|im_start|>assistant\n"


def _words(no: int, n: int) -> list[str]:
    return PROSE[no % len(PROSE)].replace(",", "").replace(".", "").split()[:n]


def _text(no: int) -> str:
    text = PROSE[no % len(PROSE)].replace("\n", " ")[:600]
    return _chat(f"Repeat this text word for word, without the last sentence:\n\n{text}")


def _table(no: int) -> str:
    rows = "\n".join(f"{100 * no + i};{word};{7 * i}" for i, word in enumerate(_words(no, 12)))
    return _chat(f"Copy this table and add a header line `id;name;size`:\n\n{rows}")


def _rows(no: int) -> str:
    def rows(words: list[str], state: str) -> str:
        made = [{"id": 100 * no + i, "name": w, "state": state} for i, w in enumerate(words)]
        return json.dumps(made, indent=1)

    ask = "Return this JSON with every state set to closed:\n\n"
    first, second = _words(no, 3), _words(no + 1, 8)
    example = (ask + rows(first, "open"), rows(first, "closed"))
    return _chat(ask + rows(second, "open"), example)


class Answer:
    """Counts the tokens of one answer."""

    def __init__(self) -> None:
        self.tokens, self.over = 0, False

    def reused(self, tokens: int) -> None:
        """Nothing is."""

    def take(self, sampled: Sampled) -> FinishReason | None:
        """One more."""
        self.tokens += 1
        return None

    def finish(self, reason: FinishReason) -> None:
        """Nothing to do."""

    def fail(self, error: TidemillError) -> None:
        """Fails the run."""
        raise error

    def close(self) -> None:
        """The end."""
        self.over = True


@dataclass
class Figures:
    """Of one workload, with or without drafts."""

    rate: list[float] = field(default_factory=list)
    cpu_rate: list[float] = field(default_factory=list)
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


class Bench:
    """One context of so many sequences."""

    def __init__(self, model: Model, sequences: int, given: Any) -> None:
        kind, _ = stepper_class()
        self.model, self.sequences, self.limit = model, sequences, given.answer
        self.stepper = kind(model, slots=sequences, context=1_024, threads=1, headroom=0)
        self.stepper.open()

    def run(self, texts: list[str], speculation: Speculation[Chooser] | None, to: Figures) -> None:
        """Answer all of them, in an engine that remembers nothing."""
        loop: Loop[Chooser] = Loop(self.stepper, speculation=speculation)
        answers = [Answer() for _ in texts]
        choosers = [Chooser(self.model, Sampling()) for _ in texts]
        for key, (text, answer, chooser) in enumerate(zip(texts, answers, choosers, strict=True)):
            prompt = self.model.tokenize(text, special=True, parse=True)
            loop.submit(
                Ticket(
                    key=key, lane=Lane.BATCH, prompt=prompt, limit=self.limit, chooser=chooser,
                    answer=answer,
                )
            )  # fmt: skip
        begun, cpu = time.perf_counter(), time.thread_time()
        while not all(answer.over for answer in answers):
            loop._collect()
            loop.turn()
        cpu, took = time.thread_time() - cpu, time.perf_counter() - begun
        for seq in range(self.sequences):
            self.stepper.forget(seq)
        made, gauges = sum(answer.tokens for answer in answers), loop.gauges()
        to.rate.append(made / took)
        to.cpu_rate.append(made / cpu)
        to.tokens += made
        to.drafted += gauges.tokens_drafted
        to.accepted += gauges.tokens_accepted


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    options: Any = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", default="smollm2")
    options.add_argument("--weights", default="auto", choices=("auto", "as-is", "q8_0", "q4_0"))
    options.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    options.add_argument("--requests", type=int, default=12)
    options.add_argument("--answer", type=int, default=160)
    options.add_argument("--repetitions", type=int, default=3)
    options.add_argument("--gpu-layers", type=int, default=0)
    given = options.parse_args(arguments)
    log = silence(4)
    path = resolve(given.model)
    if not given.gpu_layers:
        path = laid_out(path, given.weights, on_gpu=False, threads=1, say=print)
    model = Model(path, given.gpu_layers)
    print(f"{'':16} {'tokens/s':>15} {'':6} {'by processor':>15} {'':6} {'drafted':>8} {'kept':>5}")
    for sequences in given.sequences:
        bench = Bench(model, sequences, given)
        for name, texts in (("copies", copies(given.requests)), ("chat", chats(given.requests))):
            plain, drafted = Figures(), Figures()
            speculation: Speculation[Chooser] = Speculation(now=clock.computed)
            bench.run(texts, speculation, Figures())  # what rows cost is learned once
            for _ in range(given.repetitions):
                bench.run(texts, None, plain)
                bench.run(texts, speculation, drafted)
            wall, cpu = (
                [statistics.median(figures) for figures in pair]
                for pair in ((plain.rate, drafted.rate), (plain.cpu_rate, drafted.cpu_rate))
            )
            print(
                f"{name:7}{sequences:3} slots "
                f"{wall[0]:7.1f} {wall[1]:7.1f} {wall[1] / wall[0]:5.2f}x "
                f"{cpu[0]:7.1f} {cpu[1]:7.1f} {cpu[1] / cpu[0]:5.2f}x "
                f"{drafted.drafted / drafted.tokens:7.2f} "
                f"{drafted.accepted / max(1, drafted.drafted):5.2f}",
                flush=True,
            )
        bench.stepper.close()
    model.close()
    del log


if __name__ == "__main__":
    main()
