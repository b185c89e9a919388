"""The real server, in its own process, on a free port: for tests that talk to it from outside.

::

    with Server(max_pool_size=4) as server:
        client = OpenAI(base_url=f"{server.base_url}/v1", api_key="unused")
        server.kill()  # as kill -9 would
        server.restart()  # the same command on the same store, at a new port
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tidemill.cli.child import ServerProcess

_OURS = ("TIDEMILL_", "LOGOS_")


class Server:
    """A server with settings by name; ``storage_path`` and the log outlive a restart.

    The environment's own settings do not reach it: only ``env`` does, on top of the rest.
    """

    def __init__(
        self,
        engine: str = "echo",
        *,
        storage_path: Path | None = None,
        env: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self._folder = None if storage_path else tempfile.TemporaryDirectory(prefix="tidemill-")
        self.storage_path = storage_path or Path(self._folder.name) / "store"  # type: ignore[union-attr]
        self.settings: dict[str, Any] = {
            "engine": engine,
            "storage_path": self.storage_path,
            "drain_seconds": 5,
            **settings,
        }
        self.env = dict(env or {})
        self.starts = 0
        self._process: ServerProcess | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._clean()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None and self._process.returncode is None:
            self.process.stop(timeout_s=60)
        self._clean()

    def _clean(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def process(self) -> ServerProcess:
        """The running or last process."""
        assert self._process is not None, "the server was never started"
        return self._process

    @property
    def base_url(self) -> str:
        """Root of the server, without ``/v1``."""
        return self.process.base_url

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self.process.returncode

    @property
    def log_path(self) -> Path:
        """What the server printed since its latest start."""
        return self.storage_path.parent / f"{self.storage_path.name}.{self.starts}.log"

    def log(self) -> str:
        """Text of the latest start's log."""
        return self.log_path.read_text("utf-8", "replace")

    def start(self, timeout_s: float = 120.0, **more_env: str) -> str:
        """Start; returns the base URL. Raises ``StartFailed`` with the server's last sentence."""
        self.starts += 1
        env = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        self._process = ServerProcess(self.settings, self.log_path, {**env, **self.env, **more_env})
        return self._process.start(timeout_s)

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM and wait for the drain; returns the exit code."""
        return self.process.stop(timeout_s)

    def kill(self) -> None:
        """SIGKILL, engines included."""
        self.process.kill()

    def restart(self, timeout_s: float = 120.0, **more_env: str) -> str:
        """Start again on the same store, after ``stop``, ``kill`` or a crash."""
        if self.returncode is None:
            self.stop()
        return self.start(timeout_s, **more_env)
