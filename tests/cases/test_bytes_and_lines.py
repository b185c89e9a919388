"""Cases that users of batch servers reported: the bytes of a file and its lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cases.register import Elsewhere, missing, untested
from tests.handlers.world import Open, World, line
from tests.worlds.server import Server

pytestmark = pytest.mark.anyio

ELSEWHERE: Elsewhere = {
    "C22": (
        "tests/sdk/test_node_sdk.py::test_upload_create_poll_download_list",
        "tests/handlers/test_wire.py::test_any_order_in_any_pieces",
    ),
}


def test_every_case_of_this_section_is_tested() -> None:
    """Here or elsewhere, by a test that is there."""
    cases = (1, 2, 3, 4, 6, 7, 8, 10, 12, 13, 14, 17, 18, 19, 22, 24, 25, 26)
    assert untested(sys.modules[__name__], cases, ELSEWHERE) == set()
    assert missing(ELSEWHERE) == []


async def send(world: World, data: bytes, name: str = "in.jsonl") -> httpx.Response:
    return await world.client.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": (name, data)}
    )


async def problems(world: World, data: bytes) -> list[dict[str, Any]]:
    """All problems of a file that is refused, and of which nothing is kept."""
    answer = await send(world, data)
    assert answer.status_code == 400, answer.text
    assert (await world.client.get("/v1/files")).json()["data"] == []
    error = answer.json()["error"]
    found: list[dict[str, Any]] = error["errors"]["data"]
    assert found[0]["message"] in error["message"]
    return found


async def output(world: World, data: bytes) -> list[dict[str, Any]]:
    """The rows that a file's batch ends with, of both files."""
    batch = await world.finished((await world.create(data))["id"])
    rows = []
    for file_id in filter(None, (batch["output_file_id"], batch["error_file_id"])):
        content = (await world.client.get(f"/v1/files/{file_id}/content")).content
        rows += [json.loads(row) for row in content.split(b"\n")[:-1]]
    return rows


def raw(custom_id: str = '"a"', **body: str) -> bytes:
    """A line from JSON texts, right or wrong."""
    fields = {"model": '"echo"', "messages": '[{"role": "user", "content": "hi"}]', **body}
    inner = ", ".join(f'"{name}": {text}' for name, text in fields.items())
    return (
        f'{{"custom_id": {custom_id}, "method": "POST", "url": "/v1/chat/completions", '
        f'"body": {{{inner}}}}}\n'
    ).encode()


@pytest.mark.parametrize(
    ("codec", "name"),
    [("utf-16", "UTF-16"), ("utf-16-le", "UTF-16"), ("utf-16-be", "UTF-16"), ("utf-32", "UTF-32")],
)
async def test_c01_another_encoding_is_named(world: World, codec: str, name: str) -> None:
    """As an editor saves it: the encoding is what is wrong, not the JSON."""
    [problem] = await problems(world, line().decode().encode(codec))
    assert name in problem["message"]
    assert "UTF-8" in problem["message"]
    assert "JSON" not in problem["message"]


async def test_c02_a_byte_order_mark(world: World) -> None:
    """The first record is intact, and the file keeps its exact bytes."""
    data = b"\xef\xbb\xbf" + line("first") + line("second")
    assert {row["custom_id"] for row in await output(world, data)} == {"first", "second"}
    [file] = [
        file
        for file in (await world.client.get("/v1/files")).json()["data"]
        if file["purpose"] == "batch"
    ]
    assert (await world.client.get(f"/v1/files/{file['id']}/content")).content == data


@pytest.mark.parametrize("wrong", [b"[1]", b'"x"', b"null", b"42", b"true"])
async def test_c03_a_line_that_is_no_object(world: World, wrong: bytes) -> None:
    """JSON, but no request: its line is named, and what it is."""
    [problem] = await problems(world, line() + wrong + b"\n")
    assert (problem["line"], problem["code"]) == (2, "invalid_json_line")
    assert "object" in problem["message"]


@pytest.mark.parametrize("body", ['"text"', "[]", "5", "true"])
async def test_c03_a_body_that_is_no_object(world: World, body: str) -> None:
    """The same for the body alone."""
    wrong = line().replace(json.dumps(json.loads(line())["body"]).encode(), body.encode())
    [problem] = await problems(world, line("b") + wrong)
    assert (problem["line"], problem["param"]) == (2, "body")


async def test_c04_blank_lines(world: World) -> None:
    """Skipped, also those of white space; line numbers are still those of an editor."""
    data = b"\n" + line("a") + b"   \n\t\r\n" + line("b")[:-1] + b"\r\n\n"
    assert {row["custom_id"] for row in await output(world, data)} == {"a", "b"}
    async with world.for_newcomers() as other:
        [problem] = await problems(other, data + b"[1]")
        assert problem["line"] == 7


async def test_c06_separators_of_other_readers(world: World) -> None:
    """One line in is one record, and one row out is one line to every reader."""
    text = "a\u2028b\u2029c\u0085d\u000be\u000cf\u001cg"
    data = json.loads(line("u \u2028 v"))
    data["body"]["messages"][0]["content"] = text
    encoded = json.dumps(data, ensure_ascii=False).encode() + b"\n"
    batch = await world.finished((await world.create(encoded))["id"])
    content = await world.client.get(f"/v1/files/{batch['output_file_id']}/content")
    [row] = content.text.splitlines()
    assert [*content.iter_lines()] == [row]
    assert not any(mark in row for mark in "\u2028\u2029\u0085")
    assert json.loads(row)["custom_id"] == "u \u2028 v"
    assert json.loads(row)["response"]["body"]["choices"][0]["message"]["content"] == text


async def test_c07_stray_bytes(world: World) -> None:
    """Where they are: line, byte of the line, byte of the file."""
    good = line("a")
    bad = raw(model='"ech\xff"').replace("\xff".encode(), b"\xff")
    [problem] = await problems(world, good + bad)
    at = bad.index(b"\xff")
    assert problem["line"] == 2
    assert f"byte {at} of the line" in problem["message"]
    assert f"offset {len(good) + at} of the file" in problem["message"]


async def test_c08_a_custom_id_twice(world: World) -> None:
    """Both lines are named, also when one of them has another problem."""
    [problem] = await problems(world, line("a") + line("b") + line("a", "other"))
    assert (problem["code"], problem["line"]) == ("duplicate_custom_id", 3)
    assert "line 1" in problem["message"]
    two = await problems(world, line("a") + line("a", model="nobody"))
    assert {problem["code"] for problem in two} == {"duplicate_custom_id", "model_not_found"}


async def test_c10_names_that_are_too_long(world: World) -> None:
    """Characters count, not bytes; the error is in the envelope."""
    [problem] = await problems(world, line("x" * 257))
    assert (problem["param"], problem["line"]) == ("custom_id", 1)
    assert (await send(world, line("😀" * 256))).status_code == 200
    answer = await send(world, line(), "x" * 507 + ".jsonl")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")
    assert (await send(world, line(), "x" * 506 + ".jsonl")).status_code == 200


@pytest.mark.parametrize("value", ["true", "1", '"yes"'])
async def test_c12_a_line_that_would_stream(world: World, value: str) -> None:
    """Refused by name and line; ``false`` and ``null`` are how some clients say nothing."""
    [problem] = await problems(world, line("b") + raw(stream=value))
    assert (problem["line"], problem["param"]) == (2, "body.stream")
    for harmless in ("false", "null"):
        assert (await send(world, raw(stream=harmless))).status_code == 200


@pytest.mark.parametrize(
    "url",
    ["/v1/embeddings", "/v1/images/generations", "https://api.openai.com/v1/chat/completions"],
)
async def test_c13_a_line_for_another_endpoint(world: World, url: str) -> None:
    """Refused with its line, whether the url is another endpoint or none."""
    wrong = line("b").replace(b"/v1/chat/completions", url.encode())
    found = await problems(world, line("a") + wrong)
    assert (found[0]["line"], found[0]["param"]) == (2, "url")


async def test_c14_too_much(open_world: Open) -> None:
    """400 for lines, 413 for bytes; at the documented limit, not below it, all is well."""
    two = line("a") + line("b")
    async with open_world(max_batch_requests=2, max_batch_file_bytes=len(two)) as world:
        assert (await send(world, two)).status_code == 200
        bytes_ = await send(world, two + b" ")
        assert (bytes_.status_code, bytes_.json()["error"]["code"]) == (413, "batch_file_too_large")
    async with open_world(max_batch_requests=2) as world:
        lines = await send(world, two + line("c"))
        assert lines.status_code == 400
        assert lines.json()["error"]["code"] == "batch_file_too_many_requests"
        long = await send(world, line("a", "x" * 11_000_000))
        assert long.status_code == 200


@pytest.mark.slow
def test_c17_an_upload_of_200_mb(tmp_path: Path) -> None:
    """Flat memory: it is neither held nor copied. Others are answered before it goes on."""
    size = 200_000_000
    line_ = line("a" * 100, "x" * 2000)
    asked = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
    meanwhile: list[int] = []

    def form() -> Iterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
        yield b'Content-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
        for n in range(size // len(line_)):
            yield line_.replace(b"a" * 100, b"%0100d" % n)
            if n % 10_000 == 0:
                url = f"{server.base_url}/v1/chat/completions"
                chat = httpx.post(url, json=asked, timeout=120)
                meanwhile.append(chat.status_code)
        yield b"\r\n--b--\r\n"

    with Server(max_batch_file_bytes=size, max_batch_requests=1_000_000) as server:
        # Once, so that what any upload loads is loaded.
        small = {"file": ("in.jsonl", line())}
        httpx.post(f"{server.base_url}/v1/files", data={"purpose": "batch"}, files=small)
        before = _peak(server.pid)
        answer = httpx.post(
            f"{server.base_url}/v1/files",
            content=form(),
            headers={"Content-Type": "multipart/form-data; boundary=b"},
            timeout=300,
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["bytes"] > size * 0.99
        assert set(meanwhile) == {200}
        assert _peak(server.pid) - before < 60_000_000


def _peak(pid: int) -> int:
    """The most memory that a process had, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    [kib] = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    return int(kib) * 1024


async def test_c18_results_go_to_disk_as_they_come(world: World, tmp_path: Path) -> None:
    """The incremental file has the rows of all lines that have ended while another still runs."""
    data = b"".join(line(str(n)) for n in range(50)) + line("last", "!wait c18")
    batch = await world.create(data)
    rows = 0
    while rows < 50:
        answer = await world.client.get(
            f"/v1/batches/{batch['id']}/results", params={"after": rows, "wait": 20}
        )
        rows = int(answer.headers["x-tidemill-next"]) if answer.content else rows
        held = await world.client.get(f"/v1/batches/{batch['id']}/results")
        rows = len(held.content.splitlines())
    storage = Path(world.services.settings.storage_path)
    written = (storage / "incremental" / f"{batch['id']}.jsonl").read_bytes()
    assert len(written.splitlines()) == 50
    world.engine.gate("c18").set()
    ended = await world.finished(batch["id"])
    content = await world.client.get(f"/v1/files/{ended['output_file_id']}/content")
    assert content.content.startswith(written)


async def test_c19_what_is_in_flight_is_bounded(open_world: Open) -> None:
    """Of many lines, only as many run as the pool has slots."""
    async with open_world(max_pool_size=3) as world:
        data = b"".join(line(str(n), f"!wait c19 {n}") for n in range(500))
        batch = await world.create(data)
        while world.engine.status().active < 3:
            await world.client.get(f"/v1/batches/{batch['id']}/results", params={"wait": 1})
        pool = (await world.client.get("/v1/pool/status")).json()
        assert (pool["scheduling_pool_active"], pool["scheduling_pool_free"]) == (3, 0)
        assert pool["intake_pool_size"] == 497
        assert world.engine.status().active == 3
        world.engine.gate("c19").set()
        ended = await world.finished(batch["id"])
        assert ended["request_counts"] == {"total": 500, "completed": 500, "failed": 0}


@pytest.mark.parametrize("name", ["notes.txt", "in.json", "in.csv", "in.jsonl.gz"])
async def test_c24_a_file_of_another_kind(world: World, name: str) -> None:
    """Refused here, with the field; a capital ending and none at all are fine."""
    answer = await send(world, line(), name)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")
    assert name in answer.json()["error"]["message"]
    for fine in ("IN.JSONL", "in"):
        assert (await send(world, line(), fine)).status_code == 200


async def test_c25_every_missing_key_is_named(world: World) -> None:
    """With its line, for all lines in one go."""
    found = await problems(world, line() + b'{}\n{"custom_id": "b", "method": "POST"}\n')
    assert [(problem["line"], problem["param"]) for problem in found] == [
        (2, "custom_id"),
        (2, "method"),
        (2, "url"),
        (2, "body"),
        (3, "url"),
        (3, "body"),
    ]
    assert {problem["code"] for problem in found} == {"missing_required_parameter"}


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("NaN", "NaN"),
        ("-Infinity", "Infinity"),
        ("1e999", "range"),
        ("1" * 5000, "range"),
        ('"\\ud83d"', "surrogate"),
        ("[" * 100_000, "nested"),
        ('{"a":' * 100_000, "nested"),
        ("01", "JSON"),
        ("'a'", "JSON"),
    ],
)
async def test_c26_values_that_are_no_json(world: World, value: str, word: str) -> None:
    """One clear problem with its line, never a 500."""
    [problem] = await problems(world, line("b") + raw(top_p=value))
    assert (problem["line"], problem["code"]) == (2, "invalid_json_line")
    assert word in problem["message"]


async def test_c26_the_last_of_two_equal_keys(world: World) -> None:
    """In the check as in the run: the model that was checked is the model that is run."""
    said = '[{"role": "user", "content": "one", "content": "two"}]'
    double = raw(model='"nobody", "model": "echo"', messages=said)
    [row] = await output(world, double.replace(b'"a"', b'"x", "custom_id": "a"', 1))
    assert row["custom_id"] == "a"
    assert row["response"]["body"]["model"] == "echo"
    assert row["response"]["body"]["choices"][0]["message"]["content"] == "two"
    async with world.for_newcomers() as other:
        [problem] = await problems(other, raw(model='"echo", "model": "nobody"'))
        assert problem["code"] == "model_not_found"
