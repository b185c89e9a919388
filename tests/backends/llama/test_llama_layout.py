"""Weights in another layout: made once, found again, and never a reason not to start."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tidemill.backends.llama.weights import resolve
from tidemill.errors import EngineUnavailable, SettingsError

if TYPE_CHECKING:
    from tidemill.backends.llama.layout import Weights

pytestmark = pytest.mark.llama

Q4_1, Q8_0, Q4_0 = 3, 7, 2


@pytest.fixture
def said() -> list[str]:
    """The lines for the log."""
    return []


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own; llama.cpp silent."""
    from tidemill.backends.llama.model import silence

    silence(4)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tidemill" / "weights"


def lay_out(
    said: list[str], choice: str, *, path: Path | None = None, on_gpu: bool = False
) -> Weights:
    """The files for a choice."""
    from tidemill.backends.llama.layout import laid_out

    return laid_out(path or resolve("smollm2"), choice, on_gpu=on_gpu, threads=1, say=said.append)


def test_a_slow_format_is_rewritten_once(said: list[str], cache: Path) -> None:
    """``auto`` makes Q4_0 and an adapter of Q4_1; the second start finds both files, and makes
    them again where one is gone; the line says where they are."""
    from tidemill.backends.llama.layout import file_type

    assert file_type(resolve("smollm2")) == Q4_1
    made = lay_out(said, "auto")
    assert made.path.parent == cache
    assert file_type(made.path) == Q4_0
    (line,) = said
    assert line.startswith(
        f"The weights were rewritten as Q4_0 with an adapter, once, into {made.path}; their "
        "perplexity on a short text is "
    )
    before_and_after = [float(x) for x in re.findall(r"\d+\.\d\d(?= \(|,)", line)]
    assert before_and_after[0] == pytest.approx(before_and_after[1], rel=0.02)
    (adapter,) = made.adapters
    assert adapter.scale == 1.0
    stamps = [Path(file).stat().st_mtime_ns for file in (made.path, adapter.path)]
    assert lay_out(said, "auto") == made
    assert stamps == [Path(file).stat().st_mtime_ns for file in (made.path, adapter.path)]
    assert len(said) == 1
    assert sorted(p.suffix for p in cache.iterdir()) == [".gguf", ".gguf", ".lock"]
    Path(adapter.path).unlink()
    assert lay_out(said, "auto") == made
    assert Path(adapter.path).exists()


def test_files_that_are_cut_off_are_made_again(said: list[str]) -> None:
    """A lost power supply may leave any of them shorter than it was; no start fails for it."""
    made = lay_out(said, "auto")
    paths = [made.path, Path(made.adapters[0].path)]
    whole = [path.read_bytes() for path in paths]
    for n, path in enumerate([*paths, made.path.with_suffix(".lock")], start=2):
        os.truncate(path, path.stat().st_size // 2)
        assert lay_out(said, "auto") == made
        assert [path.read_bytes() for path in paths] == whole
        assert len(said) == n


def test_auto_says_the_same_as_the_file(said: list[str]) -> None:
    """The probabilities of next tokens differ by no more than by another rounding: less than those
    of Q8_0 may. Q4_0 alone is another model."""
    from tidemill.backends.llama.divergence import Reading
    from tidemill.backends.llama.model import Model

    computed = {}
    for choice in ("as-is", "auto", "q4_0"):
        weights = lay_out(said, choice)
        model = Model(weights.path, 0, weights.adapters)
        computed[choice] = Reading(model, 1)
        model.close()
    own = computed["as-is"]
    assert own.divergence(own) == 0
    assert 0 < own.divergence(computed["auto"]) < 0.01
    assert own.divergence(computed["q4_0"]) > 0.1
    assert computed["auto"].perplexity == pytest.approx(own.perplexity, rel=0.02)
    assert computed["q4_0"].perplexity > 1.05 * own.perplexity
    assert 2 < own.perplexity < 100


def test_weights_whose_adapter_is_not_used_are_not_used(
    said: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some architecture may multiply with a matrix on its own; that is seen before it answers."""
    from tidemill.backends.llama import layout
    from tidemill.backends.llama.model import Model

    monkeypatch.setattr(layout, "Model", lambda path, layers, adapters: Model(path, layers))
    assert lay_out(said, "auto").path == resolve("smollm2")
    (line,) = said
    assert line.startswith("The weights stay as they are: this architecture computes other numbers")
    assert {p.suffix for p in cache.iterdir()} == {".lock"}


def test_what_is_asked_for_is_made(said: list[str], cache: Path) -> None:
    """``q8_0`` and ``q4_0`` rewrite any file, once; ``auto`` leaves what they made as it is."""
    from tidemill.backends.llama.layout import file_type

    for choice, kind in (("q4_0", Q4_0), ("q8_0", Q8_0)):
        made = lay_out(said, choice)
        assert file_type(made.path) == kind
        assert said.pop().startswith(
            f"The weights were rewritten as {choice}, once, into {made.path}; their perplexity"
        )
        assert lay_out(said, choice) == made
        assert lay_out(said, "auto", path=made.path) == made
    assert said == []


def test_weights_stay_on_a_gpu_and_where_that_is_said(said: list[str], cache: Path) -> None:
    """The figures are a CPU's."""
    assert lay_out(said, "as-is") == lay_out(said, "auto", on_gpu=True)
    assert lay_out(said, "as-is") == (resolve("smollm2"), ())
    assert not cache.exists()
    assert said == []


def test_without_room_auto_stays_and_a_demand_fails(
    said: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is a line in the log, or one sentence; half-written files do not stay."""
    from tidemill.backends.llama import layout

    class Full:
        free = 1_000

    with monkeypatch.context() as patch:
        patch.setattr(layout.shutil, "disk_usage", lambda path: Full)
        assert lay_out(said, "auto").path == resolve("smollm2")
        with pytest.raises(
            EngineUnavailable, match=r"rewritten as q4_0: there is no room for 0\.2"
        ):
            lay_out(said, "q4_0")
    assert len(said) == 1
    assert said[0].startswith("The weights stay as they are: there is no room")

    begun: list[Path] = []

    def fails(source: bytes, target: bytes, params: Any) -> int:
        begun.append(Path(os.fsdecode(target)))
        begun[-1].write_bytes(b"half")
        return 1

    monkeypatch.setattr(layout.C, "llama_model_quantize", fails)
    with pytest.raises(EngineUnavailable, match="could not rewrite"):
        lay_out(said, "q8_0")
    (partial,) = begun
    assert partial.parent == cache
    assert {p.suffix for p in cache.iterdir()} == {".lock"}


def test_a_cache_that_cannot_be_written_is_no_reason_not_to_start(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the user has no home, as in a container that runs as a number."""
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert lay_out(said, "auto").path == resolve("smollm2")
    assert said == ["The weights stay as they are: Not a directory."]

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # nobody's
    assert lay_out(said, "auto").path == resolve("smollm2")
    assert said[1:] == [
        "The weights stay as they are: this user has no home folder, and XDG_CACHE_HOME is not set."
    ]
    with pytest.raises(SettingsError, match="there is no such home folder"):
        resolve("~/x.gguf")
