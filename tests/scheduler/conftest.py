"""A real store, a scripted executor and a running runner."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from tidemill.backends.local import LocalBackend
from tidemill.ports import Store
from tidemill.scheduler.runner import Runner
from tidemill.storage import open_store
from tidemill.types import (
    TERMINAL,
    Answer,
    BatchRecord,
    FileRecord,
    Lease,
    NewBatch,
    NewFile,
    Outcome,
    Principal,
    Upload,
    Usage,
    Waiting,
)

ENDPOINT = "/v1/chat/completions"


def line(custom_id: str, text: str = "hi", **body: Any) -> str:
    """One input line."""
    messages = [{"role": "user", "content": text}]
    return json.dumps(
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": ENDPOINT,
            "body": {"model": "m", "messages": messages, **body},
        }
    )


class Script:
    """An executor that does what the test says, and remembers what it was given."""

    def __init__(self) -> None:
        self.capacity = 8
        self.ran: list[Lease] = []
        self.running = 0
        self.most = 0
        self.told: dict[str, Waiting] = {}
        self.gate: anyio.Event | None = None
        self._started = anyio.Condition()
        self.do: Callable[[Lease], Outcome | None] = lambda lease: None

    @property
    def capacities(self) -> dict[str, int]:
        return {"local": self.capacity}

    def place(self, model: str, endpoint: str) -> str:
        return "local"

    def waits(self, lines: Mapping[str, Waiting]) -> None:
        self.told = dict(lines)

    async def execute(self, lease: Lease) -> Outcome:
        self.ran.append(lease)
        self.running += 1
        self.most = max(self.most, self.running)
        async with self._started:
            self._started.notify_all()
        try:
            if self.gate is not None:
                await self.gate.wait()
            outcome = self.do(lease)
        finally:
            self.running -= 1
        if outcome is not None:
            return outcome
        body = json.dumps({"echo": lease.custom_id}).encode()
        return Answer(body=body, usage=Usage(input=2, output=1), model="m")

    async def reached(self, running: int) -> None:
        """Wait until so many lines run at once."""
        async with self._started:
            while self.running < running:
                await self._started.wait()


class World:
    """One store and one runner on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.script = Script()
        self.store: Store
        self.runner: Runner
        self.local: LocalBackend

    @asynccontextmanager
    async def up(self, *, drain_s: float = 5.0, **knobs: Any) -> AsyncGenerator[World]:
        """A started store and runner; leaving drains."""
        self.store = open_store(self.path)
        await self.store.start()
        options = {"max_pool_size": 10_240, "max_intake_capacity": 1_000_000} | knobs
        self.runner = Runner(self.store, self.script, **options)
        self.local = LocalBackend(
            self.store, self.runner, knows=lambda m: m == "m", max_bytes=1 << 30, max_lines=1 << 20
        )
        try:
            async with anyio.create_task_group() as tasks:
                await tasks.start(self.runner.run)
                yield self
                await self.runner.drain(drain_s)
        finally:
            await self.store.close()

    async def upload(self, lines: Sequence[str], owner: str = "a") -> FileRecord:
        """Accept a file through the local backend."""

        async def body() -> AsyncIterator[bytes]:
            yield "\n".join(lines).encode()

        return await self.local.accept(
            Upload(
                new=NewFile(owner=owner, filename="in.jsonl"),
                body=body(),
                principal=Principal(owner=owner, name=owner),
            )
        )

    async def open(self, lines: Sequence[str], owner: str = "a", **new: Any) -> BatchRecord:
        """Upload lines and open a batch on them."""
        file = await self.upload(lines, owner)
        return await self.local.open(
            NewBatch(owner=owner, key_id=None, file=file, endpoint=ENDPOINT, **new)
        )

    async def until(
        self, batch: BatchRecord, true: Callable[[BatchRecord], bool] | None = None
    ) -> BatchRecord:
        """Wait, woken by the batch's own signals, until the batch is terminal or as asked."""
        test = true or (lambda b: b.status in TERMINAL)
        with anyio.fail_after(60):
            while True:
                current = await self.store.batches.get(batch.id, None)
                assert current is not None
                if test(current):
                    return current
                await self.runner.rows.wait(batch.seq, 0.2)

    async def rows(self, batch: BatchRecord) -> tuple[list[Any], list[Any]]:
        """The decoded rows of the output and of the error file."""
        found = []
        for id in (batch.output_file_id, batch.error_file_id):
            content = b""
            if id is not None:
                file = await self.store.files.get(id, None)
                assert file is not None
                content = b"".join([piece async for piece in self.store.files.read(file)])
                assert len(content) == file.bytes
            found.append([json.loads(row) for row in content.splitlines()])
        return found[0], found[1]


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A world whose store lives in the test's own folder."""
    return World(tmp_path / "data")
