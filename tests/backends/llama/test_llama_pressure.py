"""Back-pressure: whoever is slow holds up whoever is fast, and nothing piles up without a bound."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from tidemill.backends.llama import llama_replica
from tidemill.backends.llama import messages as m
from tidemill.backends.llama.llama_replica import LlamaReplica
from tidemill.errors import AtCapacity
from tidemill.types import Generation, Piece

pytestmark = pytest.mark.llama

QUEUED = 64
"""Messages that wait in an engine process for the server to read them."""
MIB = 1 << 20


def test_an_engine_waits_for_a_server_that_does_not_read() -> None:
    """Of three hundred messages of a mebibyte no more are made than the queue holds beyond those
    that were read: the one that is being written, and the one that waits for its place."""
    from tidemill.backends.llama.child import Outbox

    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MIB // 16)
    outbox = Outbox(theirs)
    made = 0
    full = threading.Event()

    def make() -> None:
        nonlocal made
        for _ in range(300):
            outbox.post(m.Progress(key=1, piece=Piece(text="x" * MIB)))
            outbox.flush()
            made += 1
            if made == QUEUED:
                full.set()
        outbox.close()

    engine = threading.Thread(target=make)
    engine.start()
    assert full.wait(120)
    ahead = []
    # All is read before anything is judged: a writer that fails would end this process.
    with ours, theirs:
        for read in range(300):
            ahead.append(made - read)
            m.read_frame(ours)
        engine.join()
    assert QUEUED <= max(ahead) <= QUEUED + 2


@pytest.mark.anyio
async def test_a_replica_holds_so_many_requests_and_no_more(
    engine: LlamaReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is told when to come again, at once; when one has left there is room."""
    monkeypatch.setattr(llama_replica, "MOST_IN_HAND", 2)
    endless = Generation(model="m", text="Once upon a time", stream=True)
    first, second = engine.generate(endless), engine.generate(endless)
    await anext(first)
    await anext(second)
    with pytest.raises(AtCapacity, match="2 requests in hand") as refused:
        await anext(engine.generate(endless))
    assert refused.value.retry_after_s == 5
    await first.aclose()
    third = engine.generate(endless)
    await asyncio.wait_for(anext(third), 120)
    await second.aclose()
    await third.aclose()
