"""Keeps one engine process alive: start, watch, restart, give up for a while, stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import structlog

from tidemill import clock
from tidemill.backends.llama import messages as m
from tidemill.backends.llama.blackbox import Blackbox, shared_file
from tidemill.errors import EngineDown, EngineUnavailable

log = structlog.get_logger("tidemill.engine")

CRASHES = 3
"""Deaths without a finished answer between them that make a crash loop."""
WITHIN_S = 60.0
LONGEST_PAUSE_S = 30.0
GRACE_S = 2.0
LONGEST_LINE = 500
CHILD = ("-m", "tidemill.backends.llama.child")


class Deaths:
    """When the process died lately, and what follows from it."""

    def __init__(self) -> None:
        self._at: deque[float] = deque()
        self._total = 0

    def add(self, now: float) -> None:
        """It died."""
        if self._at and now - self._at[-1] > 2 * WITHIN_S:
            self.clear()
        self._total += 1
        self._at.append(now)
        while len(self._at) > CRASHES:
            self._at.popleft()

    def clear(self) -> None:
        """It finished an answer: whatever killed it was not the model or the machine."""
        self._at.clear()
        self._total = 0

    @property
    def looping(self) -> bool:
        """True in a crash loop. It stays one until an answer is finished or peace has lasted."""
        quick = len(self._at) >= CRASHES and self._at[-1] - self._at[-CRASHES] <= WITHIN_S
        return quick or self._total > CRASHES

    @property
    def pause_s(self) -> float:
        """How long to wait before the next start: none after one death, then 0.5, 1, 2 ... s."""
        return 0.0 if self._total <= 1 else min(LONGEST_PAUSE_S, 0.5 * 2 ** (self._total - 2))


class Process(NamedTuple):
    """A running engine process, the stream to and from it, and who reads its log."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    log: asyncio.Task[None]


class Supervisor:
    """One engine process at a time, and the stream to it.

    ``on_report`` gets its messages. ``on_death`` gets the reason in words and the keys it was at
    work on, after everything it said was delivered; it answers whether that explains the death,
    which then does not count towards a crash loop. All methods belong to one event loop.
    """

    def __init__(
        self,
        load: m.Load,
        *,
        on_report: Callable[[m.Report], None],
        on_death: Callable[[str, frozenset[int]], bool],
    ) -> None:
        self._load, self._on_report, self._on_death = load, on_report, on_death
        self._running: Process | None = None
        self._page = shared_file()
        self._box = Blackbox(self._page.fileno())
        self._watch: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._closed = False
        self.ready: m.Ready | None = None
        """What the process said when it had loaded; kept over restarts."""
        self.down: str | None = "The engine was not started."
        """Why nothing can be asked now; None while a process serves."""
        self.deaths = Deaths()
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """The process that serves now."""
        return self._running.process.pid if self._running and self.down is None else None

    async def start(self) -> m.Ready:
        """Start the first process; raises ``EngineUnavailable`` when it cannot load the model."""
        running = await self._spawn()
        try:
            ready = await self._loaded(running)
        except EOFError as exc:
            reason = await self._bury(running)
            raise EngineUnavailable(f"The engine did not start: {reason}.") from exc
        except BaseException:
            await asyncio.shield(self._bury(running, kill=True))
            raise
        self._watch = asyncio.create_task(self._supervise(running))
        return ready

    async def available(self) -> None:
        """Return when a process serves; waits out a restart. Raises ``EngineDown`` in a
        crash loop and when nothing is or will be there."""
        while self.down is not None:
            if self._watch is None or self._closed or self.deaths.looping:
                raise EngineDown(self.down)
            await self._up.wait()

    async def send(self, frame: bytes) -> None:
        """Ask at once, then wait while the process does not read. If it dies, ``on_death`` says so;
        call ``available`` before."""
        assert self._running is not None
        writer = self._running.writer
        writer.write(frame)
        with contextlib.suppress(ConnectionError):
            await writer.drain()

    def tell(self, question: m.Question) -> None:
        """Say something that needs no answer; dropped when nobody is there to hear it."""
        if self.down is None and self._running is not None:
            self._running.writer.write(m.frame(question))

    async def close(self) -> None:
        """End the process at once."""
        self._closed, self.down = True, "The engine was stopped."
        self._up.set()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._running is not None:
            await self._bury(self._running, kill=True)
        self._box.close()
        self._page.close()

    async def _supervise(self, running: Process) -> None:
        while True:
            while (report := await _read(running.reader)) is not None:
                self._on_report(report)
            self._up.clear()
            self.down = "The engine process ended and is being restarted."
            reason = await self._bury(running)
            explained = self._on_death(reason, self._box.suspects())
            running = await self._restart(reason, explained)

    async def _restart(self, reason: str, explained: bool) -> Process:
        while True:
            if not explained:
                self.deaths.add(clock.monotonic())
            explained = False
            state = "keeps ending" if self.deaths.looping else "ended and is being restarted"
            self.down = f"The engine process {state}: {reason}."
            if self.deaths.looping:
                self._up.set()  # whoever waits for it is told, not held
            await asyncio.sleep(self.deaths.pause_s)
            self._up.clear()
            self.restarts += 1
            try:
                running = await self._spawn()
            except OSError as exc:
                reason = f"it cannot be started: {exc.strerror}"
                continue
            try:
                await self._loaded(running)
            except EOFError:
                reason = await self._bury(running)
            except EngineUnavailable as exc:
                await self._bury(running)
                reason = exc.message.rstrip(".")
            else:
                return running

    async def _spawn(self) -> Process:
        self._box.clear()
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *CHILD,
                str(theirs.fileno()),
                str(os.getpid()),
                str(self._page.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(), self._page.fileno()),
                # On an abort ggml would start a debugger for a stack trace, if it finds one.
                env={**os.environ, "GGML_NO_BACKTRACE": "1"},
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(m.frame(self._load))
        assert process.stderr is not None
        said = asyncio.create_task(_pass_on(process.stderr, process.pid))
        self._running = Process(process, reader, writer, said)
        return self._running

    async def _loaded(self, running: Process) -> m.Ready:
        """Wait for the model. Raises ``EngineUnavailable`` with the process's own words, or
        ``EOFError`` when it died without any."""
        report = await _read(running.reader)
        if report is None:
            raise EOFError
        if isinstance(report, m.Unfit):
            raise EngineUnavailable(report.message)
        assert isinstance(report, m.Ready)
        self.ready, self.down = report, None
        self._up.set()
        log.info("engine_ready", model=report.card.id, pid=self.pid, slots=report.slots)
        return report

    async def _bury(self, running: Process, *, kill: bool = False) -> str:
        """Make sure that it is dead, log its last words, and say why it died."""
        process = running.process
        if kill and process.returncode is None:
            process.kill()
        try:
            # The end of its stream comes a moment before its exit status.
            await asyncio.wait_for(process.wait(), timeout=GRACE_S)
        except TimeoutError:
            process.kill()
            await process.wait()
        running.writer.close()
        await running.log
        self._running = None
        reason = _reason(process.returncode)
        if not kill:
            log.error("engine_died", pid=process.pid, reason=reason)
        return reason


async def _read(reader: asyncio.StreamReader) -> m.Report | None:
    """The next message; None at the end of the stream, or where it is broken."""
    try:
        header = await reader.readexactly(m.HEADER.size)
        (length,) = m.HEADER.unpack(header)
        return m.report(await reader.readexactly(length)) if length <= m.LARGEST else None
    except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError):
        return None


async def _pass_on(stream: asyncio.StreamReader, pid: int) -> None:
    """Log what the process writes to standard error: llama.cpp's errors, assertions, tracebacks."""
    rest = b""
    while data := await stream.read(1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        # llama.cpp prints a whole grammar in one line; its beginning is enough.
        rest = rest[:LONGEST_LINE]
        for line in lines:
            _log_line(line, pid)
    _log_line(rest, pid)


def _log_line(line: bytes, pid: int) -> None:
    if text := line[:LONGEST_LINE].decode("utf-8", "replace").rstrip():
        log.warning("engine_says", pid=pid, text=text)


def _reason(returncode: int | None) -> str:
    if returncode == -signal.SIGALRM:
        return "a step did not end in time"
    if returncode is not None and returncode < 0:
        try:
            return f"killed by {signal.Signals(-returncode).name}"
        except ValueError:
            return f"killed by signal {-returncode}"
    return f"exit code {returncode}"
