"""``/batches``: create, retrieve, list, cancel."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.handlers.world import Open, World, line

pytestmark = pytest.mark.anyio

KEYS = [
    "id",
    "object",
    "endpoint",
    "errors",
    "input_file_id",
    "completion_window",
    "status",
    "output_file_id",
    "error_file_id",
    "created_at",
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
    "request_counts",
    "metadata",
]
WAITS = line(text="!wait never")


async def refused(world: World, **fields: Any) -> dict[str, Any]:
    """The error of a create, after which no batch is there."""
    given = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **fields}
    if "input_file_id" not in given:
        given["input_file_id"] = (await world.upload())["id"]
    body = {name: value for name, value in given.items() if value is not ...}
    answer = await world.client.post("/v1/batches", json=body)
    assert answer.status_code == 400, answer.text
    assert (await world.client.get("/v1/batches")).json()["data"] == []
    error: dict[str, Any] = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


# --- create -------------------------------------------------------------------------------------


async def test_the_object(world: World) -> None:
    """Statements 80 to 87, D10: every documented key, and ours."""
    batch = await world.create(WAITS)
    assert batch["id"].startswith("batch_")
    assert set(KEYS) <= set(batch)
    assert batch["object"] == "batch"
    assert batch["status"] == "validating"
    assert batch["endpoint"] == "/v1/chat/completions"
    assert batch["completion_window"] == "24h"
    assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert batch["expires_at"] == batch["created_at"] + 86_400
    assert (batch["tidemill_execution"], batch["logos_execution"]) == ("local", "logos")
    for name in KEYS:
        if name.endswith("_at") and name not in ("created_at", "expires_at"):
            assert batch[name] is None
    assert (batch["errors"], batch["output_file_id"], batch["error_file_id"]) == (None, None, None)
    assert batch["metadata"] is None


async def test_run_to_its_end(world: World) -> None:
    """Statements 106, 110 to 116, 118, 119: retrieve follows the batch to its result files."""
    created = await world.create(line("a") + line("b", "ho"), metadata={"k": "v"})
    batch = await world.finished(created["id"])
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert batch["metadata"] == {"k": "v"}
    assert batch["model"] == "echo"
    assert batch["error_file_id"] is None
    stamps = [batch[n] for n in ("created_at", "in_progress_at", "finalizing_at", "completed_at")]
    assert stamps == sorted(stamps)
    changed = {"status", "request_counts", "model", "usage", "output_file_id"}
    assert {n: v for n, v in batch.items() if n not in changed and not n.endswith("_at")} == {
        n: v for n, v in created.items() if n not in changed and not n.endswith("_at")
    }


async def test_the_window_may_be_left_out(world: World) -> None:
    """The first seed's client and curl call send none; null is none."""
    for window in (..., None):
        file = await world.upload()
        body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions"}
        if window is None:
            body["completion_window"] = None
        answer = await world.client.post("/v1/batches", json=body)
        assert answer.json()["completion_window"] == "24h"


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/chat/completions"])
@pytest.mark.parametrize("url", ["/v1/chat/completions", "/chat/completions"])
async def test_both_spellings(world: World, endpoint: str, url: str) -> None:
    """Statement 227: with and without ``/v1`` are the same endpoint."""
    data = line().replace(b"/v1/chat/completions", url.encode())
    batch = await world.create(data, endpoint=endpoint)
    assert (await world.finished(batch["id"]))["status"] == "completed"


@pytest.mark.parametrize("name", ["input_file_id", "endpoint"])
@pytest.mark.parametrize("absent", [..., None])
async def test_missing_fields(world: World, name: str, absent: Any) -> None:
    """Statements 93, 94: the documented words."""
    assert await refused(world, **{name: absent}) == {
        "message": f"Missing required parameter: '{name}'.",
        "type": "invalid_request_error",
        "param": name,
        "code": "missing_required_parameter",
    }


@pytest.mark.parametrize("name", ["input_file_id", "endpoint", "completion_window"])
@pytest.mark.parametrize("value", [1, 1.5, True, [], {}])
async def test_wrong_types(world: World, name: str, value: Any) -> None:
    """Statements 34, 98, C28: ``invalid_type``, the field named."""
    error = await refused(world, **{name: value})
    assert (error["param"], error["code"]) == (name, "invalid_type")
    assert error["message"].startswith(f"Invalid type for '{name}': expected a string, but got")


@pytest.mark.parametrize(
    "endpoint", ["/v1/moderations", "/v1/images/generations", "/v1/videos", "x", "", "/v1/v1/x"]
)
async def test_unknown_endpoints(world: World, endpoint: str) -> None:
    """Statements 96, 105: the documented words and the values that are supported."""
    error = await refused(world, endpoint=endpoint)
    assert (error["param"], error["code"]) == ("endpoint", "invalid_value")
    assert error["message"].startswith(f"Invalid value: '{endpoint}'. Supported values are: ")
    assert "'/v1/chat/completions'" in error["message"]


@pytest.mark.parametrize("window", ["", "48h", "24H", "1d"])
async def test_other_windows(world: World, window: str) -> None:
    """Statement 97."""
    assert (await refused(world, completion_window=window))["param"] == "completion_window"


@pytest.mark.parametrize(
    ("metadata", "param", "code"),
    [
        ({str(n): "v" for n in range(17)}, "metadata", "invalid_value"),
        ({"k" * 65: "v"}, "metadata", "invalid_value"),
        ({"k": "v" * 513}, "metadata.k", "invalid_value"),
        ({"k": 1}, "metadata.k", "invalid_type"),
        ({"k": None}, "metadata.k", "invalid_type"),
        ({"k": {"x": "y"}}, "metadata.k", "invalid_type"),
        ("text", "metadata", "invalid_type"),
        ([], "metadata", "invalid_type"),
        (False, "metadata", "invalid_type"),
    ],
)
async def test_bad_metadata(world: World, metadata: Any, param: str, code: str) -> None:
    """Statements 88 to 90, 92, C29."""
    error = await refused(world, metadata=metadata)
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(
    "metadata",
    [None, {}, {f"{n:02}" + "ü" * 62: "😀" * 512 for n in range(16)}],
)
async def test_good_metadata(world: World, metadata: dict[str, str] | None) -> None:
    """Statements 86, 87, 91: characters count, not bytes; null is fine; all answers show it."""
    batch = await world.create(WAITS, metadata=metadata)
    assert (batch["metadata"] or None) == (metadata or None)
    assert (await world.client.get(f"/v1/batches/{batch['id']}")).json()["metadata"] == (
        batch["metadata"]
    )
    [listed] = (await world.client.get("/v1/batches")).json()["data"]
    assert listed["metadata"] == batch["metadata"]


async def test_result_files_expire_as_asked(world: World) -> None:
    """Statement 101: seconds count from the result file's own creation."""
    batch = await world.create(output_expires_after={"anchor": "created_at", "seconds": 7200})
    batch = await world.finished(batch["id"])
    file = (await world.client.get(f"/v1/files/{batch['output_file_id']}")).json()
    assert file["expires_at"] == file["created_at"] + 7200


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"anchor": "created_at", "seconds": 3599}, "output_expires_after.seconds"),
        ({"anchor": "created_at", "seconds": 2592001}, "output_expires_after.seconds"),
        ({"anchor": "created_at", "seconds": 7200.5}, "output_expires_after.seconds"),
        ({"anchor": "created_at", "seconds": "7200"}, "output_expires_after.seconds"),
        ({"anchor": "created_at", "seconds": True}, "output_expires_after.seconds"),
        ({"anchor": "created_at"}, "output_expires_after.seconds"),
        ({"anchor": "now", "seconds": 7200}, "output_expires_after.anchor"),
        ({"seconds": 7200}, "output_expires_after.anchor"),
        ({"anchor": 1, "seconds": 7200}, "output_expires_after.anchor"),
        (7200, "output_expires_after"),
        ([], "output_expires_after"),
    ],
)
async def test_bad_output_expiry(world: World, value: Any, param: str) -> None:
    """Statements 102, 103."""
    assert (await refused(world, output_expires_after=value))["param"] == param


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("max_decoding_length", 0, "invalid_value"),
        ("max_decoding_length", "4096", "invalid_type"),
        ("max_decoding_length", True, "invalid_type"),
        ("max_decoding_length", 10**30, "invalid_value"),
        ("temperature", -0.1, "invalid_value"),
        ("temperature", 2.1, "invalid_value"),
        ("temperature", "hot", "invalid_type"),
        ("top_p", 1.1, "invalid_value"),
        ("top_k", -1, "invalid_value"),
        ("top_k", 1.5, "invalid_type"),
        ("max_context_length", 0, "invalid_value"),
        ("deterministic", 1, "invalid_type"),
    ],
)
async def test_bad_defaults(world: World, name: str, value: Any, code: str) -> None:
    """D10: the batch's sampling defaults are checked, too."""
    error = await refused(world, **{name: value})
    assert (error["param"], error["code"]) == (name, code)


async def test_defaults_reach_the_lines(world: World) -> None:
    """D10, seed: ``max_decoding_length`` limits a line that has no limit of its own."""
    batch = await world.create(
        line(text="one two three"), max_decoding_length=2, temperature=0.7, top_p=0.9, top_k=40
    )
    assert (await world.finished(batch["id"]))["usage"]["output_tokens"] == 2


async def test_unknown_fields_are_ignored(world: World) -> None:
    """Statement 108: a stray ``anchor`` as in Azure's sample, and what SDKs will send next year."""
    batch = await world.create(anchor="created_at", priority=[1], output_folder={"url": "x"})
    assert batch["status"] == "validating"


async def test_azure_s_own_storage_is_not_here(world: World) -> None:
    """Statement 234: a clean 400."""
    error = await refused(world, input_file_id=None, input_blob="https://x/y")
    assert error["param"] == "input_blob"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"null", b"3", b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000, b"a=b"],
)
@pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded"])
async def test_no_json_object(world: World, body: bytes, kind: str) -> None:
    """Statements 31 to 33, 36, C28: whatever is no JSON object is told so."""
    answer = await world.client.post("/v1/batches", content=body, headers={"content-type": kind})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "JSON" in error["message"]


async def test_a_form_is_no_json(world: World) -> None:
    """C28: multipart is refused."""
    answer = await world.client.post("/v1/batches", files={"input_file_id": (None, "file-x")})
    assert answer.status_code == 400


async def test_a_huge_body(world: World) -> None:
    """A create of megabytes is refused while it is read."""
    answer = await world.client.post("/v1/batches", content=b" " * (2**20 + 1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("file_id", ["file-unknown", "", "%00", "x" * 4000, "ü"])
async def test_unknown_input_files(world: World, file_id: str) -> None:
    """Statement 99: 400 at create, the file named."""
    error = await refused(world, input_file_id=file_id)
    assert error["message"].startswith(f"Cannot find file {file_id[:200]}")
    assert error["param"] == "file_id"


async def test_results_are_no_input(world: World) -> None:
    """Statement 100: a file with another purpose is refused."""
    batch = await world.finished((await world.create())["id"])
    answer = await world.client.post(
        "/v1/batches",
        json={"input_file_id": batch["output_file_id"], "endpoint": "/v1/chat/completions"},
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input_file_id"


async def test_a_file_for_another_endpoint(world: World) -> None:
    """C13: the file's lines and the batch's endpoint must agree; said at create."""
    error = await refused(world, endpoint="/v1/embeddings")
    assert error["param"] == "endpoint"
    assert "/v1/chat/completions" in error["message"]


# --- the same create twice ----------------------------------------------------------------------


async def test_a_second_active_batch_of_a_file(open_world: Open) -> None:
    """D6: refused with the first one's id; the setting lifts it; a finished one is no hindrance."""
    async with open_world() as world:
        batch = await world.create(WAITS)
        fields = {"input_file_id": batch["input_file_id"], "endpoint": "/v1/chat/completions"}
        again = await world.client.post("/v1/batches", json=fields)
        assert again.status_code == 400
        assert again.json()["error"]["code"] == "duplicate_active_batch"
        assert batch["id"] in again.json()["error"]["message"]
        done = await world.finished((await world.create())["id"])
        fields["input_file_id"] = done["input_file_id"]
        assert (await world.client.post("/v1/batches", json=fields)).status_code == 200
    async with open_world(allow_duplicate_batches=True) as world:
        batch = await world.create(WAITS)
        fields["input_file_id"] = batch["input_file_id"]
        assert (await world.client.post("/v1/batches", json=fields)).status_code == 200


@pytest.mark.parametrize("headers", [{"x-stainless-retry-count": "1"}, {"Idempotency-Key": "once"}])
async def test_a_repeated_create(world: World, headers: dict[str, str]) -> None:
    """D6, C44, statement 40: one batch, not three."""
    file = await world.upload(WAITS)
    fields = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions"}
    first = await world.client.post("/v1/batches", json=fields, headers={"Idempotency-Key": "once"})
    for _ in range(2):
        again = await world.client.post("/v1/batches", json=fields, headers=headers)
        assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
    assert len((await world.client.get("/v1/batches")).json()["data"]) == 1


async def test_odd_retry_counts(world: World) -> None:
    """A first try says 0; nonsense is no repetition."""
    file = await world.upload(WAITS)
    fields = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions"}
    assert (await world.client.post("/v1/batches", json=fields)).status_code == 200
    for count in ("0", "", "x", "-1", "00"):
        again = await world.client.post(
            "/v1/batches", json=fields, headers={"x-stainless-retry-count": count}
        )
        assert again.status_code == 400


async def test_an_endless_idempotency_key(world: World) -> None:
    """A bounded header, refused in the envelope."""
    file = await world.upload()
    answer = await world.client.post(
        "/v1/batches",
        json={"input_file_id": file["id"], "endpoint": "/v1/chat/completions"},
        headers={"Idempotency-Key": "x" * 256},
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")


async def test_parallel_creates(world: World) -> None:
    """Statement 107: twenty at once are twenty batches."""
    batches = await asyncio.gather(*(world.create(line(str(n))) for n in range(20)))
    assert len({batch["id"] for batch in batches}) == 20


async def test_a_full_intake(open_world: Open) -> None:
    """D9: 429 with a Retry-After that both SDKs heed, and nothing created."""
    async with open_world(max_intake_capacity=3) as world:
        await world.create(line("a", "!wait never") + line("b", "!wait never"))
        file = await world.upload(line("a") + line("b"))
        answer = await world.client.post(
            "/v1/batches",
            json={"input_file_id": file["id"], "endpoint": "/v1/chat/completions"},
        )
        if answer.status_code == 429:
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert answer.json()["error"]["code"] == "capacity_exceeded"
            assert len((await world.client.get("/v1/batches")).json()["data"]) == 1
        else:
            pytest.fail(f"the intake took it: {answer.text}")


# --- retrieve, list, cancel ---------------------------------------------------------------------


@pytest.mark.parametrize("batch_id", ["batch_unknown", "file-x", "x", "%00", "x" * 4000, "..%2Fx"])
async def test_unknown_batches(world: World, batch_id: str) -> None:
    """Statements 36, 123, 124, C42: 404 in the envelope, on every route."""
    for method, tail in (("GET", ""), ("POST", "/cancel"), ("GET", "/results")):
        answer = await world.client.request(method, f"/v1/batches/{batch_id}{tail}")
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_pages(world: World) -> None:
    """Statements 195 to 200, 209 to 212, C97, C98, C101: newest first, by cursor, each once, also
    while batches arrive."""
    ids = [(await world.create(line(str(n))))["id"] for n in range(23)]

    async def page(**query: Any) -> dict[str, Any]:
        listed: dict[str, Any] = (await world.client.get("/v1/batches", params=query)).json()
        return listed

    first = await page()
    assert [b["id"] for b in first["data"]] == ids[:2:-1]
    assert (first["object"], first["has_more"]) == ("list", True)
    assert (first["first_id"], first["last_id"]) == (ids[22], ids[3])
    seen: list[str] = []
    cursor: dict[str, Any] = {}
    while True:
        listed = await page(limit=10, **cursor)
        assert listed["data"] or not listed["has_more"]
        seen += [b["id"] for b in listed["data"]]
        if not listed["has_more"]:
            break
        cursor = {"after": listed["data"][-1]["id"]}
        await world.create(line("late"))
    assert seen == ids[::-1]
    for after in (ids[0], "batch_unknown"):
        empty = await page(after=after)
        assert (empty["data"], empty["has_more"]) == ([], False)


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=ten", "limit=-5"])
async def test_bad_limits(world: World, query: str) -> None:
    """Statements 201, 202."""
    answer = await world.client.get(f"/v1/batches?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


async def test_unknown_queries_are_ignored(world: World) -> None:
    """Statements 8, 237: Azure's filters and versions change nothing."""
    batch = await world.create(WAITS)
    answer = await world.client.get(
        "/v1/batches",
        params={"$filter": "created_at gt 1", "$orderby": "created_at asc", "api-version": "x"},
    )
    assert [b["id"] for b in answer.json()["data"]] == [batch["id"]]


@pytest.mark.parametrize(
    "headers",
    [{"Content-Type": "application/json", "Content-Length": "0"}, {"Content-Length": "0"}, {}],
)
async def test_cancel(world: World, headers: dict[str, str]) -> None:
    """Statements 5, 127, 129, D8, C65: an empty body is fine, and so is the second cancel."""
    batch = await world.create(WAITS)
    path = f"/v1/batches/{batch['id']}/cancel"
    for _ in range(2):
        answer = await world.client.post(path, headers=headers)
        assert answer.status_code == 200
        assert answer.json()["status"] in ("cancelling", "cancelled")
        assert answer.json()["cancelling_at"] is not None


async def test_cancel_of_a_finished_batch(world: World) -> None:
    """Statements 37, 125, D8: 409, said to be final, and nothing changes."""
    batch = await world.finished((await world.create())["id"])
    answer = await world.client.post(f"/v1/batches/{batch['id']}/cancel")
    assert answer.status_code == 409
    assert answer.headers["x-should-retry"] == "false"
    assert answer.json()["error"]["message"] == "Cannot cancel a batch with status 'completed'."
    assert answer.json()["error"]["code"] == "batch_not_cancellable"
    assert (await world.client.get(f"/v1/batches/{batch['id']}")).json() == batch
