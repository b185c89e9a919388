"""Other people's Batch APIs, as one real HTTP server in its own process.

It speaks OpenAI (``/v1``) and Azure (``/openai/v1``, dated ``/openai``, deployment-scoped chat),
and it can be told to misbehave. ``ProviderWorld`` starts it and holds its controls::

    with ProviderWorld() as world:
        world.set(models={"gpt-4.1": {"batch": False}})
        world.fail("batches.create", status=429, headers={"retry-after": "7"})
        ...
        assert world.calls("batches.create") == 1

A batch takes one step of its life at each retrieve (``validating``, ``in_progress``,
``finalizing``, its end) unless it is held. An answer echoes the last message, so that a test can
tell whose answer it is.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import multipart
import uvicorn

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
TERMINAL = ("completed", "failed", "expired", "cancelled")
API_KEY = "sk-up-secret"
IDENTITY_SECRET = "identity-secret"

DEFAULTS: dict[str, Any] = {
    "batch_api": True,
    "models": {
        name: {"batch": True, "shown": f"{name}-2026-01-01"}
        for name in ("gpt-4.1", "gpt-4.1-mini", "dep-41-batch", "dep-41", "embed")
    },
    "hold": None,
    "outcome": {"status": "completed"},
    "quirks": [],
    "api_versions": ["2024-10-21", "2025-04-01-preview"],
    "token_lifetime_s": 3600,
    "token_limit": False,
    "forget": [],
}


class Refused(Exception):
    """An answer other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.body = {
            "error": {
                "message": message,
                "type": "invalid_request_error",
                "param": param,
                "code": code,
            }
        }


class Cut(Exception):
    """Drop the connection without another byte."""


class Provider:
    """The server's state and its routes."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.settings: dict[str, Any] = json.loads(json.dumps(DEFAULTS))
        self.faults: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.log: list[dict[str, Any]] = []
        self.files: dict[str, dict[str, Any]] = {}
        self.contents: dict[str, bytes] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self.results: dict[str, tuple[bytes, bytes]] = {}
        self.idempotent: dict[str, str] = {}
        self.tokens: dict[str, float] = {}
        self.active: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()

    # --- the server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        method, path = scope["method"], scope["path"]
        body = b""
        more = True
        while more:
            event = await receive()
            if event["type"] == "http.disconnect":
                return
            body += event.get("body", b"")
            more = event.get("more_body", False)
        if path == "/_control":
            await self._reply(send, 200, self._control(method, body))
            return
        headers = {k.decode(): v.decode("latin-1") for k, v in scope["headers"]}
        query = dict(
            pair.partition("=")[::2] for pair in scope["query_string"].decode().split("&") if pair
        )
        raw = scope.get("raw_path", path.encode()).decode().partition("?")[0]
        name, args, azure = self._route(method, raw)
        self.counts[name] += 1
        self.log.append({"route": name, "method": method, "path": raw, "headers": headers})
        self.active[name] += 1
        self.peak[name] = max(self.peak[name], self.active[name])
        try:
            await self._serve(send, name, args, azure, headers, query, body)
        except Cut:
            # ASGI has no word for hanging up; uvicorn's send belongs to the cycle that can.
            send.__self__.transport.close()  # type: ignore[attr-defined]
        finally:
            self.active[name] -= 1

    async def _serve(
        self,
        send: Send,
        name: str,
        args: tuple[str, ...],
        azure: str | None,
        headers: dict[str, str],
        query: dict[str, str],
        body: bytes,
    ) -> None:
        fault = self._fault(name)
        try:
            if fault and fault["kind"] == "slow":
                await asyncio.sleep(fault["seconds"])
            elif fault and fault["kind"] == "hang":
                await asyncio.sleep(3600)
            elif fault and fault["kind"] == "status":
                await self._reply(send, fault["status"], fault["body"], fault["headers"])
                return
            elif fault and fault["kind"] == "drop":
                raise Cut
            if name == "msi":
                status, answer, extra = 200, self._identity(headers, query), {}
            else:
                if name == "unknown":
                    raise Refused(404, "Invalid URL")
                self._authorize(headers, azure)
                if azure == "dated" and query.get("api-version") not in self._versions():
                    raise Refused(404, "Resource not found", code="404")
                status, answer, extra = self._answer(name, args, azure, headers, body, query)
        except Refused as refused:
            status, answer, extra = refused.status, refused.body, refused.headers
        if fault and fault["kind"] == "lose":
            raise Cut  # the work was done, the answer is lost
        await self._reply(send, status, answer, extra, cut=fault if fault else None)

    async def _reply(
        self,
        send: Send,
        status: int,
        answer: Any,
        headers: dict[str, str] | None = None,
        cut: dict[str, Any] | None = None,
    ) -> None:
        events = answer if isinstance(answer, list) and answer and answer[0] == "sse" else None
        if events is not None:
            payload = b"".join(events[1:])
            kind = "text/event-stream"
        elif isinstance(answer, bytes):
            payload, kind = answer, "application/octet-stream"
        else:
            payload, kind = json.dumps(answer).encode(), "application/json"
        sent = {"content-type": kind, "x-request-id": "req_" + secrets.token_hex(8)}
        sent |= {k.lower(): v for k, v in (headers or {}).items()}
        if events is None:
            sent["content-length"] = str(len(payload))
        await send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(k.encode(), v.encode()) for k, v in sent.items()],
            }
        )
        if cut and cut["kind"] == "cut":
            await send(
                {"type": "http.response.body", "body": payload[: cut["after"]], "more_body": True}
            )
            await asyncio.sleep(0.02)
            raise Cut
        if events is not None:
            for event in events[1:]:
                await send({"type": "http.response.body", "body": event, "more_body": True})
                await asyncio.sleep(0)
            payload = b""
        await send({"type": "http.response.body", "body": payload})

    def _route(self, method: str, path: str) -> tuple[str, tuple[str, ...], str | None]:
        """``(name, arguments, azure surface)``: the surface is None for OpenAI, ``v1`` or
        ``dated``."""
        if path == "/msi/token":
            return "msi", (), None
        azure: str | None = None
        if path.startswith("/openai/v1/"):
            azure, rest = "v1", path.removeprefix("/openai/v1")
        elif path.startswith("/openai/"):
            azure, rest = "dated", path.removeprefix("/openai")
        elif path.startswith("/v1/"):
            rest = path.removeprefix("/v1")
        else:
            return "unknown", (), None
        scoped = re.fullmatch(
            r"/deployments/([^/]+)(/(?:chat/completions|completions|embeddings))", rest
        )
        if scoped:
            if azure is None:
                return "unknown", (), azure
            return scoped[2].strip("/").replace("/", "."), (scoped[1],), azure
        table = (
            ("POST", r"/files", "files.create"),
            ("GET", r"/files", "files.list"),
            ("GET", r"/files/([^/]+)", "files.retrieve"),
            ("DELETE", r"/files/([^/]+)", "files.delete"),
            ("GET", r"/files/([^/]+)/content", "files.content"),
            ("POST", r"/batches", "batches.create"),
            ("GET", r"/batches", "batches.list"),
            ("GET", r"/batches/([^/]+)", "batches.retrieve"),
            ("POST", r"/batches/([^/]+)/cancel", "batches.cancel"),
            ("POST", r"/chat/completions", "chat.completions"),
            ("POST", r"/completions", "completions"),
            ("POST", r"/embeddings", "embeddings"),
            ("POST", r"/responses", "responses"),
        )
        for verb, pattern, name in table:
            match = re.fullmatch(pattern, rest)
            if match and verb == method:
                return name, match.groups(), azure
        return "unknown", (), azure

    def _fault(self, name: str) -> dict[str, Any] | None:
        for fault in self.faults:
            if fault["route"] in (name, "*") and fault["times"] != 0:
                fault["times"] -= 1
                return fault
        return None

    def _versions(self) -> list[str]:
        versions: list[str] = self.settings["api_versions"]
        return versions

    def _authorize(self, headers: dict[str, str], azure: str | None) -> None:
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if bearer == API_KEY and azure != "dated":
            return
        if azure is not None:
            if headers.get("api-key") == API_KEY:
                return
            if self.tokens.get(bearer, 0.0) > time.time():
                return
            raise Refused(
                401,
                "Access denied due to invalid subscription key or wrong API endpoint.",
                code="401",
            )
        raise Refused(401, "Incorrect API key provided: sk-***.", code="invalid_api_key")

    def _identity(self, headers: dict[str, str], query: dict[str, str]) -> dict[str, Any]:
        """App Service managed identity, API version 2019-08-01."""
        if headers.get("x-identity-header") != IDENTITY_SECRET:
            raise Refused(401, "wrong X-IDENTITY-HEADER")
        if query.get("api-version") != "2019-08-01" or "resource" not in query:
            raise Refused(400, "api-version and resource are needed")
        token = "entra." + secrets.token_urlsafe(24)
        lifetime = self.settings["token_lifetime_s"]
        self.tokens[token] = time.time() + lifetime
        return {
            "access_token": token,
            "expires_on": str(int(time.time() + lifetime)),
            "resource": query["resource"],
            "token_type": "Bearer",
        }

    # --- routes

    def _answer(
        self,
        name: str,
        args: tuple[str, ...],
        azure: str | None,
        headers: dict[str, str],
        body: bytes,
        query: dict[str, str],
    ) -> tuple[int, Any, dict[str, str]]:
        if name.startswith(("batches.", "files.")):
            if not self.settings["batch_api"]:
                raise Refused(404, "Invalid URL")
            if name == "files.create":
                return 200, self._upload(headers, body), {}
            if name == "files.list":
                return 200, {"object": "list", "data": list(self.files.values())}, {}
            if name.startswith("files."):
                return 200, self._file(name, args[0]), {}
            if name == "batches.create":
                return 200, self._create(json.loads(body), headers, azure), {}
            if name == "batches.list":
                return 200, self._list(query), {}
            return 200, self._batch(name, args[0]), {}
        return self._complete(name, json.loads(body), args[0] if args else None, azure)

    def _upload(self, headers: dict[str, str], body: bytes) -> dict[str, Any]:
        _, options = multipart.parse_options_header(headers.get("content-type", ""))
        if "boundary" not in options:
            raise Refused(400, "'file' is a required property", param="file")
        parts = {
            part.name: part
            for part in multipart.MultipartParser(
                io.BytesIO(body),
                options["boundary"],
                content_length=len(body),
                spool_limit=2**30,
                memory_limit=2**30,
                disk_limit=2**30,
            )
        }
        if "file" not in parts or "purpose" not in parts:
            raise Refused(400, "'file' and 'purpose' are required properties", param="file")
        if not (parts["file"].filename or "").endswith(".jsonl"):
            raise Refused(400, "Invalid file format for Batch API. Must be .jsonl", param="file")
        id = "file-up" + secrets.token_hex(10)
        content = parts["file"].raw
        self.contents[id] = content
        self.files[id] = {
            "id": id,
            "object": "file",
            "bytes": len(content),
            "created_at": int(time.time()),
            "expires_at": int(time.time()) + 2_592_000,
            "filename": parts["file"].filename,
            "purpose": parts["purpose"].value,
            "status": "processed",
            "status_details": None,
        }
        return self.files[id]

    def _file(self, name: str, id: str) -> Any:
        if id not in self.files or id in self.settings["forget"]:
            raise Refused(404, f"No such File object: {id}", param="id")
        if name == "files.retrieve":
            return self.files[id]
        if name == "files.delete":
            del self.files[id]
            self.contents.pop(id, None)
            return {"id": id, "object": "file", "deleted": True}
        return self.contents[id]

    def _create(
        self, new: dict[str, Any], headers: dict[str, str], azure: str | None
    ) -> dict[str, Any]:
        key = headers.get("idempotency-key")
        if key and "idempotency" in self.settings["quirks"] and key in self.idempotent:
            return self._shown(self.batches[self.idempotent[key]])
        file = new.get("input_file_id", "")
        if file not in self.files or file in self.settings["forget"]:
            raise Refused(
                400,
                f"Cannot find file {file}, or project does not have access to it.",
                param="file_id",
            )
        metadata = new.get("metadata")
        if metadata is not None and len(metadata) > 16:
            raise Refused(400, "Too many metadata pairs", param="metadata")
        problems, lines = self._check(self.contents[file], new["endpoint"], azure)
        refused = [
            m for m in self._models(lines) if not self.settings["models"].get(m, {}).get("batch")
        ]
        if refused and not self.settings.get("refuse_later"):
            raise Refused(
                400,
                self.settings.get("refusal")
                or f"The model '{refused[0]}' is not supported by the Batch API.",
                code=self.settings.get("refusal_code", "model_not_found"),
                param="model",
            )
        if self.settings["token_limit"]:
            raise Refused(
                400,
                "Enqueued token limit reached for gpt-4.1 in organization org-1. "
                "Limit: 90,000 enqueued tokens.",
                code="token_limit_exceeded",
            )
        if refused:
            problems.append(
                {
                    "code": self.settings.get("refusal_code", "model_not_found"),
                    "message": self.settings.get("refusal")
                    or f"The model '{refused[0]}' is not supported by the Batch API.",
                    "line": 1,
                    "param": "body.model",
                }
            )
        now = int(time.time())
        id = "batch_up" + secrets.token_hex(10)
        batch = {
            "id": id,
            "object": "batch",
            "endpoint": new["endpoint"],
            "errors": None,
            "input_file_id": file,
            "completion_window": new.get("completion_window"),
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "in_progress_at": None,
            "expires_at": now + 86_400,
            "finalizing_at": None,
            "completed_at": None,
            "failed_at": None,
            "expired_at": None,
            "cancelling_at": None,
            "cancelled_at": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": metadata,
            "_problems": problems,
            "_lines": lines,
        }
        self.batches[id] = batch
        if key:
            self.idempotent[key] = id
        return self._shown(batch)

    def _check(
        self, content: bytes, endpoint: str, azure: str | None
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        problems: list[dict[str, Any]] = []
        lines = []
        spelled = endpoint if azure != "dated" else endpoint.removeprefix("/v1")
        for no, raw in enumerate(content.split(b"\n"), 1):
            if not raw.strip():
                continue
            line = json.loads(raw)
            lines.append(line)
            if line["url"] not in (endpoint, spelled):
                problems.append(
                    {
                        "code": "url_mismatch" if azure else "invalid_url",
                        "message": "The URL does not match the batch endpoint.",
                        "line": no,
                        "param": "url",
                    }
                )
        models = self._models(lines)
        if len(models) > 1 and "one_model" in self.settings["quirks"]:
            problems.append(
                {
                    "code": "model_mismatch",
                    "message": "All requests in a batch must use the same model.",
                    "line": 2,
                    "param": "body.model",
                }
            )
        return problems, lines

    @staticmethod
    def _models(lines: list[dict[str, Any]]) -> list[str]:
        return list(dict.fromkeys(line["body"]["model"] for line in lines))

    def _list(self, query: dict[str, str]) -> dict[str, Any]:
        newest = sorted(self.batches.values(), key=lambda b: -list(self.batches).index(b["id"]))
        ids = [b["id"] for b in newest]
        start = ids.index(query["after"]) + 1 if query.get("after") in ids else 0
        limit = int(query.get("limit", "20"))
        page = newest[start : start + limit]
        return {
            "object": "list",
            "data": [self._shown(b) for b in page],
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": start + limit < len(newest),
        }

    def _batch(self, name: str, id: str) -> dict[str, Any]:
        if id not in self.batches or id in self.settings["forget"]:
            raise Refused(404, f"No batch found with id '{id}'.")
        batch = self.batches[id]
        if name == "batches.cancel":
            if batch["status"] in ("completed", "failed", "expired"):
                raise Refused(409, f"Cannot cancel a batch with status '{batch['status']}'.")
            if batch["status"] not in ("cancelling", "cancelled"):
                batch |= {"status": "cancelling", "cancelling_at": int(time.time())}
        else:
            self._step(batch)
        return self._shown(batch)

    def _step(self, batch: dict[str, Any]) -> None:
        status, now = batch["status"], int(time.time())
        if status in TERMINAL or status == self.settings["hold"]:
            return
        lines = batch["_lines"]
        if status == "validating":
            if batch["_problems"]:
                batch |= {
                    "status": "failed",
                    "failed_at": now,
                    "errors": {"object": "list", "data": batch["_problems"]},
                }
                return
            batch |= {"status": "in_progress", "in_progress_at": now}
            batch["request_counts"] = {"total": len(lines), "completed": 0, "failed": 0}
        elif status == "in_progress":
            batch |= {"status": "finalizing", "finalizing_at": now}
            batch["request_counts"] = {
                "total": len(lines),
                "completed": len(lines) // 2,
                "failed": 0,
            }
        elif status == "finalizing":
            self._finish(batch, self.settings["outcome"])
        elif status == "cancelling":
            partial = self.settings["outcome"].get("finish", len(lines) // 2)
            self._finish(batch, {"status": "cancelled", "finish": partial})

    def _finish(self, batch: dict[str, Any], outcome: dict[str, Any]) -> None:
        status, now = outcome["status"], int(time.time())
        lines = batch["_lines"]
        finish = outcome.get("finish", len(lines) if status == "completed" else len(lines) // 2)
        output, error = [], []
        for i, line in enumerate(lines):
            row: dict[str, Any] = {
                "id": "batch_req_" + secrets.token_hex(10),
                "custom_id": line["custom_id"],
            }
            if i < finish:
                code, body = self._line(line)
                row["response"] = {
                    "status_code": code,
                    "request_id": "req_" + secrets.token_hex(8),
                    "body": body,
                }
                row["error"] = None
                (output if code == 200 else error).append(row)
            elif status in ("expired", "cancelled"):
                row["response"] = None
                row["error"] = {
                    "code": f"batch_{status}",
                    "message": "This request could not be executed before the batch ended.",
                }
                error.append(row)
        output.reverse()  # the order of results is not promised
        batch |= {"status": status, f"{status}_at": now - outcome.get("ago", 0)}
        if outcome.get("problems"):
            batch["errors"] = {"object": "list", "data": outcome["problems"]}
        failed = sum(1 for row in error if row["response"])
        batch["request_counts"] = {
            "total": len(lines),
            "completed": len(output),
            "failed": failed,
        }
        for key, rows in (("output_file_id", output), ("error_file_id", error)):
            content = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
            if rows or ("zero_error_file" in self.settings["quirks"] and key == "error_file_id"):
                id = "file-up" + secrets.token_hex(10)
                self.contents[id] = content
                self.files[id] = {
                    "id": id,
                    "object": "file",
                    "bytes": len(content),
                    "created_at": now,
                    "filename": f"{batch['id']}_{key[:6]}.jsonl",
                    "purpose": "batch_output",
                    "status": "processed",
                }
                batch[key] = id

    def _line(self, line: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        route = line["url"].removeprefix("/v1").strip("/").replace("/", ".")
        try:
            status, body, _ = self._complete(route, line["body"], None, None)
        except Refused as refused:
            return refused.status, refused.body
        return status, body

    def _shown(self, batch: dict[str, Any]) -> dict[str, Any]:
        shown = {k: v for k, v in batch.items() if not k.startswith("_")}
        quirks = self.settings["quirks"]
        if "empty_ids" in quirks:
            for key in ("output_file_id", "error_file_id"):
                shown[key] = shown[key] or ""
        if "null_counts" in quirks:
            shown["request_counts"] = (
                {"total": None, "completed": None, "failed": None}
                if shown["status"] in TERMINAL
                else None
            )
        if "null_endpoint" in quirks:
            shown["endpoint"] = None
        if "bare_errors" in quirks and shown["errors"]:
            shown["errors"] = {
                "object": "list",
                "data": [
                    {"code": e["code"], "message": e["message"]} for e in shown["errors"]["data"]
                ],
            }
        return shown

    def _complete(
        self, name: str, body: dict[str, Any], deployment: str | None, azure: str | None
    ) -> tuple[int, Any, dict[str, str]]:
        model = deployment or body.get("model", "")
        known = self.settings["models"].get(model)
        if known is None:
            code = "DeploymentNotFound" if azure else "model_not_found"
            raise Refused(404, f"The model '{model}' does not exist.", code=code)
        now, shown = int(time.time()), known.get("shown", model)
        said = json.dumps(body.get("messages") or body.get("prompt") or body.get("input"))
        if "!refuse" in said:
            raise Refused(400, f"This prompt was refused by {model}.", code="content_filter")
        text = self._echo(body)
        n_in, n_out = len(said.split()), len(text.split()) + 1
        if name == "embeddings":
            inputs = body["input"] if isinstance(body["input"], list) else [body["input"]]
            data = [
                {"object": "embedding", "index": i, "embedding": [0.5, float(i)]}
                for i in range(len(inputs))
            ]
            usage = {"prompt_tokens": n_in, "total_tokens": n_in}
            return 200, {"object": "list", "data": data, "model": shown, "usage": usage}, {}
        if name == "responses":
            response = self._response(shown, text, n_in, n_out, now)
            return (
                200,
                self._response_events(response, text) if body.get("stream") else response,
                {},
            )
        usage = {
            "prompt_tokens": n_in,
            "completion_tokens": n_out,
            "total_tokens": n_in + n_out,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 2},
        }
        if body.get("stream"):
            return 200, self._events(name, shown, text, usage, body), {}
        if name == "completions":
            choice: dict[str, Any] = {"text": text, "index": 0, "logprobs": None}
            kind = "text_completion"
        else:
            choice = {"index": 0, "message": {"role": "assistant", "content": text}}
            kind = "chat.completion"
        choice["finish_reason"] = "stop"
        return (
            200,
            {
                "id": "chatcmpl-" + hashlib.sha256(said.encode()).hexdigest()[:12],
                "object": kind,
                "created": now,
                "model": shown,
                "choices": [choice],
                "usage": usage,
            },
            {},
        )

    @staticmethod
    def _echo(body: dict[str, Any]) -> str:
        if body.get("messages"):
            return f"echo: {body['messages'][-1]['content']}"
        return f"echo: {body.get('prompt') or body.get('input')}"

    @staticmethod
    def _response(shown: str, text: str, n_in: int, n_out: int, now: int) -> dict[str, Any]:
        return {
            "id": "resp_" + secrets.token_hex(8),
            "object": "response",
            "created_at": now,
            "status": "completed",
            "model": shown,
            "output": [
                {
                    "id": "msg_1",
                    "type": "message",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": text, "annotations": []}],
                }
            ],
            "usage": {
                "input_tokens": n_in,
                "input_tokens_details": {"cached_tokens": 1},
                "output_tokens": n_out,
                "output_tokens_details": {"reasoning_tokens": 2},
                "total_tokens": n_in + n_out,
            },
        }

    @staticmethod
    def _events(
        name: str, shown: str, text: str, usage: dict[str, Any], body: dict[str, Any]
    ) -> list[Any]:
        kind = "text_completion" if name == "completions" else "chat.completion.chunk"
        base = {"id": "chatcmpl-s", "object": kind, "created": 1, "model": shown}

        def said(piece: str) -> dict[str, Any]:
            if name == "completions":
                return {"text": piece}
            return {"delta": {"content": piece} if piece else {}}

        events: list[Any] = ["sse"]
        for piece in re.findall(r"\S+\s*", text):
            choice = {"index": 0, "finish_reason": None, **said(piece)}
            events.append(f"data: {json.dumps(base | {'choices': [choice]})}\n\n".encode())
        last = {"index": 0, "finish_reason": "stop", **said("")}
        events.append(f"data: {json.dumps(base | {'choices': [last]})}\n\n".encode())
        if (body.get("stream_options") or {}).get("include_usage"):
            events.append(
                f"data: {json.dumps(base | {'choices': [], 'usage': usage})}\n\n".encode()
            )
        events.append(b"data: [DONE]\n\n")
        return events

    @staticmethod
    def _response_events(response: dict[str, Any], text: str) -> list[Any]:
        begun = response | {"status": "in_progress", "output": [], "usage": None}
        place = {"item_id": "msg_1", "output_index": 0, "content_index": 0, "logprobs": []}
        (item,) = response["output"]
        (part,) = item["content"]
        empty = {"item": item | {"status": "in_progress", "content": []}, "output_index": 0}
        told: list[dict[str, Any]] = [
            {"type": "response.created", "response": begun},
            {"type": "response.output_item.added", **empty},
            {"type": "response.content_part.added", "part": part | {"text": ""}, **place},
        ]
        told += [
            {"type": "response.output_text.delta", "delta": piece, **place}
            for piece in re.findall(r"\S+\s*", text)
        ]
        told.append({"type": "response.output_text.done", "text": text, **place})
        told.append({"type": "response.content_part.done", "part": part, **place})
        told.append({"type": "response.output_item.done", "item": item, "output_index": 0})
        told.append({"type": "response.completed", "response": response})
        numbered = [event | {"sequence_number": n} for n, event in enumerate(told)]
        return ["sse"] + [
            f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in numbered
        ]

    # --- control

    def _control(self, method: str, body: bytes) -> Any:
        if method == "GET":
            return {
                "calls": self.counts,
                "peak": self.peak,
                "log": self.log[-200:],
                "files": {
                    id: file | {"text": self.contents.get(id, b"").decode()[:200_000]}
                    for id, file in self.files.items()
                },
                "batches": {id: self._shown(b) for id, b in self.batches.items()},
                "tokens": len(self.tokens),
            }
        command = json.loads(body)
        if command.get("reset"):
            self.reset()
        for name, value in command.get("set", {}).items():
            if name == "models":
                for model, facts in value.items():
                    self.settings["models"].setdefault(model, {"batch": True}).update(facts)
            else:
                self.settings[name] = value
        self.faults += command.get("faults", [])
        if command.get("mend"):
            self.faults = []
        if command.get("revoke_tokens"):
            self.tokens.clear()
        if command.get("zero_counts"):
            self.counts.clear()
            self.log.clear()
        return {}


class ProviderWorld:
    """Starts the server in its own process and holds its controls."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> ProviderWorld:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,  # open for as long as this process lives, however it ends
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        port = int(self._process.stdout.readline())
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None
        self._process.kill()  # it may be told to hang
        self._process.wait(60)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _post(self, command: dict[str, Any]) -> None:
        request = urllib.request.Request(
            self.url + "/_control", data=json.dumps(command).encode(), method="POST"
        )
        urllib.request.urlopen(request, timeout=60).close()

    def reset(self) -> None:
        """Forget everything: files, batches, faults, counters."""
        self._post({"reset": True})

    def set(self, **settings: Any) -> None:
        """Change settings (see ``DEFAULTS``); ``models`` is merged, the others are replaced."""
        self._post({"set": settings})

    def fail(
        self,
        route: str,
        *,
        times: int = 1,
        status: int = 0,
        body: Any = None,
        headers: dict[str, str] | None = None,
        kind: str = "status",
        after: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """Misbehave on a route, ``times`` times (-1: for ever).

        Kinds: ``status`` (answer it), ``cut`` (after so many bytes of the body), ``drop`` (no
        answer, nothing done), ``lose`` (done, but no answer), ``slow``, ``hang``.
        """
        error = {"message": f"told to answer {status}", "type": "server_error", "code": None}
        self._post(
            {
                "faults": [
                    {
                        "route": route,
                        "times": times,
                        "kind": kind,
                        "status": status,
                        "body": {"error": error} if body is None else body,
                        "headers": headers or {},
                        "after": after,
                        "seconds": seconds,
                    }
                ]
            }
        )

    def mend(self) -> None:
        """Take all faults back."""
        self._post({"mend": True})

    def revoke_tokens(self) -> None:
        """Every identity token given so far becomes invalid."""
        self._post({"revoke_tokens": True})

    def zero(self) -> None:
        """Set the call counters to zero."""
        self._post({"zero_counts": True})

    def ask(self, method: str, path: str) -> dict[str, Any]:
        """What somebody with the provider's key does in its own console."""
        request = urllib.request.Request(
            self.url + path, method=method, headers={"authorization": f"Bearer {API_KEY}"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    def state(self) -> dict[str, Any]:
        """Calls, log, files and batches as the server has them."""
        with urllib.request.urlopen(self.url + "/_control", timeout=10) as response:
            state: dict[str, Any] = json.load(response)
            return state

    def calls(self, route: str | None = None) -> int:
        """How often a route was called; None: all routes together."""
        calls = self.state()["calls"]
        return int(sum(calls.values())) if route is None else int(calls.get(route, 0))


def _end_with_parent() -> None:
    """End when whoever started this is gone: its end of the pipe closes with it."""
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    """Serve on a free loopback port, whose number is the first line printed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(
        Provider(), log_level="critical", lifespan="off", access_log=False, timeout_keep_alive=60
    )
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
