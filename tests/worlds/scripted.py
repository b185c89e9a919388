"""A loopback HTTP server that answers from a script and remembers what it was sent."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True)
class Say:
    """One scripted answer. ``body`` is sent as JSON unless it is bytes."""

    status: int = 200
    body: Any = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Hang:
    """Read the request, then drop the connection; after ``promised`` bytes of a longer answer."""

    after: bytes | None = None


@dataclass(frozen=True)
class Seen:
    """A request that arrived whole."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class ScriptedServer:
    """Answers request ``n`` with ``script[n]``; the last entry repeats.

    ::

        with ScriptedServer([Say(429), Say(body={"id": "file-1"})]) as server:
            TidemillClient(server.base_url, sleep=naps.append).get_file("file-1")
    """

    def __init__(self, script: Sequence[Say | Hang]) -> None:
        self.script = list(script)
        self.seen: list[Seen] = []
        world = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _any(self) -> None:
                world._answer(self)

            do_GET = do_POST = do_DELETE = _any

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing: the tests read ``seen``."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.base_url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        step = self.script[min(len(self.seen), len(self.script) - 1)]
        headers = {name.lower(): value for name, value in handler.headers.items()}
        self.seen.append(Seen(handler.command, handler.path, headers, _body(handler, headers)))
        if isinstance(step, Hang):
            if step.after is not None:
                handler.send_response(200)
                handler.send_header("Content-Length", str(len(step.after) + 1000))
                handler.end_headers()
                handler.wfile.write(step.after)
                handler.wfile.flush()
            handler.close_connection = True
            # A reset instead of an orderly end, as a crash of the server gives.
            linger = struct.pack("ii", 1, 0)
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            handler.connection.close()
            return
        body = step.body if isinstance(step.body, bytes) else json.dumps(step.body).encode()
        handler.send_response(step.status)
        for name, value in {"Content-Length": str(len(body)), **step.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)


def _body(handler: BaseHTTPRequestHandler, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return handler.rfile.read(int(headers.get("content-length", 0)))
    body = b""
    while size := int(handler.rfile.readline(), 16):
        body += handler.rfile.read(size)
        handler.rfile.readline()
    handler.rfile.readline()
    return body
