"""The native code builds, under the sanitizers too, and where it cannot be built that is said."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.conftest import CAN_BUILD, REPOSITORY, Tool, which
from tidemill.native import HAVE_CORE


def said(done: subprocess.CompletedProcess[str]) -> str:
    """What CMake said, its line breaks undone."""
    return " ".join(done.stdout.split())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("sanitizer", "processor"),
    [("thread", "native"), ("address", "native"), ("address", "x86-64-v3")],
)
def test_the_native_code_is_clean_under_the_sanitizers(
    sanitizer: str, processor: str, cmake: Tool, tmp_path: Path
) -> None:
    """Random walks, copies held back and five threads on one pool, attention of all shapes: no
    race, no bad access. What attention needs is compiled for narrower vectors, too."""
    configured = cmake(
        "-S", REPOSITORY, "-B", tmp_path, f"-DTIDEMILL_SANITIZE={sanitizer}",
        f"-DTIDEMILL_ARCH={processor}",
        "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1",
    )  # fmt: skip
    assert configured.returncode == 0, configured.stdout
    built = cmake("--build", tmp_path, "-j", 1)
    assert built.returncode == 0, built.stdout
    ran = subprocess.run(
        [tmp_path / "pool_test"], capture_output=True, text=True, timeout=300, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "ok\n"), ran.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_cuda_arena_compiles_and_links_where_there_is_a_cuda_compiler(
    cmake: Tool, tmp_path: Path
) -> None:
    """With nvcc the pool links with it and runs on what device there is; without, ON is refused."""
    configured = cmake(
        "-S", REPOSITORY, "-B", tmp_path, "-DTIDEMILL_CUDA=ON", "-DTIDEMILL_SANITIZE=none"
    )
    if configured.returncode != 0:
        assert which("nvcc") is None  # CMake also looks where the PATH does not lead
        assert "TIDEMILL_CUDA=ON, but there is no working nvcc" in said(configured)
        return
    assert configured.returncode == 0, configured.stdout
    assert "CMake Error" not in configured.stdout
    built = cmake("--build", tmp_path, "-j", 1)
    assert built.returncode == 0, built.stdout
    ran = subprocess.run(
        [tmp_path / "pool_test"], capture_output=True, text=True, timeout=300, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "ok\n"), ran.stderr


def test_without_a_compiler_the_build_goes_on_and_says_what_is_left_out(
    cmake: Tool, tmp_path: Path
) -> None:
    """The pure-Python package is installed; who demanded native code gets one sentence."""
    nothing = tmp_path / "no-tools"
    nothing.mkdir()
    without = {"PATH": str(nothing), "CXX": "", "CUDACXX": ""}
    ninja = which("ninja") or which("make")
    for native, code in (("AUTO", 0), ("ON", 1)):
        configured = cmake(
            "-S", REPOSITORY, "-B", tmp_path / native, f"-DCMAKE_MAKE_PROGRAM={ninja}",
            f"-DTIDEMILL_NATIVE={native}", **without,
        )  # fmt: skip
        assert "there is no working C++ compiler (set CXX, or install g++)" in said(configured)
        assert configured.returncode == code, configured.stdout


def test_a_misspelt_option_stops_the_build(cmake: Tool, tmp_path: Path) -> None:
    """TIDEMILL_CUDA=YES would otherwise mean what nobody can tell."""
    configured = cmake("-S", REPOSITORY, "-B", tmp_path, "-DTIDEMILL_CUDA=YES")
    assert configured.returncode != 0
    assert "TIDEMILL_CUDA must be AUTO, ON or OFF, not 'YES'" in said(configured)


def test_the_extension_is_there_wherever_it_can_be_built() -> None:
    """A compiler and the headers of this Python are enough; the fallback is no excuse."""
    assert HAVE_CORE == CAN_BUILD


STUBS = ["_core", pytest.param("_step", marks=pytest.mark.llama)] if HAVE_CORE else []


@pytest.mark.parametrize("module", STUBS)
def test_the_committed_stub_is_what_the_extension_has(module: str, tmp_path: Path) -> None:
    """The stubs are nanobind's own, up to formatting."""
    fresh = tmp_path / f"{module}.pyi"
    # The step needs the libllama of llama_cpp, which is loaded by whoever uses it.
    first = "import llama_cpp; " if module == "_step" else ""
    code = first + "import sys; from nanobind.stubgen import main; main(sys.argv[1:])"
    subprocess.run(
        [sys.executable, "-c", code, "-q", "-m", f"tidemill.native.{module}", "-o", fresh],
        check=True,
    )
    committed = REPOSITORY / "native" / f"{module}.pyi"
    assert ast.dump(ast.parse(committed.read_text())) == ast.dump(ast.parse(fresh.read_text()))
