"""Building the native code in tests: only tools that this Python's environment or the PATH has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.native import HAVE_CORE

REPOSITORY = Path(__file__).parents[2]

Tool = Callable[..., subprocess.CompletedProcess[str]]


def which(name: str) -> str | None:
    """A tool's path: beside this Python first, as pip installs it there, then on the PATH."""
    beside = str(Path(sys.executable).parent)
    return shutil.which(name, path=os.pathsep.join((beside, os.environ["PATH"])))


# Where either is missing, the package is pure Python, and that is what these tests then test.
CAN_BUILD = (
    any(which(name) for name in (os.environ.get("CXX", "c++"), "c++", "g++", "clang++"))
    and Path(sysconfig.get_path("include"), "Python.h").is_file()
)
collect_ignore = [] if HAVE_CORE else ["test_step.py"]


@pytest.fixture
def cmake() -> Tool:
    """Run CMake with arguments; its output is in ``stdout``, errors included."""
    path = which("cmake")
    assert path is not None, "the tests need CMake: pip install cmake"

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [path, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
            check=False,
        )

    return run
