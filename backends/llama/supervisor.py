"""Keeps one engine process alive: start, watch, restart, give up for a while, stop."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable

import msgspec
import structlog

from tidemill import clock
from tidemill.backends.llama import messages as m
from tidemill.errors import EngineUnavailable

log = structlog.get_logger("tidemill.engine")

CRASHES = 3
"""Deaths without a finished answer between them that make a crash loop."""
WITHIN_S = 60.0
LONGEST_PAUSE_S = 30.0
STDERR_LINES = 20


class Deaths:
    """When the process died lately, and what follows from it."""

    def __init__(self) -> None:
        self._at: deque[float] = deque()
        self._total = 0

    def add(self, now: float) -> None:
        """It died."""
        self._total += 1
        self._at.append(now)
        while self._at[0] <= now - WITHIN_S:
            self._at.popleft()

    def clear(self) -> None:
        """It finished an answer: whatever killed it was not the model or the machine."""
        self._at.clear()
        self._total = 0

    @property
    def looping(self) -> bool:
        """True in a crash loop. Stays so until an answer is finished."""
        return len(self._at) >= CRASHES or self._total > CRASHES

    @property
    def pause_s(self) -> float:
        """How long to wait before the next start: none after one death, then 0.5, 1, 2 ... s."""
        return 0.0 if self._total <= 1 else min(LONGEST_PAUSE_S, 0.5 * 2 ** (self._total - 2))


class Supervisor:
    """One engine process at a time, and the stream to it.

    ``on_report`` gets its messages, ``on_death`` the reason in words after everything it said was
    delivered. All methods belong to one event loop.
    """

    def __init__(
        self,
        load: m.Load,
        *,
        on_report: Callable[[m.Report], None],
        on_death: Callable[[str], None],
    ) -> None:
        self._load, self._on_report, self._on_death = load, on_report, on_death
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._watch: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self.ready: m.Ready | None = None
        """What the process said when it had loaded; kept over restarts."""
        self.down: str | None = "The engine was not started."
        """Why nothing can be asked now; None while the process serves."""
        self.deaths = Deaths()
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """The process that serves now."""
        return self._process.pid if self._process is not None and self.down is None else None

    async def start(self) -> m.Ready:
        """Start the first process; raises ``EngineUnavailable`` when it cannot load the model."""
        process, reader, stderr = await self._spawn()
        try:
            ready = await self._loaded(reader)
        except BaseException as exc:
            reason = await self._bury(process, stderr)
            if isinstance(exc, EOFError):
                raise EngineUnavailable(f"The engine did not start: {reason}.") from exc
            raise
        self._watch = asyncio.create_task(self._supervise(process, reader, stderr))
        return ready

    async def send(self, question: m.Question) -> None:
        """Ask, waiting while the process restarts or does not read. Raises ``EngineUnavailable``
        in a crash loop and when closed."""
        data = m.frame(question)
        while self.down is not None:
            if self._watch is None or self._watch.done() or self.deaths.looping:
                raise EngineUnavailable(self.down)
            await self._up.wait()
        assert self._writer is not None
        self._writer.write(data)
        try:
            await self._writer.drain()
        except ConnectionError:
            return  # it died; on_death tells everybody who waits

    def tell(self, question: m.Question) -> None:
        """Say something that needs no answer; dropped when nobody is there to hear it."""
        if self.down is None and self._writer is not None:
            self._writer.write(m.frame(question))

    async def close(self) -> None:
        """End the process at once."""
        self.down = "The engine was stopped."
        self._up.set()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    async def _supervise(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        stderr: asyncio.Task[deque[str]],
    ) -> None:
        while True:
            try:
                await self._serve(reader)
            finally:
                self._up.clear()
                closing = self.down
                self.down = self.down or "The engine process ended and is being restarted."
                reason = await asyncio.shield(self._bury(process, stderr))
                self._on_death(closing or reason)
            self.deaths.add(clock.monotonic())
            while True:
                state = "keeps ending" if self.deaths.looping else "ended and is being restarted"
                self.down = f"The engine process {state}: {reason}."
                if self.deaths.looping:
                    self._up.set()  # whoever waited for it is told, not held
                await asyncio.sleep(self.deaths.pause_s)
                self._up.clear()
                self.restarts += 1
                process, reader, stderr = await self._spawn()
                try:
                    await self._loaded(reader)
                    break
                except (EOFError, EngineUnavailable) as exc:
                    reason = await self._bury(process, stderr)
                    if isinstance(exc, EngineUnavailable):
                        reason = exc.message.rstrip(".")
                    self.deaths.add(clock.monotonic())
                except BaseException:
                    await asyncio.shield(self._bury(process, stderr))
                    raise

    async def _spawn(
        self,
    ) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.Task[deque[str]]]:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tidemill.backends.llama.child",
                str(theirs.fileno()),
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._process = process
        self._writer.write(m.frame(self._load))
        assert process.stderr is not None
        stderr = asyncio.create_task(_last_lines(process.stderr))
        return process, reader, stderr

    async def _loaded(self, reader: asyncio.StreamReader) -> m.Ready:
        """Wait for the model. Raises ``EngineUnavailable`` with the process's own words, or
        ``EOFError`` when it died without any."""
        report = await _read(reader)
        if report is None:
            raise EOFError
        if isinstance(report, m.Unfit):
            raise EngineUnavailable(report.message)
        assert isinstance(report, m.Ready)
        self.ready, self.down = report, None
        self._up.set()
        log.info("engine_ready", model=report.card.id, pid=self.pid, slots=report.slots)
        return report

    async def _serve(self, reader: asyncio.StreamReader) -> None:
        while (report := await _read(reader)) is not None:
            self._on_report(report)

    async def _bury(
        self, process: asyncio.subprocess.Process, stderr: asyncio.Task[deque[str]]
    ) -> str:
        """Make sure that it is dead, log its last words, and say why it died."""
        if process.returncode is None:
            # It may be on its way out: an end of stream comes a moment before the exit status.
            if self._closing:
                process.kill()
            try:
                await asyncio.wait_for(process.wait(), timeout=2.0)
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        lines = await stderr
        reason = _reason(process.returncode)
        if not self._closing:
            log.error("engine_died", pid=process.pid, reason=reason, stderr=list(lines))
        return reason

    @property
    def _closing(self) -> bool:
        return self.down == "The engine was stopped."


async def _read(reader: asyncio.StreamReader) -> m.Report | None:
    """The next message; None at the end of the stream, or where it is broken."""
    try:
        header = await reader.readexactly(m.HEADER.size)
        (length,) = m.HEADER.unpack(header)
        return m.report(await reader.readexactly(length)) if length <= m.LARGEST else None
    except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError):
        return None


async def _last_lines(stream: asyncio.StreamReader) -> deque[str]:
    lines: deque[str] = deque(maxlen=STDERR_LINES)
    rest = b""
    while data := await stream.read(1 << 16):
        *whole, rest = (rest + data).split(b"\n")
        # A line without an end must not grow for ever.
        rest = rest[-4096:]
        lines.extend(line.decode("utf-8", "replace") for line in whole)
    if rest:
        lines.append(rest.decode("utf-8", "replace"))
    return lines


def _reason(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        try:
            return f"killed by {signal.Signals(-returncode).name}"
        except ValueError:
            return f"killed by signal {-returncode}"
    return f"exit code {returncode}"
