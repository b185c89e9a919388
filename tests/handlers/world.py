"""The application over a real store and the echo engine, in this process."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from litestar import Litestar

from tidemill.app import running
from tidemill.backends.echo import EchoReplica
from tidemill.handlers import create_app
from tidemill.handlers.deps import Services
from tidemill.settings import Settings

ALICE, BOB = "alice-secret-key", "bob-secret-key"


class World:
    """One application and a client of it; ``client`` sends Alice's key."""

    def __init__(
        self, app: Litestar, services: Services, client: httpx.AsyncClient, engine: EchoReplica
    ) -> None:
        self.app = app
        self.engine = engine
        self.services = services
        self.client = client

    def as_bob(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {BOB}"}

    async def upload(self, data: bytes | None = None, **more: Any) -> dict[str, Any]:
        answer = await self.client.post(
            "/v1/files",
            data={"purpose": "batch"},
            files={"file": ("in.jsonl", line() if data is None else data)},
            **more,
        )
        assert answer.status_code == 200, answer.text
        file: dict[str, Any] = answer.json()
        return file

    async def create(self, data: bytes | None = None, **fields: Any) -> dict[str, Any]:
        file = await self.upload(data)
        asked = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **fields}
        answer = await self.client.post("/v1/batches", json={"input_file_id": file["id"], **asked})
        assert answer.status_code == 200, answer.text
        batch: dict[str, Any] = answer.json()
        return batch

    async def finished(self, batch_id: str) -> dict[str, Any]:
        """The batch once it is terminal, told by the bell of its rows."""
        after = 0
        while True:
            answer = await self.client.get(
                f"/v1/batches/{batch_id}/results", params={"after": after, "wait": 20}
            )
            after = int(answer.headers["x-tidemill-next"])
            if answer.headers["x-tidemill-status"] in ("completed", "failed", "cancelled"):
                batch: dict[str, Any] = (await self.client.get(f"/v1/batches/{batch_id}")).json()
                return batch


def line(custom_id: str = "a", text: str = "hi", model: str = "echo") -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    request = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
    }
    return json.dumps(request).encode() + b"\n"


Open = Callable[..., AbstractAsyncContextManager[World]]


@asynccontextmanager
async def opened(path: Path, **settings: Any) -> AsyncGenerator[World]:
    """A world with the keys of Alice and Bob, and settings of the test's choice."""
    chosen = {
        "engine": "echo",
        "storage_path": str(path),
        "api_keys": f"{ALICE},{BOB}",
        "drain_seconds": 0.0,
        **settings,
    }
    async with running(Settings(**chosen)) as server:
        engine = server.replicas["echo"]
        assert isinstance(engine, EchoReplica)
        app = create_app(server.services)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False),  # type: ignore[arg-type]
            base_url="http://testserver",
            headers={"Authorization": f"Bearer {ALICE}"},
        ) as client:
            yield World(app, server.services, client, engine)
