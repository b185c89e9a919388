"""This server in this process, with the official SDK in front of it."""

from __future__ import annotations

import importlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import openai
from openai.types import Batch

from tidemill.app import Server, running
from tidemill.handlers import create_app
from tidemill.settings import Settings

TERMINAL = ("completed", "failed", "expired", "cancelled")
CHAT = "/v1/chat/completions"


def line(
    custom_id: str, text: str = "hi", *, model: str = "big", url: str = CHAT, **body: Any
) -> bytes:
    """One line of an input file."""
    said = (
        {"messages": [{"role": "user", "content": text}]}
        if url == CHAT
        else {"input": text}
        if url in ("/v1/embeddings", "/v1/responses")
        else {"prompt": text}
    )
    request = {"custom_id": custom_id, "method": "POST", "url": url}
    return json.dumps(request | {"body": {"model": model, **said, **body}}).encode() + b"\n"


class House:
    """A server in this process and a client of it."""

    def __init__(self, server: Server, client: openai.AsyncOpenAI) -> None:
        self.server = server
        self.client = client

    async def upload(self, *lines: bytes, **headers: str) -> Any:
        """Upload an input file."""
        return await self.client.files.create(
            file=("in.jsonl", b"".join(lines)),
            purpose="batch",
            extra_headers={name.replace("_", "-"): value for name, value in headers.items()},
        )

    async def create(self, file_id: str, url: str = CHAT, **more: Any) -> Batch:
        """Create a batch of an uploaded file."""
        return await self.client.batches.create(
            input_file_id=file_id,
            endpoint=url,  # type: ignore[arg-type]
            completion_window="24h",
            **more,
        )

    async def start(self, *lines: bytes, url: str = CHAT) -> Batch:
        """Upload and create."""
        return await self.create((await self.upload(*lines)).id, url)

    async def until(self, batch_id: str, *statuses: str, within_s: float = 120) -> Batch:
        """Poll until the batch has one of the statuses; default: until it ended."""
        with anyio.fail_after(within_s):
            while True:
                batch = await self.client.batches.retrieve(batch_id)
                if batch.status in (statuses or TERMINAL):
                    return batch
                await anyio.sleep(0.01)

    async def rows(self, file_id: str | None) -> dict[str, Any]:
        """A result file by custom_id."""
        if file_id is None:
            return {}
        content = (await self.client.files.content(file_id)).content
        rows = [json.loads(row) for row in content.splitlines()]
        by_id = {row["custom_id"]: row for row in rows}
        assert len(by_id) == len(rows)
        return by_id


Open = Callable[..., AbstractAsyncContextManager[House]]


@asynccontextmanager
async def open_house(settings: Settings) -> AsyncIterator[House]:
    """Run a server and give a client of it; leaving stops it."""
    async with running(settings) as server:
        library: Any = importlib.import_module(
            openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0]
        )
        transport = library.ASGITransport(create_app(server.services))
        async with openai.AsyncOpenAI(
            base_url="http://localhost/v1",
            api_key="any",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(transport=transport),
        ) as client:
            yield House(server, client)
