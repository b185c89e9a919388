"""What every answer has in common, and requests that no client library would send."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.handlers.world import Open, World, line
from tidemill import telemetry
from tidemill.types import ReplicaStatus

pytestmark = pytest.mark.anyio


async def raw(
    world: World,
    parts: Iterable[bytes],
    *,
    cut_off: bool = False,
    path: str = "/v1/files",
    headers: Iterable[tuple[bytes, bytes]] = (),
    kind: bytes = b"multipart/form-data; boundary=b",
) -> tuple[int, dict[str, str], Any]:
    """A POST straight into the application: the body as these parts, at the end of which the client
    is done or, ``cut_off``, gone."""
    waiting: list[dict[str, Any]] = [
        {"type": "http.request", "body": part, "more_body": True} for part in parts
    ]
    end = {"type": "http.request", "body": b"", "more_body": False}
    waiting.append({"type": "http.disconnect"} if cut_off else end)
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"authorization", b"Bearer " + world.key.encode()), (b"content-type", kind),
                    *headers],
        "client": ("127.0.0.1", 1),
        "server": ("testserver", 80),
    }  # fmt: skip
    await world.app(scope, receive, send)  # type: ignore[arg-type]
    assert not waiting or cut_off, "the rest of the body was left unread"
    answer = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], answer, json.loads(body)


def part(head: str, content: bytes) -> bytes:
    return (
        b"--b\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + content + b"\r\n"
    )


PURPOSE = part('name="purpose"', b"batch")
FILE = part('name="file"; filename="in.jsonl"', line())


async def no_file_is_kept(world: World) -> None:
    assert (await world.client.get("/v1/files")).json()["data"] == []


# --- forms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("first", ["purpose", "file"])
async def test_any_order_in_any_pieces(world: World, first: str, size: int) -> None:
    """Statements 42, 43: openai-node sends the file first, chunked, without a length; the expiry
    behind the file counts."""
    expiry = part('name="expires_after[anchor]"', b"created_at") + part(
        'name="expires_after[seconds]"', b"3600"
    )
    whole = PURPOSE + FILE + expiry if first == "purpose" else FILE + PURPOSE + expiry
    whole += b"--b--\r\n"
    parts = [whole[at : at + size] for at in range(0, len(whole), size)]
    status, _, file = await raw(world, parts)
    assert status == 200, file
    assert file["bytes"] == len(line())
    assert file["expires_at"] == file["created_at"] + 3600
    content = await world.client.get(f"/v1/files/{file['id']}/content")
    assert content.content == line()


@pytest.mark.parametrize("length", range(0, len(PURPOSE + FILE), 11))
async def test_a_form_that_is_cut_off(world: World, length: int) -> None:
    """Statement 58: wherever the body ends too early, 400 and no half file."""
    status, _, answer = await raw(world, [(PURPOSE + FILE)[:length]])
    assert (status, answer["error"]["code"]) == (400, "invalid_form")
    await no_file_is_kept(world)


@pytest.mark.parametrize("length", [0, 20, len(PURPOSE) + 80, len(PURPOSE + FILE)])
async def test_a_client_that_goes_away(world: World, length: int) -> None:
    """A connection that breaks in mid-upload leaves nothing behind."""
    await raw(world, [(PURPOSE + FILE)[:length]], cut_off=True)
    await no_file_is_kept(world)


@pytest.mark.parametrize(
    ("form", "param"),
    [
        (FILE + FILE + PURPOSE, "file"),
        (FILE + part('name="purpose"', b"evals"), "purpose"),
        (FILE, "purpose"),
        (part('name="purpose"', b"evals") + FILE, "purpose"),
        (PURPOSE + part('name="file"; filename="a\x01.jsonl"', line()), "file"),
        (PURPOSE + part('name="note"', b"x" * 70_000) + FILE, None),
        (PURPOSE + part('name="x"', b"") * 100 + FILE, None),
        (PURPOSE + b"--b\r\n" + b"X-Long: " + b"x" * 9000 + b"\r\n\r\n\r\n" + FILE, None),
        (part('name="file"; filename="X.jsonl"', b"").replace(b"X", b"\xff"), None),
    ],
)  # fmt: skip
async def test_forms_that_are_wrong(world: World, form: bytes, param: str | None) -> None:
    """Statement 36: every one gets a 400, the rest of the body is swallowed, nothing is kept."""
    status, _, answer = await raw(world, [form[:50], form[50:], b"--b--\r\n", b"x" * 1000])
    assert (status, answer["error"]["param"]) == (400, param)
    await no_file_is_kept(world)


@pytest.mark.parametrize(
    ("head", "name"),
    [
        ("name=\"file\"; filename*=UTF-8''Gr%C3%B6%C3%9Fe%201.jsonl", "Größe 1.jsonl"),
        ('name="file"; filename="x.jsonl"; filename*=utf-8\'de\'%e2%82%ac.jsonl', "€.jsonl"),
        ('name="file"; filename=plain.jsonl', "plain.jsonl"),
        ('name="file"; filename="日本 語.jsonl"', "日本 語.jsonl"),
        ('name="file"', "upload"),
        ('name="file"; filename=""', "upload"),
    ],
)
async def test_spellings_of_a_name(world: World, head: str, name: str) -> None:
    """Statement 45: raw UTF-8 as the SDKs send it, RFC 5987 as others do."""
    status, _, file = await raw(world, [PURPOSE + part(head, line()) + b"--b--"])
    assert (status, file.get("filename")) == (200, name)


async def test_the_answer_comes_after_the_body(open_world: Open) -> None:
    """Statement 74: a refusal waits until the client has sent the rest, or the SDK would see a
    broken connection and upload again."""
    async with open_world(max_batch_file_bytes=1000) as world:
        chunks = [PURPOSE, part('name="file"; filename="a.jsonl"', b"x" * 5000), b"y" * 100_000]
        status, _, answer = await raw(world, chunks)
        assert (status, answer["error"]["code"]) == (413, "batch_file_too_large")
        wrong = [(b"authorization", b"Bearer wrong")]
        status, _, answer = await raw(world, [b"x" * 10] * 50, path="/v1/nope", headers=wrong)
        assert status == 404


async def test_a_client_that_asks_first_is_answered_at_once(open_world: Open) -> None:
    """RFC 9110 10.1.1: with ``Expect: 100-continue`` no byte of a refused body is asked for."""
    async with open_world(max_batch_file_bytes=1000) as world:
        headers = [(b"expect", b"100-continue"), (b"content-length", b"99999999")]
        with pytest.raises(AssertionError, match="left unread"):
            await raw(world, [b"x" * 100], headers=headers)


# --- every answer -------------------------------------------------------------------------------


async def test_request_ids(world: World) -> None:
    """Statements 2 to 4: on success and error, and never twice."""
    paths = ["/v1/files", "/v1/files", "/v1/nope", "/v1/batches/x", "/health", "/metrics"]
    ids = [(await world.client.get(path)).headers["x-request-id"] for path in paths]
    assert len(set(ids)) == len(paths)
    assert all(one.startswith("req_") for one in ids)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nope", 404),
        ("GET", "/", 404),
        ("POST", "/v2/batches", 404),
        ("GET", "/v1/files/a/b/c", 404),
        ("PUT", "/v1/files", 405),
        ("DELETE", "/v1/batches/batch_x", 405),
        ("PATCH", "/v1/batches", 405),
        ("GET", "/" + "x" * 5000, 404),
    ],
)
async def test_unknown_routes_and_methods(
    world: World, method: str, path: str, status: int
) -> None:
    """Statements 1, 10, 11, 28, D11: the envelope with its four keys, and the URL in the words."""
    answer = await world.client.request(method, path, content=b"x")
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert f"({method} {path[:200]}" in error["message"]
    if status == 405:
        assert "GET" in answer.headers["allow"] or "POST" in answer.headers["allow"]


@pytest.mark.parametrize("path", ["/v1/files", "/v1/files/", "/v1//files//", "/openai/batches/"])
async def test_no_redirects(world: World, path: str) -> None:
    """Statements 9, 238: a slash too many is answered directly."""
    assert (await world.client.get(path)).status_code == 200


async def test_what_clients_add_is_ignored(world: World) -> None:
    """Statements 7, 8: SDK headers and unknown queries change nothing."""
    answer = await world.client.get(
        "/v1/files",
        params={"api-version": "2024-10-21", "x": "y", "": "z"},
        headers={
            "OpenAI-Organization": "o",
            "OpenAI-Project": "p",
            "OpenAI-Beta": "b",
            "x-stainless-lang": "python",
            "x-ms-client-request-id": "1",
            "Idempotency-Key": "k",
        },
    )
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "request_",
    [
        ("GET", "/v1/files?limit=%ff"),
        ("GET", "/v1/files?after=%00"),
        ("GET", "/v1/batches?after=" + "x" * 4000),
        ("GET", "/v1/files/%ff%fe"),
        ("POST", "/v1/batches/%0d%0aX:1/cancel"),
    ],
)
async def test_hostile_urls(world: World, request_: tuple[str, str]) -> None:
    """Statement 36: below 500, without a traceback."""
    answer = await world.client.request(*request_)
    assert answer.status_code < 500
    assert "Traceback" not in answer.text


async def test_an_unexpected_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 in the envelope says nothing of the inside; the log has it under the request's id."""

    async def broken(*_: Any) -> None:
        raise RuntimeError("the secret of the house")

    monkeypatch.setattr(world.services.store.files, "page", broken)
    with capture_logs(processors=[_with_context]) as logs:
        answer = await world.client.get("/v1/files")
    assert answer.status_code == 500
    assert "secret" not in answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    [entry] = [log for log in logs if log["log_level"] == "error"]
    assert entry["request_id"] == answer.headers["x-request-id"]
    assert str(entry["exc_info"]) == "the secret of the house"


async def test_the_access_log(world: World) -> None:
    """One line per request with route, status and time; neither keys, ids nor queries."""
    with capture_logs() as logs:
        await world.client.get("/v1/files/file-secret", params={"x": "hidden"})
    [entry] = [log for log in logs if log["event"] == "request"]
    assert (entry["method"], entry["route"], entry["status"]) == ("GET", "/v1/files/{file_id}", 404)
    assert entry["ms"] >= 0
    assert "secret" not in str(entry)
    assert "hidden" not in str(entry)
    assert world.key not in str(logs)


def _with_context(_: Any, __: str, event: Any) -> Any:
    import structlog

    return {**structlog.contextvars.get_contextvars(), **event}


# --- health and metrics -------------------------------------------------------------------------


async def test_health(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed: 200 and healthy; an engine that is down makes it 503, with the reason."""
    answer = await world.client.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "healthy"})
    down = ReplicaStatus(healthy=False, reason="it would not start")
    monkeypatch.setattr(world.engine, "status", lambda: down)
    answer = await world.client.get("/health")
    assert answer.status_code == 503
    assert answer.json()["status"] == "unhealthy"
    assert "it would not start" in answer.json()["reason"]
    assert (await world.client.head("/health")).status_code == 503


async def test_pool_status(open_world: Open) -> None:
    """The first seed's fields."""
    async with open_world() as world:
        await check_pool_status(world)


async def check_pool_status(world: World) -> None:
    await world.create(line("a", "!wait never"))
    status = (await world.client.get("/v1/pool/status")).json()
    assert {
        "intake_pool_size",
        "intake_pool_capacity",
        "scheduling_pool_active",
        "scheduling_pool_free",
        "scheduling_pool_capacity",
        "active_batches",
        "pool_mode",
    } <= set(status)
    assert status["intake_pool_capacity"] == 1_000_000
    assert status["scheduling_pool_capacity"] == 10_240
    assert status["active_batches"] == 1
    assert status["pool_mode"] is True
    replica = status["replicas"]["echo"]
    assert {"active", "waiting", "parked", "held", "parks", "resumes"} <= set(replica)
    assert {"kind", "bytes", "used", "free", "largest", "blocks"} == set(replica["arena"])


async def test_metrics(world: World) -> None:
    """Requests are counted by template, and labels do not grow with what clients send."""
    before = _series()
    for n in range(30):
        await world.client.get(f"/v1/files/file-{n}")
        await world.client.request(f"M{n}".ljust(9, "X"), f"/nope/{n}")
    answer = await world.client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    text = answer.text
    assert 'route="/v1/files/{file_id}",status="404"' in text
    assert 'tidemill_pool{field="intake_pool_capacity"} 1e+06' in text
    assert 'tidemill_replica_up{model="echo"} 1.0' in text
    for series in (
        'sequences{model="echo",state="parked"}',
        'moves{kind="parks",model="echo"}',
        'arena{field="free",model="echo"}',
    ):
        assert f"tidemill_replica_{series} 0.0" in text
    assert _series() - before <= 3


def _series() -> int:
    return sum(len(metric.samples) for metric in telemetry.REQUESTS.collect())
