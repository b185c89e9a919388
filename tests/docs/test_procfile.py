"""The Procfile runs as platforms run it: a release step, then a web process on ``$PORT``."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.worlds.requests import chat, jsonl
from tidemill.client import TidemillClient

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def _free_port() -> int:
    """Below the ports that the kernel gives to who asks for any, so that nobody gets it now."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("0.0.0.0", port))
            return port
    pytest.fail("a hundred ports were taken")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """What a platform's configuration gives: settings, a key and a port."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TIDEMILL_", "LOGOS_"))}
    return {
        **kept,
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        "PORT": str(_free_port()),
        "TIDEMILL_API_KEYS": "tm-from-the-environment",
        "TIDEMILL_ENGINE": "echo",
        "TIDEMILL_STORAGE_PATH": str(tmp_path / "store"),
        "TIDEMILL_DRAIN_SECONDS": "2",
    }


@pytest.fixture
def web(env: dict[str, str]) -> Iterator[str]:
    """The web process under honcho, after the release step; its root URL."""
    honcho = [str(BIN / "honcho"), "--procfile", str(ROOT / "Procfile")]
    subprocess.run([*honcho, "start", "release"], env=env, cwd=ROOT, check=True, timeout=280)
    assert Path(env["TIDEMILL_STORAGE_PATH"], "tidemill.db").is_file()
    process = subprocess.Popen([*honcho, "start", "web"], env=env, cwd=ROOT, start_new_session=True)
    root = f"http://127.0.0.1:{env['PORT']}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                assert httpx.get(f"{root}/health", trust_env=False).status_code == 200
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline, "nobody listens on $PORT"
                assert process.poll() is None, "honcho ended"
                time.sleep(0.05)
        yield root
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=120)


def test_release_then_web_with_a_key_from_the_environment(web: str) -> None:
    """The server listens on every address, so it wants the key; with it a batch runs."""
    assert httpx.get(f"{web}/v1/files", trust_env=False).status_code == 401
    with TidemillClient(web, "tm-from-the-environment") as client:
        file = client.upload_file(jsonl([chat("a", "tide")]), filename="in.jsonl")
        batch = client.create_batch(file["id"])
        batch = client.wait_for_batch(batch["id"], poll_interval=0.05, timeout=120)
        assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        assert b"tide" in client.download_file_content(batch["output_file_id"])
