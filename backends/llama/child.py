"""The engine process: one model, one thread that computes, one that reads, one that writes.

Started by ``supervisor`` as ``python -m tidemill.backends.llama.child FD`` with one end of a socket
pair. llama.cpp ends the process on some errors; that is what the process is for.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from tidemill import clock
from tidemill.backends.llama import attention
from tidemill.backends.llama import messages as m
from tidemill.backends.llama.blackbox import Blackbox
from tidemill.backends.llama.embedder import Embedder, Inputs
from tidemill.backends.llama.layout import laid_out
from tidemill.backends.llama.model import Model, on_gpu, silence
from tidemill.backends.llama.native_stepper import stepper_class
from tidemill.backends.llama.prompt import Template
from tidemill.backends.llama.requests import Desk
from tidemill.backends.llama.sampling import Chooser
from tidemill.backends.llama.size import Size
from tidemill.backends.llama.stepper import restriction
from tidemill.errors import EngineUnavailable, RequestRefused, TidemillError
from tidemill.scheduler.loop import Loop
from tidemill.scheduler.speculation import Speculation
from tidemill.scheduler.steps import Gauges
from tidemill.types import EngineSpec, ModelCard, Piece, Usage

ERROR = 4


def default_threads() -> int:
    """All cores but one: compute threads wait for each other at every layer, so that one which has
    to share its core holds all of them up."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


class Outbox:
    """Events on their way to the server: one message per step, written by a thread of its own.

    The queue is short: when the server does not read, the engine waits for it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._events: list[m.Event] = []
        self._gauges = Gauges()
        self._queue: queue.Queue[m.Report | None] = queue.Queue(maxsize=64)
        self._thread = threading.Thread(target=self._write, name="writer", daemon=True)
        self._thread.start()

    def post(self, event: m.Event) -> None:
        """Add an event to the next message."""
        with self._lock:
            self._events.append(event)

    def flush(self, gauges: Gauges | None = None) -> None:
        """Send what was posted, if anything was or the load changed."""
        with self._lock:
            changed = gauges is not None and _load(gauges) != _load(self._gauges)
            self._gauges = gauges or self._gauges
            if not (self._events or changed):
                return
            message = m.Events(events=tuple(self._events), gauges=self._gauges)
            self._events = []
        self._queue.put(message)

    def send(self, report: m.Report) -> None:
        """Send a message of its own."""
        self._queue.put(report)

    def close(self) -> None:
        """Write what is queued, then stop."""
        self._queue.put(None)
        self._thread.join()

    def _write(self) -> None:
        while (report := self._queue.get()) is not None:
            try:
                self._sock.sendall(m.frame(report))
            except OSError:
                os._exit(0)  # the server is gone, and with it the reason to be


def _load(gauges: Gauges) -> tuple[int, int, int]:
    return gauges.active, gauges.waiting, gauges.parked


class Child:
    """Answers the server's questions."""

    def __init__(self, load: m.Load, outbox: Outbox, box: Blackbox) -> None:
        """Load the model; raises ``EngineUnavailable``."""
        spec = load.spec
        self._outbox, self._spec, self._box = outbox, spec, box
        threads = spec.threads or default_threads()
        weights = laid_out(
            Path(load.path),
            spec.weights,
            on_gpu=on_gpu(spec.gpu_layers),
            threads=threads,
            say=say,
        )
        model = Model(weights.path, spec.gpu_layers, (*weights.adapters, *spec.adapters))
        template = (
            Template(model.template, bos=model.bos, eos=model.eos) if model.template else None
        )
        why_still = restriction(model)
        size = Size(spec, model, moves=why_still is None)
        first, *longer = size.classes
        kind, why = stepper_class()
        if why is not None:
            say(f"Steps are computed in Python: {why}")
        elif spec.attention == "auto" and not model.on_gpu and (whose := attention.offer()):
            say(f"Attention is computed by llama.cpp itself: {whose}.")
        stepper = kind(
            model,
            slots=first.slots,
            context=first.context,
            longer=tuple(longer),
            threads=threads,
            headroom=spec.headroom,
        )
        if why_still is not None and not spec.embedding:
            say(f"Prompts are not shared and sequences not parked: {why_still}.")
        self._embedder = Embedder(
            model,
            context=size.embedding_context,
            threads=threads,
            watch=box.computing,
        )
        if spec.embedding:
            self._embedder.open()
        else:
            stepper.open()
        self._desk = Desk(model, template, context=size.context)
        self._loop: Loop[Chooser] = Loop(
            stepper,
            flush=outbox.flush,
            errands=self._embedder,
            watch=box.computing,
            parking=size.parking,
            speculation=_speculation(spec, model),
        )
        card = ModelCard(
            id=load.name,
            context_length=size.embedding_context if spec.embedding else size.context,
            chat=not spec.embedding and template is not None,
            embeddings=True,
            tools=not spec.embedding and template is not None and template.tools,
        )
        self.ready = m.Ready(card=card, slots=size.slots, embedding_size=model.n_embd)

    def compute(self) -> None:
        """The engine's thread. Anything that it does not expect ends the process: the supervisor
        starts another and whoever waited tries again."""
        try:
            self._loop.run()
        finally:  # it runs for as long as the process does
            traceback.print_exc()
            os._exit(70)

    def handle(self, question: m.Question) -> None:
        """Take one question in; its answer comes later, as events."""
        if isinstance(question, m.Cancel):
            self._loop.cancel(question.key)
            self._embedder.cancel(frozenset({question.key}))
            return
        assert not isinstance(question, m.Load)
        self._box.reading(question.key)
        try:
            if isinstance(question, m.Generate):
                self._generate(question)
            elif isinstance(question, m.Embed):
                self._embed(question)
            else:
                self._outbox.post(m.Counted(key=question.key, tokens=self._count(question)))
        except TidemillError as exc:
            self._outbox.post(m.fault(question.key, exc))
        except Exception:  # noqa: BLE001 - a request must not take the others down with it
            traceback.print_exc()
            broken = TidemillError("The engine could not prepare this request.")
            self._outbox.post(m.fault(question.key, broken))
        self._box.reading(0)
        self._outbox.flush()

    def _generate(self, question: m.Generate) -> None:
        key, generation = question.key, question.generation
        if self._spec.embedding:
            raise RequestRefused(
                f"The model '{generation.model}' makes embeddings only.", param="model"
            )
        ticket = self._desk.ticket(key, generation, self._sender(key), alone=question.alone)
        if ticket is not None:
            self._loop.submit(ticket)

    def _count(self, question: m.Count) -> int:
        if question.generation is not None:
            return self._desk.count(question.generation)
        return sum(map(len, self._desk.inputs(question.inputs, self._embedder.context)))

    def _sender(self, key: int) -> Callable[[Piece | TidemillError], None]:
        def send(what: Piece | TidemillError) -> None:
            self._outbox.post(
                m.Progress(key=key, piece=what) if isinstance(what, Piece) else m.fault(key, what)
            )

        return send

    def _embed(self, question: m.Embed) -> None:
        key = question.key
        tokens = self._desk.inputs(question.inputs, self._embedder.context)
        usage = Usage(input=sum(map(len, tokens)))

        def done(result: list[bytes] | TidemillError) -> None:
            self._outbox.post(
                m.fault(key, result)
                if isinstance(result, TidemillError)
                else m.Vectors(key=key, vectors=tuple(result), usage=usage)
            )

        self._embedder.submit(
            Inputs(
                key=key,
                lane=question.lane,
                tokens=tokens,
                done=done,
                so_far=lambda n: self._outbox.post(m.Computed(key=key, tokens=n)),
            )
        )
        self._loop.wake()


def _speculation(spec: EngineSpec, model: Model) -> Speculation[Chooser] | None:
    """What a row costs is the processor time of the engine's thread, so that other programs do not
    count; a GPU's time is seen by the clock only."""
    if spec.speculation == "off":
        return None
    return Speculation(now=clock.monotonic if model.on_gpu else clock.computed)


def die_with_parent(parent: int) -> None:
    """On Linux, be killed when the server dies, however it dies. Elsewhere the end of the socket's
    stream does it, at the next read."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call
            os._exit(0)


def say(text: str) -> None:
    """One line for the server's log."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def main() -> None:
    """Entry point of the process: ``argv`` holds the socket's descriptor, the server's pid and the
    blackbox's descriptor."""
    die_with_parent(int(sys.argv[2]))
    # Ctrl-C and a service manager's SIGTERM reach the whole process group; the server drains first
    # and then ends this process itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    silence(ERROR)
    outbox = Outbox(sock)
    body = m.read_frame(sock)
    load = m.question(body) if body is not None else None
    if not isinstance(load, m.Load):
        return
    try:
        box = Blackbox(int(sys.argv[3]), timeout_s=load.spec.step_timeout_s)
        child = Child(load, outbox, box)
    except EngineUnavailable as exc:
        outbox.send(m.Unfit(message=exc.message))
        outbox.close()
        return
    outbox.send(child.ready)
    threading.Thread(target=child.compute, name="engine", daemon=True).start()
    while (body := m.read_frame(sock)) is not None:
        child.handle(m.question(body))
    os._exit(0)  # no farewell to threads that may be deep in a computation


if __name__ == "__main__":
    main()
