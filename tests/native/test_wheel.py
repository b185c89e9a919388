"""What gets installed: sdist, then the wheel that is built from it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.native.conftest import CAN_BUILD, REPOSITORY, which


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of this checkout."""
    folder = tmp_path_factory.mktemp("sdist")
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", code, folder], cwd=REPOSITORY, check=True, capture_output=True
    )
    [path] = folder.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip builds from that sdist, with the tools that are installed here."""
    folder = tmp_path_factory.mktemp("wheel")
    tools = {str(Path(tool).parent) for name in ("cmake", "ninja") if (tool := which(name))}
    path = os.pathsep.join((*tools, os.environ["PATH"]))
    built = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"),
            "--disable-pip-version-check",
            *("-Ccmake.define.TIDEMILL_CUDA=OFF", "-Ccmake.define.TIDEMILL_LLAMA=OFF"),
            *("-w", folder, sdist),
        ],
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout
    [path_of_wheel] = folder.glob("*.whl")
    return path_of_wheel


def test_the_sdist_holds_the_links_and_everything_to_build_from(sdist: Path) -> None:
    """The folders of the top level are there once, and the package reaches them by links."""
    with tarfile.open(sdist) as archive:
        members = {name.partition("/")[2]: archive.getmember(name) for name in archive.getnames()}
    for room in ("handlers", "backends", "storage", "scheduler", "native"):
        assert members[f"tidemill/{room}"].issym()
        assert members[f"{room}/__init__.py"].isfile()
    assert {"CMakeLists.txt", "native/src/core.cpp", "native/tests/main.cpp"} <= members.keys()


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    """Every module, the extension and its stub; no link, no C++, no tests, no stray name."""
    with zipfile.ZipFile(wheel) as archive:
        infos = archive.infolist()
    assert not [i.filename for i in infos if stat.S_ISLNK(i.external_attr >> 16)]
    names = {i.filename for i in infos}
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"tidemill", next(top for top in tops if top.endswith(".dist-info"))}
    assert not [n for n in names if Path(n).suffix in (".cpp", ".hpp", ".cu") or "/tests/" in n]
    tracked = subprocess.run(
        ["git", "-c", "safe.directory=*", "-C", REPOSITORY, "ls-files", "-z", "--", "*.py"],
        capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    rooms = ("handlers/", "backends/", "storage/", "scheduler/", "native/", "web/")
    modules = {f"tidemill/{name}" for name in tracked if name.startswith(rooms)}
    modules |= {name for name in tracked if name.startswith("tidemill/")}
    assert modules <= names
    assert {"tidemill/native/_core.pyi", "tidemill/native/_step.pyi", "tidemill/py.typed"} <= names
    extensions = [n for n in names if n.startswith("tidemill/native/_core.") and ".so" in n]
    assert len(extensions) == CAN_BUILD


@pytest.mark.slow
@pytest.mark.parametrize("extension", [True, False])
def test_the_wheel_works_with_its_extension_and_without(
    wheel: Path, extension: bool, tmp_path: Path
) -> None:
    """Where the extension does not load, the Python pool stands in; both say which one it is."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    if not extension:
        for path in (tmp_path / "tidemill" / "native").glob("_core.*.so"):
            path.unlink()
    code = (
        "from tidemill.native import HAVE_CORE, SlotPool\n"
        "pool = SlotPool(arena_bytes=4096)\n"
        "[handle] = pool.reserve(1, 0)\n"
        "pool.stage(handle)\n"
        "print(HAVE_CORE, pool.start(handle), pool.stats()['arena']['kind'])\n"
    )
    ran = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == ("True 0 host\n" if extension and CAN_BUILD else "False 0 model\n")
