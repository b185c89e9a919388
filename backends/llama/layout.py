"""Weights in another layout: formats that llama.cpp has no fast kernels for, rewritten once.

``auto`` chooses only what is lossless or near to it: Q4_1 becomes Q4_0 and an adapter with what
that format cannot say (``split``), Q5_1 becomes Q8_0, which holds every one of its values to within
half a step of 1/127. Q4_0 alone is fastest and loses; it has to be asked for.
``bench/bench_engine_weights.py`` measures them all.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from llama_cpp import llama_cpp as C

from tidemill.backends.llama import gguf, split
from tidemill.backends.llama.divergence import Reading
from tidemill.backends.llama.footprint import TYPES, layout
from tidemill.backends.llama.model import Model
from tidemill.errors import EngineUnavailable, SettingsError
from tidemill.types import Adapter

_LARGEST_GROWTH = 2.1
"""Q8_0 over Q4_1, and a margin."""
_SAME = 0.05
"""Nats. Another rounding is a tenth of it, matrices without their adapter hundreds of times it."""


class Weights(NamedTuple):
    """The files to load instead of a model's own."""

    path: Path
    adapters: tuple[Adapter, ...] = ()
    """What belongs to them; other adapters come on top."""


def laid_out(
    path: Path, choice: str, *, on_gpu: bool, threads: int, say: Callable[[str], None]
) -> Weights:
    """What to load for ``path`` where ``choice`` is auto, as-is, q8_0 or q4_0.

    Rewritten files lie in the user's cache folder and are made once; ``say`` gets a line when that
    happens, and when ``auto`` would have, but it cannot. Raises ``EngineUnavailable`` when a layout
    that was asked for cannot be made.
    """
    if choice == "as-is":
        return Weights(path)
    wanted = layout(choice, file_type(path), on_gpu=on_gpu)
    if wanted is None:
        return Weights(path)
    try:
        return _cached(path, wanted, threads, say, careful=choice == "auto")
    except OSError as exc:
        if choice == "auto":
            say(f"The weights stay as they are: {exc.strerror or exc}.")
            return Weights(path)
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
    """Where rewritten weights are kept. Everything in it may be deleted at any time. Raises
    ``OSError`` for a user without a home, as containers have."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(base).expanduser() / "tidemill" / "weights"
    except RuntimeError as exc:
        raise OSError(0, "this user has no home folder, and XDG_CACHE_HOME is not set") from exc


def _cached(
    path: Path, wanted: str, threads: int, say: Callable[[str], None], *, careful: bool
) -> Weights:
    facts = path.stat()
    identity = f"{path.resolve()}\0{facts.st_size}\0{facts.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    target = cache_folder() / f"{path.stem}-{digest}-{wanted}.gguf"
    files = [target, target.with_suffix(".rest.gguf")] if wanted == "split" else [target]
    made, lock = _weights(files), target.with_suffix(".lock")
    if _whole(files, lock):
        return made
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(lock) as record:
        if _whole(files, lock):  # another process was faster
            return made
        room = facts.st_size * _LARGEST_GROWTH
        if shutil.disk_usage(target.parent).free < room:
            raise OSError(0, f"there is no room for {room / 1e9:.1f} GB in {target.parent}")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if careful and room > memory / 2:
            raise OSError(0, "rewritten they would take more than half of the memory")
        partial = [file.with_suffix(".partial") for file in files]
        try:
            if wanted == "split":
                _split(path, partial)
            else:
                _rewrite(path, partial[0], TYPES[wanted], threads)
            change = _compared(Weights(path), _weights(partial), threads, exact=wanted == "split")
            sizes = [_stored(written) for written in partial]
            for file, written in zip(files, partial, strict=True):
                os.replace(written, file)
            _note(sizes, record)
        finally:
            for file in partial:
                file.unlink(missing_ok=True)
    what = "Q4_0 with an adapter" if wanted == "split" else wanted
    say(f"The weights were rewritten as {what}, once, into {target}; {change}.")
    return made


def _weights(files: list[Path]) -> Weights:
    return Weights(files[0], tuple(Adapter(path=str(file)) for file in files[1:]))


def _whole(files: list[Path], lock: Path) -> bool:
    """True when all files are as long as they were when they were finished: what a full disk or a
    lost power supply cut off would stop every start."""
    try:
        finished: list[int] = json.loads(lock.read_bytes())
        return [file.stat().st_size for file in files] == finished
    except (OSError, ValueError):
        return False


def _stored(path: Path) -> int:
    """The bytes of a file, all of which are on the disk now."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def _note(sizes: list[int], record: IO[str]) -> None:
    """Write down that files of these sizes are finished."""
    record.truncate(0)
    json.dump(sizes, record)
    record.flush()
    os.fsync(record.fileno())


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[IO[str]]:
    """Nobody else makes these files meanwhile; the lock's file says which sizes they have when they
    are finished."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _rewrite(path: Path, to: Path, ftype: int, threads: int) -> None:
    params = C.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = ftype, threads, True
    if C.llama_model_quantize(os.fsencode(path), os.fsencode(to), ctypes.byref(params)):
        raise OSError(0, "llama.cpp could not rewrite them")


def _split(path: Path, to: list[Path]) -> None:
    try:
        split.write(path, to[0], to[1])
    except ValueError as exc:
        raise OSError(0, str(exc)) from exc


def _compared(own: Weights, made: Weights, threads: int, *, exact: bool) -> str:
    """What rewriting changed, in words. ``exact``: it must not have changed anything, but some
    architectures compute with matrices to which they add no adapter."""
    readings = []
    for weights in (own, made):
        try:
            model = Model(weights.path, 0, weights.adapters)
            try:
                readings.append(Reading(model, threads))
            finally:
                model.close()
        except EngineUnavailable as exc:
            if exact:
                raise OSError(0, exc.message.rstrip(".")) from exc
            return "what that changes cannot be measured with this model"
    before, after = readings
    apart = before.divergence(after)
    if exact and not apart < _SAME:
        raise OSError(0, f"this architecture computes other numbers with them ({apart:.2g} nats)")
    change = 100 * (after.perplexity / before.perplexity - 1)
    return (
        f"their perplexity on a short text is {after.perplexity:.2f}, it was "
        f"{before.perplexity:.2f} ({change:+.1f} %)"
    )
