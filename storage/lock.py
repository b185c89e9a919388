"""One server per store: a lock file that dies with the process that holds it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from tidemill.errors import SettingsError, StoreBusy

LOCK = "tidemill.lock"


class StoreLock:
    """An exclusive lock on a storage path.

    The kernel releases it when the process ends, however it ends. A child process must not inherit
    it: Python's descriptors are closed on exec, so start children with ``spawn`` or ``subprocess``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def take(self) -> None:
        """Create the storage path where it is missing and lock it.

        Raises ``StoreBusy``, naming the path and the process that has it, and ``SettingsError`` for
        a path that cannot be a store.
        """
        try:
            self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(self._path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise SettingsError(
                f"Cannot use {self._path} (setting 'storage_path') as a folder for the store: "
                f"{exc.strerror}."
            ) from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            os.close(fd)
            holder = f"process {pid}" if pid else "another process"
            raise StoreBusy(
                f"The store at {self._path} is in use by {holder}; "
                "stop it or choose another storage path."
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd

    def release(self) -> None:
        """Give the storage path back; harmless when it was not taken."""
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None
