"""Entra's token service on loopback, under its own name and with a certificate for it.

Whoever resolves ``login.microsoftonline.com`` in this process is led here, so that azure-identity
runs as it is. Tokens are those of the provider's world, which knows them again.
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from tests.worlds.certificates import self_signed
from tests.worlds.provider import IDENTITY_SECRET

HOST = "login.microsoftonline.com"
TENANT = "11111111-2222-3333-4444-555555555555"


class Entra:
    """The server; ``asked`` has the form of each request for a token, by field."""

    def __init__(self, tokens: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[dict[str, str]] = []
        self.refuse = False
        self._tokens = tokens
        certificate = self_signed(folder / "entra.pem", HOST)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        patch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
        self._resolve(patch)

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _resolve(self, patch: pytest.MonkeyPatch) -> None:
        real, port = socket.getaddrinfo, self._server.server_address[1]

        def getaddrinfo(host: Any, *more: Any, **named: Any) -> Any:
            if host == HOST:
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
            return real(host, *more, **named)

        patch.setattr(socket, "getaddrinfo", getaddrinfo)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        entra = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(200, entra._metadata())

            def do_POST(self) -> None:
                form = parse_qs(self.rfile.read(int(self.headers["content-length"])).decode())
                entra.asked.append(
                    {name: values[0] for name, values in form.items()} | {"path": self.path}
                )
                if entra.refuse:
                    words = "AADSTS7000215: Invalid client secret provided."
                    self._reply(401, {"error": "invalid_client", "error_description": words})
                else:
                    self._reply(200, entra._token())

            def _reply(self, status: int, answer: dict[str, Any]) -> None:
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing on the terminal."""

        return Handler

    def _metadata(self) -> dict[str, Any]:
        root = f"https://{HOST}/{TENANT}"
        return {
            "issuer": f"{root}/v2.0",
            "authorization_endpoint": f"{root}/oauth2/v2.0/authorize",
            "token_endpoint": f"{root}/oauth2/v2.0/token",
            "tenant_discovery_endpoint": f"{root}/v2.0/.well-known/openid-configuration",
            "metadata": [],
        }

    def _token(self) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self._tokens}/msi/token?api-version=2019-08-01&resource=any",
            headers={"X-IDENTITY-HEADER": IDENTITY_SECRET},
        )
        with urllib.request.urlopen(request) as answer:
            token = json.load(answer)["access_token"]
        return {"token_type": "Bearer", "expires_in": 3600, "access_token": token}
