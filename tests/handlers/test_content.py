"""Downloads: the stored bytes, whole, in part, or not at all."""

from __future__ import annotations

from urllib.parse import unquote

import pytest

from tests.handlers.world import World, line

pytestmark = pytest.mark.anyio

DATA = b"".join(line(f"r{n}", "x" * 1000) for n in range(200))


async def stored(world: World, data: bytes = DATA) -> str:
    return f"/v1/files/{(await world.upload(data))['id']}/content"


@pytest.mark.parametrize(
    "accept", ["*/*", "application/binary", "application/json", "text/html", "nonsense"]
)
async def test_the_bytes_whatever_is_accepted(world: World, accept: str) -> None:
    """Statements 59, 60, 76: never 406, never encoded as JSON."""
    path = await stored(world)
    answer = await world.client.get(path, headers={"Accept": accept})
    assert answer.status_code == 200
    assert answer.content == DATA
    assert answer.headers["content-length"] == str(len(DATA))
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["accept-ranges"] == "bytes"
    assert "content-encoding" not in answer.headers


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=100-199", 100, 200),
        ("bytes=100000-", 100_000, len(DATA)),
        ("bytes=-10", len(DATA) - 10, len(DATA)),
        (f"bytes=-{10**9}", 0, len(DATA)),
        (f"bytes=5-{10**15}", 5, len(DATA)),
        ("bytes=65530-65545", 65_530, 65_546),
    ],
)
async def test_one_range(world: World, asked: str, start: int, stop: int) -> None:
    """206 with just these bytes, also across the borders of stored chunks."""
    answer = await world.client.get(await stored(world), headers={"Range": asked})
    assert answer.status_code == 206
    assert answer.content == DATA[start:stop]
    assert answer.headers["content-range"] == f"bytes {start}-{stop - 1}/{len(DATA)}"
    assert answer.headers["content-length"] == str(stop - start)


@pytest.mark.parametrize(
    "asked", ["bytes=0-1,5-6", "bytes=5-1", "bytes=-", "bytes=x-", "lines=0-1", "bytes 0-1", ""]
)
async def test_what_is_no_single_range_is_ignored(world: World, asked: str) -> None:
    """RFC 9110 14.2: a range that is not understood is answered with the whole file."""
    answer = await world.client.get(await stored(world), headers={"Range": asked})
    assert (answer.status_code, answer.content) == (200, DATA)


@pytest.mark.parametrize("asked", [f"bytes={len(DATA)}-", f"bytes={10**12}-{10**13}", "bytes=-0"])
async def test_a_range_behind_the_end(world: World, asked: str) -> None:
    """416 in the envelope, and the size that would have been right."""
    answer = await world.client.get(await stored(world), headers={"Range": asked})
    assert answer.status_code == 416
    assert answer.headers["content-range"] == f"bytes */{len(DATA)}"
    assert answer.json()["error"]["code"] == "range_not_satisfiable"


async def test_conditions(world: World) -> None:
    """A strong tag that never changes: 304 for who has it, and a range only of the same bytes."""
    path = await stored(world)
    etag = (await world.client.get(path)).headers["etag"]
    assert etag.startswith('"')
    for condition in (etag, "*", f'"other", W/{etag}'):
        answer = await world.client.get(path, headers={"If-None-Match": condition})
        assert (answer.status_code, answer.content) == (304, b"")
        assert answer.headers["etag"] == etag
    answer = await world.client.get(path, headers={"If-None-Match": '"other"'})
    assert answer.status_code == 200
    for condition, status in ((etag, 206), ('"other"', 200), (f"W/{etag}", 200)):
        answer = await world.client.get(path, headers={"Range": "bytes=0-9", "If-Range": condition})
        assert answer.status_code == status


async def test_head(world: World) -> None:
    """HEAD is GET without the bytes."""
    path = await stored(world)
    head, get = await world.client.head(path), await world.client.get(path)
    assert head.content == b""
    names = ("etag", "content-length", "content-type", "content-disposition", "accept-ranges")
    assert [head.headers[n] for n in names] == [get.headers[n] for n in names]
    part = await world.client.head(path, headers={"Range": "bytes=0-9"})
    assert (part.status_code, part.headers["content-length"]) == (206, "10")


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("in.jsonl", "in.jsonl"),
        ("two words.jsonl", "two words.jsonl"),
        ("Größe.jsonl", "Gr__e.jsonl"),
        ('a"b;c.jsonl', "a_b;c.jsonl"),
        ("../x.jsonl", ".._x.jsonl"),
    ],
)
async def test_the_name_to_save_under(world: World, name: str, plain: str) -> None:
    """RFC 6266: always an attachment, with a name that every client reads and the real one."""
    answer = await world.client.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": (name, line())}
    )
    download = await world.client.get(f"/v1/files/{answer.json()['id']}/content")
    first, _, extended = download.headers["content-disposition"].partition("; filename*=UTF-8''")
    assert first == f'attachment; filename="{plain}"'
    assert unquote(extended) == ("" if name == plain else name)


async def test_result_files_are_files(world: World) -> None:
    """Statements 116, 121: results are served like any file, ranges included."""
    batch = await world.finished((await world.create())["id"])
    file = (await world.client.get(f"/v1/files/{batch['output_file_id']}")).json()
    assert file["filename"].endswith(".jsonl")
    path = f"/v1/files/{file['id']}/content"
    content = (await world.client.get(path)).content
    assert len(content) == file["bytes"]
    part = await world.client.get(path, headers={"Range": "bytes=10-29"})
    assert part.content == content[10:30]
