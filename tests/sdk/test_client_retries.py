"""What the clients do when the server is busy or gone, against a scripted server on loopback."""

from __future__ import annotations

import json
import socket
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from tests.worlds.scripted import Hang, Say, ScriptedServer
from tidemill.client import (
    ApiError,
    AsyncTidemillClient,
    BatchGenHttpClient,
    ClientError,
    RetriesExhausted,
    ServerUnreachable,
    TidemillClient,
    WaitTimeout,
)
from tidemill.client.core import backoff, retry_after

pytestmark = pytest.mark.anyio

BUSY = Say(429, {"error": {"message": "full", "code": "capacity_exceeded"}})
NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)


class Both:
    """The same call on both clients: ``await both.get_file("x")`` gives one answer for the two."""

    def __init__(self, url: str, kind: str, **options: Any) -> None:
        self.naps: list[float] = []

        async def anap(seconds: float) -> None:
            self.naps.append(seconds)

        self.client: Any = (
            TidemillClient(url, sleep=self.naps.append, **options)
            if kind == "sync"
            else AsyncTidemillClient(url, sleep=anap, **options)
        )

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            answer = getattr(self.client, name)(*args, **kwargs)
            return await answer if hasattr(answer, "__await__") else answer

        return call


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    """Every test runs on the blocking and on the asyncio client."""
    return str(request.param)


async def test_a_busy_server_is_asked_again_after_1_2_4_8_16_seconds(kind: str) -> None:
    """Five retries, then the answer."""
    with ScriptedServer([BUSY] * 5 + [Say(body={"id": "file-1"})]) as server:
        both = Both(server.base_url, kind)
        assert await both.get_file("file-1") == {"id": "file-1"}
        await both.close()
    assert both.naps == [1, 2, 4, 8, 16]


async def test_after_the_fifth_retry_the_error_is_a_runtime_error(kind: str) -> None:
    """Six requests in all, and the server's own words in the message."""
    with ScriptedServer([BUSY]) as server:
        both = Both(server.base_url, kind)
        with pytest.raises(RuntimeError, match="full") as caught:
            await both.get_file("file-1")
        await both.close()
    assert isinstance(caught.value, RetriesExhausted)
    assert (caught.value.status, caught.value.code) == (429, "capacity_exceeded")
    assert len(server.seen) == 6


async def test_retry_after_wins_over_the_schedule(kind: str) -> None:
    """In seconds, with or without a fraction."""
    script = [
        Say(429, headers={"Retry-After": "30"}),
        Say(429, headers={"Retry-After": "0.25"}),
        Say(429, headers={"Retry-After": "soon"}),
        Say(body={}),
    ]
    with ScriptedServer(script) as server:
        both = Both(server.base_url, kind)
        await both.get_batch("batch_1")
        await both.close()
    assert both.naps == [30, 0.25, 4]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (format_datetime(NOW + timedelta(seconds=90), usegmt=True), 90.0),
        (format_datetime(NOW - timedelta(seconds=90), usegmt=True), 0.0),
        ("Fri, 01 May 2026 12:01:00 -0000", 60.0),
        ("-3", 0.0),
        ("nan", None),
        ("inf", None),
        ("", None),
        (None, None),
    ],
)
def test_retry_after_is_read_as_seconds_or_as_a_date(
    value: str | None, seconds: float | None
) -> None:
    """RFC 9110, section 10.2.3; what means nothing is as if it were not there."""
    assert retry_after(value, NOW) == seconds


def test_the_schedule_is_capped_at_a_minute() -> None:
    """However often the caller allows."""
    assert [backoff(n) for n in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


async def test_a_final_429_is_not_repeated(kind: str) -> None:
    """``x-should-retry: false`` says that waiting will not help."""
    with ScriptedServer([Say(429, headers={"x-should-retry": "false"})]) as server:
        both = Both(server.base_url, kind)
        with pytest.raises(ApiError):
            await both.get_file("file-1")
        await both.close()
    assert (len(server.seen), both.naps) == (1, [])


@pytest.mark.parametrize("status", [400, 401, 404, 409, 500, 503])
async def test_other_errors_are_raised_at_once(kind: str, status: int) -> None:
    """With what the envelope says."""
    problems = {"object": "list", "data": [{"code": "c", "message": "m", "line": 2, "param": None}]}
    error = {"message": "no", "code": "some_code", "param": "p", "errors": problems}
    with ScriptedServer([Say(status, {"error": error}, {"x-request-id": "req_1"})]) as server:
        both = Both(server.base_url, kind)
        with pytest.raises(ApiError) as caught:
            await both.get_file("file-1")
        await both.close()
    exc = caught.value
    assert (exc.status, exc.message, exc.code, exc.param) == (status, "no", "some_code", "p")
    assert (exc.problems, exc.request_id) == (problems["data"], "req_1")
    assert len(server.seen) == 1


async def test_an_upload_whose_connection_broke_is_sent_again_from_its_first_byte(
    kind: str, tmp_path: Path
) -> None:
    """The file is opened anew: never the rest of a consumed body."""
    content = b"x" * 300_000 + b"\n"
    path = tmp_path / "größe 1.jsonl"
    path.write_bytes(content)
    with ScriptedServer([Hang(), BUSY, Say(body={"id": "file-1"})]) as server:
        both = Both(server.base_url, kind)
        assert await both.upload_file(path) == {"id": "file-1"}
        await both.close()
    assert len(server.seen) == 3
    for seen in server.seen:
        assert content in seen.body
        assert b'name="purpose"\r\n\r\nbatch\r\n' in seen.body
        assert 'filename="größe 1.jsonl"'.encode() in seen.body
    assert both.naps == [1, 1]


async def test_bytes_can_be_uploaded_too(kind: str) -> None:
    """And an expiry with them, in the API's form fields."""
    with ScriptedServer([Say(body={"id": "file-1"})]) as server:
        both = Both(server.base_url, kind)
        await both.upload_file(b"{}\n", filename="a.jsonl", expires_after_s=3600)
        await both.close()
    body = server.seen[0].body
    assert b"{}\n" in body
    assert b'name="expires_after[seconds]"\r\n\r\n3600' in body
    assert b'name="expires_after[anchor]"\r\n\r\ncreated_at' in body


async def test_a_create_that_is_repeated_carries_the_same_idempotency_key(kind: str) -> None:
    """Its answer may have been lost after the batch was made; another create has another key."""
    with ScriptedServer([Hang(), Say(body={"id": "batch_1"})]) as server:
        both = Both(server.base_url, kind)
        await both.create_batch("file-1", max_decoding_length=7, metadata={"a": "b"})
        await both.create_batch("file-1")
        await both.close()
    first, again, other = (seen.headers["idempotency-key"] for seen in server.seen)
    assert first == again != other
    assert json.loads(server.seen[1].body) == {
        "input_file_id": "file-1",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "max_decoding_length": 7,
        "metadata": {"a": "b"},
    }


async def test_a_server_that_is_gone_is_reported_after_the_retries(kind: str) -> None:
    """With the schedule of a busy one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # ours, and nobody listens
        both = Both(f"http://127.0.0.1:{port}", kind)
        with pytest.raises(ServerUnreachable, match=f"be reached: http://127.0.0.1:{port}: "):
            await both.list_files()
        await both.close()
    assert both.naps == [1, 2, 4, 8, 16]


async def test_a_download_that_broke_leaves_no_half_file(kind: str, tmp_path: Path) -> None:
    """It starts again, and the name appears when the bytes are whole."""
    target = tmp_path / "deep" / "out.jsonl"
    with ScriptedServer([Hang(after=b"half"), Say(body=b"whole\n")]) as server:
        both = Both(server.base_url, kind)
        await both.download_file("file-1", target)
        await both.close()
    assert target.read_bytes() == b"whole\n"
    assert [path.name for path in target.parent.iterdir()] == ["out.jsonl"]


async def test_waiting_polls_until_the_batch_has_ended(kind: str) -> None:
    """And shows each state to whoever wants to see it."""
    script = [Say(body={"status": s}) for s in ("validating", "in_progress", "expired")]
    states: list[str] = []
    with ScriptedServer(script) as server:
        both = Both(server.base_url, kind)
        batch = await both.wait_for_batch("batch_1", on_poll=lambda b: states.append(b["status"]))
        await both.close()
    assert batch == {"status": "expired"}
    assert states == ["validating", "in_progress", "expired"]
    assert both.naps == [10, 10]


async def test_waiting_no_longer_than_allowed(kind: str) -> None:
    """The last nap is cut to the time that is left, and the batch is looked at once more."""
    times = iter([0.0, 0.0, 10.0, 20.0, 25.0])
    with ScriptedServer([Say(body={"status": "in_progress"})]) as server:
        both = Both(server.base_url, kind, clock=lambda: next(times))
        with pytest.raises(WaitTimeout, match="25 s") as caught:
            await both.wait_for_batch("batch_1", timeout=25)
        await both.close()
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, RuntimeError)
    assert both.naps == [10, 10, 5]


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/"])
async def test_the_base_url_may_end_in_v1_or_not(kind: str, tail: str) -> None:
    """And the key travels as a bearer token."""
    with ScriptedServer([Say(body={"id": "file-1"})]) as server:
        both = Both(server.base_url + tail, kind, api_key="tm-1")
        await both.get_file("file-1/../x")
        await both.close()
    assert server.seen[0].path == "/v1/files/file-1%2F..%2Fx"
    assert server.seen[0].headers["authorization"] == "Bearer tm-1"


def test_a_base_url_without_a_scheme_is_refused() -> None:
    """In words, before anything is sent."""
    with pytest.raises(ValueError, match="http://"):
        TidemillClient("localhost:10900")


async def test_health_is_an_answer_even_when_it_is_bad(kind: str) -> None:
    """503 with a reason is not an exception."""
    with ScriptedServer([Say(503, {"status": "unhealthy", "reason": "engine"})]) as server:
        both = Both(server.base_url, kind)
        assert await both.health_check() == {"status": "unhealthy", "reason": "engine"}
        await both.close()


async def test_an_answer_that_is_not_ours_is_named_as_such(kind: str) -> None:
    """A proxy's page or a wrong port must not look like a bug of the client."""
    with ScriptedServer([Say(body=b"<html>")]) as server:
        both = Both(server.base_url, kind)
        with pytest.raises(ClientError, match="base URL"):
            await both.get_file("file-1")
        await both.close()


def test_the_name_of_batchgen_s_client_works() -> None:
    """A script written for it needs only another import."""
    assert BatchGenHttpClient is TidemillClient
