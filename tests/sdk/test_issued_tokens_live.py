"""``azure_ad_token_provider`` against a live server that trusts an issuer of its own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import jwt
import openai
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from openai import AzureOpenAI, OpenAI

from tests.worlds.requests import chat, jsonl
from tests.worlds.server import Server

ADMIN = "the-administrators-key"
AUDIENCE = "https://cognitiveservices.azure.com"


class Issuer:
    """Signs tokens, and publishes its keys on a port of this machine."""

    def __init__(self) -> None:
        self.key = rsa.generate_private_key(65537, 2048)
        self.url = ""
        self.signed = 0

    def token(self, subject: str, **claims: Any) -> str:
        """A new token each time, as the SDK asks for one with every request."""
        self.signed += 1
        now = int(time.time())
        content = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": subject,
            "iat": now,
            "exp": now + 300,
            "jti": str(self.signed),
            **claims,
        }
        return jwt.encode(content, self.key, algorithm="RS256", headers={"kid": "one"})

    def document(self, path: str) -> dict[str, Any]:
        if path.endswith("openid-configuration"):
            return {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}
        public = jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key(), as_dict=True)
        return {"keys": [{**public, "kid": "one"}]}


@contextmanager
def _published() -> Iterator[Issuer]:
    issuer = Issuer()

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(issuer.document(self.path)).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    issuer.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield issuer
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_token_provider_is_all_that_a_client_needs(tmp_path: Path) -> None:
    """A whole batch on ever new tokens of one subject; its team owns it, a mate reads it, others do
    not; what the administrator revokes is out, and no token is written anywhere."""
    signed: list[str] = []
    with (
        _published() as issuer,
        Server(
            storage_path=tmp_path / "store",
            env={"TIDEMILL_ADMIN_KEY": ADMIN},
            oidc_issuer=issuer.url,
            oidc_audience=f"{AUDIENCE},https://ai.azure.com",
            oidc_team_claim="groups",
            oidc_admin_role="Mill.Admin",
        ) as server,
        httpx.Client(base_url=server.base_url, headers={"api-key": ADMIN}) as admin,
    ):
        for name in ("lab", "shop"):
            admin.post("/admin/v1/teams", json={"name": name}).raise_for_status()

        def client(subject: str, **claims: Any) -> AzureOpenAI:
            def token() -> str:
                signed.append(issuer.token(subject, **claims))
                return signed[-1]

            return AzureOpenAI(
                azure_endpoint=server.base_url,
                azure_ad_token_provider=token,
                api_version="2026-01-01",
                max_retries=0,
            )

        ada, ben = client("ada", groups=["x", "lab"]), client("ben", groups=["lab"])
        eve = client("eve", groups="shop")
        file = ada.files.create(file=("in.jsonl", jsonl([chat("a", "hi")])), purpose="batch")
        batch = ada.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        while ada.batches.retrieve(batch.id).status != "completed":
            time.sleep(0.02)
        assert len(set(signed)) == len(signed) > 3
        assert ben.batches.retrieve(batch.id).output_file_id is not None
        with pytest.raises(openai.NotFoundError):
            eve.batches.retrieve(batch.id)
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        assert eve.chat.completions.create(model="echo", messages=messages).usage
        without_team = issuer.token("ben")
        with (
            OpenAI(base_url=f"{server.base_url}/openai/v1", api_key=without_team) as plain,
            pytest.raises(openai.PermissionDeniedError),
        ):
            plain.files.list()
        for wrong in (
            client("ada", groups=["lab"], aud="https://elsewhere"),
            client("ada", groups=["lab"], iss="https://elsewhere"),
            client("ada", groups=["lab"], exp=int(time.time()) - 3600),
        ):
            with pytest.raises(openai.AuthenticationError):
                wrong.files.list()

        keys = {key["name"]: key for key in admin.get("/admin/v1/keys").json()["data"]}
        teams = {team["name"]: team["id"] for team in admin.get("/admin/v1/teams").json()["data"]}
        assert {name: key["team"] for name, key in keys.items()} == {
            "ada": teams["lab"],
            "ben": teams["lab"],
            "eve": teams["shop"],
        }
        trail = admin.get("/admin/v1/audit", params={"object": batch.id}).json()["data"]
        assert [(e["actor"], e["owner"]) for e in trail] == [(keys["ada"]["id"], teams["lab"])]
        boss = {"Authorization": f"Bearer {issuer.token('boss', groups='lab', roles='Mill.Admin')}"}
        path = f"{server.base_url}/admin/v1/keys/{keys['ada']['id']}"
        assert httpx.delete(path, headers=boss).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            ada.files.list()
        assert ben.files.list().data
        for one in (ada, ben, eve):
            one.close()
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for token in signed:
        for part in token.split(".")[1:]:
            assert part.encode() not in kept
