"""llama.cpp's own server and benchmark, to be compared with: built once, from the source that
llama-cpp-python ships."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from tidemill.backends.llama.layout import Weights

TOOLS = ("llama-batched-bench", "llama-server")
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_ALL_WARNINGS=OFF",
)  # fmt: skip


def build(folder: Path) -> Path:
    """The folder with both programs; compiles them if they are not there (some minutes)."""
    programs = folder / "bin"
    if all((programs / tool).exists() for tool in TOOLS):
        return programs
    import llama_cpp

    folder.mkdir(parents=True, exist_ok=True)
    package = f"llama-cpp-python=={llama_cpp.__version__}"
    print(f"Building {', '.join(TOOLS)} from {package} into {folder}.", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"]
    _run([*pip, "--no-binary", ":all:", "-d", str(folder), package])
    (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (source,) = folder.glob("llama_cpp_python-*/vendor/llama.cpp")
    _run(["cmake", "-S", str(source), "-B", str(folder), *_OPTIONS])
    _run(["cmake", "--build", str(folder), "--parallel", "--target", *TOOLS])
    shutil.rmtree(source.parent.parent)
    archive.unlink()
    return programs


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])} ... failed:\n{done.stdout[-2_000:]}")


def _files(weights: Weights) -> list[str]:
    adapters = [part for one in weights.adapters for part in ("--lora", one.path)]
    return ["-m", str(weights.path), *adapters]


def batched_bench(
    programs: Path, model: Path, *, prompt: int, answer: int, sequences: int, threads: int
) -> float:
    """Generated tokens/s over a whole block of ``sequences`` prompts and answers."""
    context = sequences * 256 * -(-(prompt + answer) // 256)
    command = [
        str(programs / "llama-batched-bench"), "-m", str(model), "-c", str(context), "-b", "2048",
        "-ub", "512", "-npp", str(prompt), "-ntg", str(answer), "-npl", str(sequences),
        "-t", str(threads), "-tb", str(threads), "--output-format", "jsonl",
    ]  # fmt: skip
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for line in out.splitlines():
        if re.match(r"\s*\{", line):
            return sequences * answer / float(json.loads(line)["t"])
    raise SystemExit(f"llama-batched-bench printed no result:\n{out[-1_000:]}")


class LlamaServer:
    """``llama-server`` on a free port of this machine."""

    def __init__(
        self, programs: Path, model: Weights, *, slots: int, context: int, threads: int
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.slots = slots
        self._process = subprocess.Popen(
            [
                str(programs / "llama-server"), *_files(model), "--port", str(self.port),
                "-np", str(slots), "-c", str(slots * context), "-no-kvu", "-b", "2048",
                "-ub", "512", "-t", str(threads), "-tb", str(threads), "--log-disable",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def __enter__(self) -> Self:
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return self
            except (urllib.error.URLError, ConnectionError):
                if self._process.poll() is not None:
                    break
                time.sleep(0.1)
        self._process.kill()
        raise SystemExit("llama-server did not start")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait()

    def answer(self, lines: list[bytes]) -> float:
        """Generated tokens/s over the requests of a batch file, one client for each slot."""
        begun = time.perf_counter()
        with ThreadPoolExecutor(self.slots) as clients:
            tokens = sum(clients.map(self._one, lines))
        return tokens / (time.perf_counter() - begun)

    def _one(self, line: bytes) -> int:
        asked: Any = json.loads(line)
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{asked['url']}",
            data=json.dumps(asked["body"]).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            return int(json.load(response)["usage"]["completion_tokens"])
