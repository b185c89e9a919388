"""The application over a real store and the echo engine, in this process."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from litestar import Litestar

from tidemill import clock, ids
from tidemill.app import running
from tidemill.backends.echo import EchoReplica
from tidemill.handlers import create_app
from tidemill.handlers.deps import Services
from tidemill.settings import Settings
from tidemill.types import KeyRecord

ALICE, BOB = "alice-secret-key", "bob-secret-key"


class World:
    """One application and a client of it, which sends ``key``."""

    def __init__(
        self,
        app: Litestar,
        services: Services,
        client: httpx.AsyncClient,
        engine: EchoReplica,
        key: str = ALICE,
        other_key: str = BOB,
    ) -> None:
        self.app = app
        self.engine = engine
        self.key = key
        self.other_key = other_key
        self.services = services
        self.client = client

    def as_bob(self) -> dict[str, str]:
        """Headers of somebody else."""
        return {"Authorization": f"Bearer {self.other_key}"}

    @asynccontextmanager
    async def for_newcomers(self) -> AsyncGenerator[World]:
        """The same application, seen by two owners who have nothing yet."""
        keys = [ids.key_secret(), ids.key_secret()]
        for secret in keys:
            digest = hashlib.sha256(secret.encode()).hexdigest()
            key_id = ids.key_id()
            await self.services.store.keys.add(
                KeyRecord(
                    id=key_id,
                    name=key_id,
                    owner=key_id,
                    prefix=secret[:6],
                    digest=digest,
                    created_at=clock.now(),
                )
            )
        async with _client(self.app, keys[0]) as client:
            yield World(self.app, self.services, client, self.engine, *keys)

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


class HungUp:
    """A client that sends a request and leaves when told to."""

    def __init__(self, world: World, body: dict[str, Any], key: str = ALICE) -> None:
        self._key = key
        self._app = world.app
        self._raw = json.dumps(body).encode()
        self._sent = False
        self.leave = asyncio.Event()
        self.got: asyncio.Queue[Any] = asyncio.Queue()

    async def receive(self) -> Any:
        """The body, then nothing until the client leaves."""
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._raw, "more_body": False}
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def run(self, send: Callable[[Any], Awaitable[None]] | None = None) -> None:
        """Call the application as a server would; ``got`` has its answer, or ``send`` gets it."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/chat/completions",
            "raw_path": b"/v1/chat/completions",
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"authorization", f"Bearer {self._key}".encode()),
                (b"content-type", b"application/json"),
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        await self._app(scope, self.receive, send or self.got.put)  # type: ignore[arg-type]


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
        engine = next(iter(server.replicas.values())).engine
        assert isinstance(engine, EchoReplica)
        app = create_app(server.services)
        async with _client(app, ALICE) as client:
            yield World(app, server.services, client, engine)


def _client(app: Litestar, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False),  # type: ignore[arg-type]
        base_url="http://localhost",
        headers={"Authorization": f"Bearer {key}"},
    )
