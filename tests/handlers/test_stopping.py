"""The end of a server: what its clients are told, and how long it takes."""

from __future__ import annotations

import socket
from typing import Any, cast
from unittest.mock import AsyncMock, MagicMock

import anyio
import httpx
import pytest

from tests.handlers.world import line
from tests.worlds.server import Server as Live
from tidemill import clock
from tidemill.app import Server
from tidemill.scheduler.bell import Signals
from tidemill.settings import Settings

pytestmark = pytest.mark.anyio


def test_who_waits_for_rows_is_answered() -> None:
    """With what there is: nobody waits for the end of a server that waits for him to leave."""
    with Live(drain_seconds=1) as server, httpx.Client(base_url=server.base_url) as client:
        files = {"file": ("in.jsonl", line("a", "!sleep 600 x"))}
        file = client.post("/v1/files", data={"purpose": "batch"}, files=files).json()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions"}
        batch = client.post("/v1/batches", json=asked).json()
        while client.get("/v1/pool/status").json()["scheduling_pool_active"] < 1:
            pass
        with socket.create_connection((client.base_url.host, client.base_url.port)) as waiting:
            path = f"/v1/batches/{batch['id']}/results?wait=60"
            waiting.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            client.get("/health")  # by its answer the request before it has been taken in
            assert server.stop() == 0
            answer = b"".join(iter(lambda: waiting.recv(65536), b"")).lower()
        assert answer.startswith(b"http/1.1 200 ")
        assert b"x-tidemill-status: in_progress" in answer
        assert answer.endswith(b"\r\n\r\n")
        assert "Traceback" not in server.log()


async def test_closed_signals_hold_nobody() -> None:
    """Neither who waits already nor who comes later."""
    signals = Signals()
    heard: list[bool] = []

    async def wait() -> None:
        heard.append(await signals.wait(1, 600))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.lowlevel.checkpoint()
        signals.close()
    assert await signals.wait(2, 600) is False
    assert heard == [False]


@pytest.mark.parametrize(("waited", "left"), [(0.0, 20.0), (7.0, 13.0), (25.0, 0.0), (None, 20.0)])
async def test_the_drain_has_its_time_once(
    monkeypatch: pytest.MonkeyPatch, waited: float | None, left: float
) -> None:
    """Lines in flight may finish while connections do, and not as long again afterwards."""

    class Runner:
        asked: float | None = None

        def stop_leasing(self) -> None:
            """Nothing to stop."""

        async def drain(self, within_s: float) -> None:
            self.asked = within_s

    now = [1000.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    runner = Runner()
    nothing, services = cast(Any, None), MagicMock()
    services.arrears.close = AsyncMock()
    server = Server(Settings(drain_seconds=20.0), nothing, {}, cast(Any, runner), services, nothing)
    if waited is not None:
        server.stop()
        now[0] += waited
    await server.drain()
    assert runner.asked == left
