"""A server as a child process: what ``tidemill run`` starts for itself, and what tests start."""

from __future__ import annotations

import ctypes
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from tidemill.settings import rows

ANNOUNCEMENT = b"Tidemill listens on "


class StartFailed(Exception):
    """The server ended, or said nothing, before it listened."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def arguments(settings: Mapping[str, Any]) -> list[str]:
    """Flags of ``tidemill serve`` for settings by name; None is left out."""
    flags = {row.name: row.flags[0] for row in rows()}
    args = []
    for name, value in settings.items():
        flag = flags[name]
        if isinstance(value, bool):
            args.append(flag if value else f"--no-{flag[2:]}")
        elif value is not None:
            args += [flag, str(value)]
    return args


class ServerProcess:
    """``tidemill serve`` on a free loopback port, in a process group of its own.

    Everything that it prints goes to ``log``. A Ctrl-C in our terminal does not reach it; when we
    die, it is told to stop.
    """

    def __init__(
        self, settings: Mapping[str, Any], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        self.base_url = ""
        self._args = arguments({"listen_ip": "127.0.0.1", "listen_port": 0, **settings})
        self._env = {**(os.environ if env is None else env), "PYTHONUNBUFFERED": "1"}
        self._env.pop("PORT", None)  # it would win over the free port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The running process. Raises ``RuntimeError`` when none was started."""
        if self._process is None:
            raise RuntimeError("The server was not started.")
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; a negative number is the signal that ended it."""
        return self._process.poll() if self._process else None

    def start(self, timeout_s: float | None = None) -> str:
        """Start and wait until it listens and is healthy; returns its base URL.

        Without a time limit that is as long as it lives: to fetch and load a model may take an
        hour. Raises ``StartFailed`` with the server's own last sentence.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-m", "tidemill", "--bound-to-parent", "serve", *self._args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._env,
            start_new_session=True,
        )
        self._process = process
        assert process.stdout is not None
        heard: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_copy, args=(process.stdout, self.log, heard), daemon=True).start()
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            self.base_url = heard.get(timeout=timeout_s) or ""
        except queue.Empty:
            self.base_url = ""
        if self.base_url and self._healthy(deadline):
            return self.base_url
        # Its output may end a moment before the process does.
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, min(5.0, deadline - time.monotonic())))
        code = process.poll()
        self.kill()
        if code is None:
            raise StartFailed(f"The server did not start within {timeout_s:g} s", 1)
        raise StartFailed(self._last_words(), code)

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM, wait for the drain, and only then SIGKILL; returns the exit code."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
        return self._process.returncode

    def kill(self) -> None:
        """SIGKILL to the server and every process that it started."""
        assert self._process is not None
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _healthy(self, deadline: float) -> bool:
        while time.monotonic() < deadline and self.returncode is None:
            with suppress(httpx.TransportError):  # not accepting yet
                if httpx.get(f"{self.base_url}/health", trust_env=False, timeout=5).is_success:
                    return True
            time.sleep(0.05)
        return False

    def _last_words(self) -> str:
        lines = self.log.read_text("utf-8", "replace").strip().splitlines()
        return (lines[-1].removeprefix("Error: ") if lines else "It said nothing").rstrip(".")


def _copy(pipe: BinaryIO, log: Path, heard: queue.Queue[str | None]) -> None:
    """Copy the server's output to the log, and hand on the address that it announces."""
    with pipe, log.open("ab", buffering=0) as file:
        for line in pipe:
            file.write(line)
            if line.startswith(ANNOUNCEMENT):
                heard.put(line[len(ANNOUNCEMENT) :].decode().strip())
    heard.put(None)


def bind_to_parent() -> None:
    """Ask the kernel for SIGTERM when our parent dies (Linux; elsewhere the parent stops us)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG, prctl(2)
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGTERM)
