"""Weights in another layout: formats that llama.cpp has no fast kernels for, rewritten once.

``auto`` chooses only what is near-lossless: Q4_1 and Q5_1 become Q8_0, which holds every one of
their values to within half a step of 1/127, and which a CPU multiplies about twice as fast. Q4_0
is faster still and loses; it has to be asked for. ``bench/bench_engine_weights.py`` measures both.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from llama_cpp import llama_cpp as C

from tidemill.backends.llama import gguf
from tidemill.backends.llama.footprint import TYPES, layout
from tidemill.errors import EngineUnavailable, SettingsError

_LARGEST_GROWTH = 2.1
"""Q8_0 over Q4_1, and a margin."""


def laid_out(
    path: Path, choice: str, *, on_gpu: bool, threads: int, say: Callable[[str], None]
) -> Path:
    """The file to load for ``path`` where ``choice`` is auto, as-is, q8_0 or q4_0.

    A rewritten file lies in the user's cache folder and is made once; ``say`` gets a line when
    that happens, and when ``auto`` would have, but there is no room. Raises ``EngineUnavailable``
    when a layout that was asked for cannot be made.
    """
    if choice == "as-is":
        return path
    wanted = layout(choice, file_type(path), on_gpu=on_gpu)
    if wanted is None:
        return path
    try:
        return _cached(path, wanted, threads, say, careful=choice == "auto")
    except OSError as exc:
        if choice == "auto":
            say(f"The weights stay as they are: {exc.strerror or exc}.")
            return path
        raise EngineUnavailable(
            f"The weights cannot be rewritten as {wanted}: {exc.strerror or exc}."
        ) from exc


def file_type(path: Path) -> int | None:
    """llama.cpp's number for the format of a GGUF; None where it has none or cannot be read."""
    try:
        return gguf.read(path).file_type
    except SettingsError:
        return None


def cache_folder() -> Path:
    """Where rewritten weights are kept. Everything in it may be deleted at any time."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tidemill" / "weights"


def _cached(
    path: Path, wanted: str, threads: int, say: Callable[[str], None], *, careful: bool
) -> Path:
    facts = path.stat()
    identity = f"{path.resolve()}\0{facts.st_size}\0{facts.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    target = cache_folder() / f"{path.stem}-{digest}-{wanted}.gguf"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_suffix(".lock")):
        if target.exists():  # another process was faster
            return target
        room = facts.st_size * _LARGEST_GROWTH
        if shutil.disk_usage(target.parent).free < room:
            raise OSError(0, f"there is no room for {room / 1e9:.1f} GB in {target.parent}")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if careful and room > memory / 2:
            raise OSError(0, "rewritten they would take more than half of the memory")
        partial = target.with_suffix(".partial")
        try:
            _rewrite(path, partial, TYPES[wanted], threads)
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    say(f"The weights were rewritten as {wanted}, once, into {target}.")
    return target


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _rewrite(path: Path, to: Path, ftype: int, threads: int) -> None:
    params = C.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = ftype, threads, True
    if C.llama_model_quantize(os.fsencode(path), os.fsencode(to), ctypes.byref(params)):
        raise OSError(0, "llama.cpp could not rewrite them")
