"""``/files``: what goes in, comes out, and is refused."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.handlers.world import Open, World, line

pytestmark = pytest.mark.anyio


async def refused(world: World, **request: Any) -> dict[str, Any]:
    """The error of an upload, after which no file is there."""
    answer = await world.client.post("/v1/files", **request)
    assert answer.status_code in (400, 403, 413), answer.text
    assert answer.headers["content-type"].startswith("application/json")
    assert (await world.client.get("/v1/files")).json()["data"] == []
    error: dict[str, Any] = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    return error


def form(data: bytes | None = None, name: str = "in.jsonl", **fields: str) -> dict[str, Any]:
    return {
        "data": {"purpose": "batch", **fields},
        "files": {"file": (name, line() if data is None else data)},
    }


# --- upload -------------------------------------------------------------------------------------


async def test_the_object(world: World) -> None:
    """Statements 41, 44, 46 to 49, 12: a complete FileObject, processed, expiring in 30 days."""
    data = b"\xef\xbb\xbf" + line("ä").replace(b"\n", b"\r\n") + line("b")[:-1]
    before = int(time.time())
    file = await world.upload(data)
    assert file["id"].startswith("file-")
    assert file["object"] == "file"
    assert file["bytes"] == len(data)
    assert file["filename"] == "in.jsonl"
    assert file["purpose"] == "batch"
    assert file["status"] == "processed"
    assert before <= file["created_at"] <= time.time()
    assert file["expires_at"] == file["created_at"] + 2_592_000
    assert (await world.client.get(f"/v1/files/{file['id']}")).json() == file
    content = await world.client.get(f"/v1/files/{file['id']}/content")
    assert content.content == data


async def test_where_it_will_run(world: World) -> None:
    """The placement is on the object and, with its reason, in a header."""
    answer = await world.client.post("/v1/files", **form())
    assert answer.json()["tidemill_execution"] == "local"
    assert answer.headers["x-tidemill-placement"].startswith('local; reason="')


@pytest.mark.parametrize(
    "name", ["Größe 1 (neu).jsonl", "данные.jsonl", "upload", "a.JSONL", "../../etc/x.jsonl",
             "C:/x.jsonl", 'quote".jsonl', "x" * 506 + ".jsonl"],
)  # fmt: skip
async def test_names_are_kept(world: World, name: str) -> None:
    """Statements 45, 70, 73: blanks, other scripts and path parts come back as they were; a name
    without any extension is that of raw bytes from the Python SDK."""
    answer = await world.client.post("/v1/files", **form(name=name))
    assert answer.status_code == 200, answer.text
    assert answer.json()["filename"] == name
    download = await world.client.get(f"/v1/files/{answer.json()['id']}/content")
    assert download.headers["content-disposition"].isascii()


@pytest.mark.parametrize("name", ["notes.txt", "in.json", "in.jsonl.gz", "in.ndjson"])
async def test_another_kind_of_file(world: World, name: str) -> None:
    """C24: refused here, with ``param`` file."""
    error = await refused(world, **form(name=name))
    assert (error["param"], error["code"]) == ("file", "invalid_file_format")


async def test_a_name_that_is_too_long(world: World) -> None:
    """C10: 513 characters are refused in the envelope, 512 are not."""
    error = await refused(world, **form(name="x" * 507 + ".jsonl"))
    assert (error["param"], error["code"]) == ("file", "filename_too_long")


async def test_the_expiry_is_the_client_s(world: World) -> None:
    """Statements 50, 228: brackets and dots."""
    for opening, end in (("[", "]"), (".", "")):
        fields = {
            f"expires_after{opening}anchor{end}": "created_at",
            f"expires_after{opening}seconds{end}": "3600",
        }
        file = (await world.client.post("/v1/files", **form(None, **fields))).json()
        assert file["expires_at"] == file["created_at"] + 3600


@pytest.mark.parametrize(
    ("anchor", "seconds", "param"),
    [
        ("created_at", "3599", "expires_after.seconds"),
        ("created_at", "2592001", "expires_after.seconds"),
        ("created_at", "soon", "expires_after.seconds"),
        ("created_at", "1e4", "expires_after.seconds"),
        ("last_active_at", "3600", "expires_after.anchor"),
        (None, "3600", "expires_after.anchor"),
        ("created_at", None, "expires_after.seconds"),
    ],
)
async def test_a_bad_expiry(
    world: World, anchor: str | None, seconds: str | None, param: str
) -> None:
    """Statements 51 to 53: refused, and nothing is kept."""
    given = {"expires_after[anchor]": anchor, "expires_after[seconds]": seconds}
    fields = {name: value for name, value in given.items() if value is not None}
    assert (await refused(world, **form(None, **fields)))["param"] == param


@pytest.mark.parametrize(
    "purpose", ["assistants", "fine-tune", "evals", "batch_output", "nonsense"]
)
async def test_other_purposes(world: World, purpose: str) -> None:
    """Statements 56, 69, D2: a clean 400 that names the purpose."""
    error = await refused(world, **form(None, purpose=purpose))
    assert error["param"] == "purpose"
    assert purpose in error["message"]


async def test_missing_parts(world: World) -> None:
    """Statements 54, 55: no file, no purpose."""
    no_file = await refused(world, files={"purpose": (None, "batch")})
    assert (no_file["param"], no_file["code"]) == ("file", "missing_required_parameter")
    no_purpose = await refused(world, files={"file": ("in.jsonl", line())})
    assert (no_purpose["param"], no_purpose["code"]) == ("purpose", "missing_required_parameter")


@pytest.mark.parametrize(
    "request_",
    [
        {"json": {"purpose": "batch"}},
        {"content": b"", "headers": {"content-type": "multipart/form-data"}},
        {"content": b"x", "headers": {"content-type": "multipart/form-data; boundary="}},
        {"content": b"garbage", "headers": {"content-type": "multipart/form-data; boundary=b"}},
        {"content": b"\xff\x00--b", "headers": {"content-type": "multipart/form-data; boundary=b"}},
        {"content": b"a=b", "headers": {"content-type": "application/x-www-form-urlencoded"}},
        {},
    ],
)
async def test_no_form(world: World, request_: dict[str, Any]) -> None:
    """Statements 36, 57, 58: JSON, no boundary, garbage: 4xx in the envelope, no half file."""
    await refused(world, **request_)


async def test_every_problem_is_reported(world: World) -> None:
    """D1: 400 with the seed's code, the first problem as its own, all of them in the list."""
    data = b"{\n" + line("a") + line("b", model="nobody") + line("a")
    error = await refused(world, **form(data))
    assert error["code"] == "invalid_batch_line"
    assert error["message"].startswith("Line 1: This line is not parseable as valid JSON.")
    assert error["errors"]["object"] == "list"
    assert [(p["line"], p["code"], p["param"]) for p in error["errors"]["data"]] == [
        (1, "invalid_json_line", None),
        (3, "model_not_found", "body.model"),
        (4, "duplicate_custom_id", "custom_id"),
    ]


async def test_validation_may_be_the_batch_s(world: World) -> None:
    """D1: by header the upload takes anything and the batch fails, as at OpenAI."""
    answer = await world.client.post(
        "/v1/files", **form(b"{\n"), headers={"X-Tidemill-Validation": "batch"}
    )
    assert answer.status_code == 200
    created = await world.client.post(
        "/v1/batches",
        json={"input_file_id": answer.json()["id"], "endpoint": "/v1/chat/completions"},
    )
    batch = await world.finished(created.json()["id"])
    assert batch["status"] == "failed"
    assert batch["errors"]["data"][0]["code"] == "invalid_json_line"
    assert batch["errors"]["data"][0]["line"] == 1


async def test_an_empty_file(world: World) -> None:
    """Statement 71: zero bytes are refused at upload."""
    assert (await refused(world, **form(b"")))["code"] == "empty_batch_file"


async def test_limits(open_world: Open) -> None:
    """Statement 74, C14, D2: 413 past the bytes, 400 past the lines, one below passes."""
    two = line("a") + line("b")
    async with open_world(max_batch_file_bytes=len(two), max_batch_requests=2) as world:
        error = await refused(world, **form(two + b"\n"))
        assert error["code"] == "batch_file_too_large"
        error = await refused(world, **form(line("a" * 4_000_000)))  # told by Content-Length
        assert error["code"] == "batch_file_too_large"
        await world.upload(two)
    async with open_world(max_batch_requests=1) as world:
        answer = await world.client.post("/v1/files", **form(two))
        assert answer.json()["error"]["code"] == "batch_file_too_many_requests"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-Tidemill-Execution", "here"),
        ("X-Logos-Batch-Execution", "here"),
        ("X-Tidemill-Validation", "never"),
    ],
)
async def test_bad_headers(world: World, name: str, value: str) -> None:
    """A header that means something is not ignored when it is wrong."""
    error = await refused(world, **form(), headers={name: value})
    assert "Supported values" in error["message"]


@pytest.mark.parametrize("value", ["auto", "local", "logos", "LOCAL"])
async def test_execution_here(world: World, value: str) -> None:
    """Both systems' words for "run it here"."""
    for name in ("X-Tidemill-Execution", "X-Logos-Batch-Execution"):
        assert (await world.upload(headers={name: value}))["tidemill_execution"] == "local"


async def test_the_same_content_twice(world: World) -> None:
    """Statements 75, 77, 78: parallel uploads have an id, a name and bytes each, listed at once."""
    names = [f"file {n}.jsonl" for n in range(20)]
    answers = await asyncio.gather(
        *(world.client.post("/v1/files", **form(line(name), name=name)) for name in names)
    )
    files = [answer.json() for answer in answers]
    assert len({file["id"] for file in files}) == 20
    assert [file["filename"] for file in files] == names
    for file in files:
        content = await world.client.get(f"/v1/files/{file['id']}/content")
        assert content.content == line(file["filename"])
    listed = (await world.client.get("/v1/files")).json()["data"]
    assert {file["id"] for file in listed} == {file["id"] for file in files}


# --- retrieve, delete, list ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "file_id",
    ["file-unknown", "batch_x", "x", "%00", "..%2F..%2Fetc", "x" * 4000, "file-%F0%9F%98%80"],
)
async def test_unknown_files(world: World, file_id: str) -> None:
    """Statements 36, 62 to 65, 72, C42: 404 with the documented words, on every route."""
    for method, path in (
        ("GET", f"/v1/files/{file_id}"),
        ("GET", f"/v1/files/{file_id}/content"),
        ("DELETE", f"/v1/files/{file_id}"),
    ):
        answer = await world.client.request(method, path)
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        if file_id == "file-unknown":
            assert error == {
                "message": "No such File object: file-unknown",
                "type": "invalid_request_error",
                "param": "id",
                "code": None,
            }


async def test_delete(world: World) -> None:
    """Statements 6, 66, 67: gone from every route and from the list."""
    file = await world.upload()
    path = f"/v1/files/{file['id']}"
    answer = await world.client.request(
        "DELETE", path, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 200
    assert answer.json() == {"id": file["id"], "object": "file", "deleted": True}
    assert (await world.client.get(path)).status_code == 404
    assert (await world.client.get(path + "/content")).status_code == 404
    assert (await world.client.delete(path)).status_code == 404
    assert (await world.client.get("/v1/files")).json()["data"] == []


async def test_deleting_a_file_in_use(world: World) -> None:
    """A file that an active batch reads is kept, and the SDK is told not to try again."""
    batch = await world.create(line(text="!wait never"))
    answer = await world.client.delete(f"/v1/files/{batch['input_file_id']}")
    assert answer.status_code == 409
    assert answer.headers["x-should-retry"] == "false"
    assert answer.json()["error"]["code"] == "file_in_use"


async def test_pages(world: World) -> None:
    """Statements 203 to 205, 209, 210, 212: newest first or oldest first, a cursor that new files
    do not shift, and an end that is not followed by an empty page."""
    ids = [(await world.upload())["id"] for _ in range(5)]

    async def page(**query: Any) -> dict[str, Any]:
        listed: dict[str, Any] = (await world.client.get("/v1/files", params=query)).json()
        return listed

    assert [f["id"] for f in (await page())["data"]] == ids[::-1]
    assert [f["id"] for f in (await page(order="asc"))["data"]] == ids
    first = await page(limit=2)
    assert (first["object"], first["has_more"]) == ("list", True)
    assert (first["first_id"], first["last_id"]) == (ids[4], ids[3])
    await world.upload()
    second = await page(limit=3, after=first["last_id"])
    assert [f["id"] for f in second["data"]] == ids[2::-1]
    assert second["has_more"] is False
    for after in (ids[0], "file-unknown"):
        empty = await page(after=after)
        assert (empty["data"], empty["has_more"], empty["last_id"]) == ([], False, None)


async def test_filter_by_purpose(world: World) -> None:
    """Statement 206: results are listed under ``batch_output``."""
    batch = await world.finished((await world.create())["id"])
    listed = await world.client.get("/v1/files", params={"purpose": "batch_output"})
    assert [file["id"] for file in listed.json()["data"]] == [batch["output_file_id"]]
    listed = await world.client.get("/v1/files", params={"purpose": "batch", "unknown": "ignored"})
    assert [file["id"] for file in listed.json()["data"]] == [batch["input_file_id"]]


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=10001", "limit=x", "limit=1.5", "order=up", "limit=-1"]
)
async def test_bad_queries(world: World, query: str) -> None:
    """Statement 208: 400 that names the parameter."""
    answer = await world.client.get(f"/v1/files?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.split("=")[0]
