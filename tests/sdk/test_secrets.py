"""No secret is written anywhere, or said to anybody, by a full run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tests.worlds.requests import chat, jsonl
from tests.worlds.server import Server

ENV_KEY = "env-3f9c1d7a5b20e846"
ADMIN_KEY = "admin-a81e6402c9f7d35b"
WRONG_KEY = "wrong-5d02b7f4e19a6c38"
PROVIDER_KEY = "provider-c47be90163da8f52"


class _Parrot(BaseHTTPRequestHandler):
    """A provider that refuses every call and repeats the credential that it was sent."""

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        status = 401 if "models" in self.path else 400
        message = f"Incorrect API key provided: {self.headers.get('authorization')}"
        body = json.dumps({"error": {"message": message, "type": "x", "code": "invalid_api_key"}})
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    do_GET = do_POST = do_DELETE = _answer

    def log_message(self, format: str, *arguments: object) -> None:
        """Quiet."""


@contextmanager
def _parrot() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Parrot)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _written(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _commands(environ: dict[str, str], store: Path) -> list[str]:
    """What the operator's commands print."""
    at = ("--storage-path", str(store))
    said = []
    for words in (
        ("settings",),
        ("keys", "list", *at),
        ("audit", *at),
        ("usage", "--by", "key,batch", *at),
    ):
        for more in ((), ("--json",)):
            command = [sys.executable, "-m", "tidemill", *words, *more]
            ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
            assert ran.stdout
            said.append(ran.stdout + ran.stderr)
    return said


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_no_secret_is_written_or_said(tmp_path: Path, log_format: str) -> None:
    """Keys of the settings, of the store, of a provider, and keys that are wrong: none is in the
    database, its log, the incremental files, the server's log, an answer or a metric."""
    said: list[str] = []
    with _parrot() as provider_url:
        provider = {
            "name": "parrot",
            "kind": "openai_compatible",
            "base_url": provider_url,
            "api_key_env": "PARROT_KEY",
            "models": {"theirs": {"standard": "theirs"}},
        }
        server = Server(
            storage_path=tmp_path / "store",
            env={
                "PARROT_KEY": PROVIDER_KEY,
                "TIDEMILL_API_KEYS": ENV_KEY,
                "TIDEMILL_ADMIN_KEY": ADMIN_KEY,
                "TIDEMILL_PROVIDERS": json.dumps([provider]),
            },
            log_level="debug",
            log_format=log_format,
        )
        with server, httpx.Client(base_url=server.base_url, timeout=120) as client:

            def ask(method: str, path: str, key: str, **more: object) -> httpx.Response:
                answer = client.request(
                    method,
                    path,
                    headers={"Authorization": f"Bearer {key}"},
                    **more,  # type: ignore[arg-type]
                )
                said.append(f"{answer.headers}\n{answer.text}")
                return answer

            made = client.post(
                "/admin/v1/keys",
                json={"name": "k"},
                headers={"api-key": ADMIN_KEY},
            ).json()
            secret = made["secret"]
            for key in (ENV_KEY, secret):
                upload = {"file": ("in.jsonl", jsonl([chat("a", "hi"), chat("b", "!status 500")]))}
                file = ask("POST", "/v1/files", key, files=upload, data={"purpose": "batch"}).json()
                batch = ask(
                    "POST",
                    "/v1/batches",
                    key,
                    json={"input_file_id": file["id"], "endpoint": "/v1/chat/completions"},
                ).json()
                after, status = "0", ""
                while status not in ("completed", "failed"):
                    rows = ask(
                        "GET", f"/v1/batches/{batch['id']}/results?after={after}&wait=20", key
                    )
                    after, status = (
                        rows.headers["x-tidemill-next"],
                        rows.headers["x-tidemill-status"],
                    )
                body = {"messages": [{"role": "user", "content": "hi"}]}
                for model in ("echo", "theirs", "nobody"):
                    for stream in (False, True):
                        asked = {"model": model, "stream": stream, **body}
                        ask("POST", "/v1/chat/completions", key, json=asked)
                ask("POST", "/v1/chat/completions", key, content=b"{broken")
                ask("POST", "/v1/batches/preflight", key, json={"input_file_id": file["id"]})
                ask("GET", "/v1/usage?group_by=key,user,team", key)
                ask("GET", "/v1/usage?group_by=key,batch&format=csv", key)
                ask("GET", "/v1/files/file-unknown", key)
            for path in ("/v1/files", "/admin/v1/keys", f"/v1/files/{WRONG_KEY}"):
                assert ask("GET", path, WRONG_KEY).status_code == 401
            ask("GET", "/admin/v1/keys", ADMIN_KEY)
            ask("GET", "/admin/v1/audit", ADMIN_KEY)
            ask("GET", "/v1/providers", ENV_KEY)
            ask("PATCH", f"/admin/v1/keys/{made['id']}", ADMIN_KEY, json={"name": "l"})
            ask("GET", "/admin/v1/usage?group_by=key", ADMIN_KEY)
            ask("DELETE", f"/admin/v1/keys/{made['id']}", ADMIN_KEY)
            said += _commands({**os.environ, **server.env}, tmp_path / "store")
            for path in ("/metrics", "/health"):
                said.append(client.get(path).text)
            while_running = _written(tmp_path)
    found = {**_written(tmp_path), **{f"answer {n}": text.encode() for n, text in enumerate(said)}}
    assert any(name.endswith("tidemill.db") for name in found)
    assert any(name.endswith(".log") and content for name, content in found.items())
    assert len(said) > 20
    for key in (ENV_KEY, ADMIN_KEY, WRONG_KEY, PROVIDER_KEY, secret):
        for name, content in [*found.items(), *while_running.items()]:
            assert key.encode() not in content, f"{key[:5]}… is in {name}"
            # Nor in a form that is as good as the key.
            assert key[8:].encode() not in content, f"most of {key[:5]}… is in {name}"
