"""Weights in another layout: made once, found again, and never a reason not to start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tidemill.backends.llama.weights import resolve
from tidemill.errors import EngineUnavailable

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
) -> Path:
    """The file for a choice."""
    from tidemill.backends.llama.layout import laid_out

    return laid_out(path or resolve("smollm2"), choice, on_gpu=on_gpu, threads=1, say=said.append)


def test_a_slow_format_is_rewritten_once(said: list[str], cache: Path) -> None:
    """``auto`` makes Q8_0 of Q4_1; the second start finds the file; the line says where it is."""
    from tidemill.backends.llama.layout import file_type

    assert file_type(resolve("smollm2")) == Q4_1
    made = lay_out(said, "auto")
    assert made.parent == cache
    assert file_type(made) == Q8_0
    assert said == [f"The weights were rewritten as q8_0, once, into {made}."]
    stamp = made.stat().st_mtime_ns
    assert lay_out(said, "auto") == lay_out(said, "q8_0") == made
    assert made.stat().st_mtime_ns == stamp
    assert len(said) == 1
    assert sorted(p.suffix for p in cache.iterdir()) == [".gguf", ".lock"]
    assert lay_out(said, "auto", path=made) == made


def test_what_loses_has_to_be_asked_for(said: list[str]) -> None:
    """``q4_0`` rewrites, ``auto`` never does to that."""
    from tidemill.backends.llama.layout import file_type

    made = lay_out(said, "q4_0")
    assert file_type(made) == Q4_0
    assert lay_out(said, "auto", path=made) == made


def test_weights_stay_on_a_gpu_and_where_that_is_said(said: list[str], cache: Path) -> None:
    """The figures are a CPU's."""
    assert lay_out(said, "as-is") == lay_out(said, "auto", on_gpu=True) == resolve("smollm2")
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
        assert lay_out(said, "auto") == resolve("smollm2")
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
    """The user may have no home."""
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert lay_out(said, "auto") == resolve("smollm2")
    assert said == ["The weights stay as they are: Not a directory."]
