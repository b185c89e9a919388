"""The official Python SDK, unmodified, through every lifecycle of files and batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import anyio
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Batch, FileObject
from openai.types.chat import ChatCompletion

from tests.sdk.conftest import KEY, SURFACES
from tests.worlds.requests import chat, jsonl, rows, said
from tests.worlds.server import Server

pytestmark = pytest.mark.anyio

ENDED = ("completed", "failed", "expired", "cancelled")
MONTH_S, DAY_S = 2_592_000, 86_400


def upload(client: OpenAI, *texts: str, name: str = "in.jsonl") -> FileObject:
    """A file whose line ``n`` asks ``texts[n]`` under the id ``n``."""
    content = jsonl(chat(str(n), text) for n, text in enumerate(texts))
    return client.files.create(file=(name, content), purpose="batch")


def create(client: OpenAI, file: FileObject) -> Batch:
    """A chat batch."""
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )


def ended(client: OpenAI, batch: Batch, within_s: float = 120.0) -> Batch:
    """The batch once it has ended, checked at every look on the way."""
    deadline, before = time.monotonic() + within_s, batch
    while batch.status not in ENDED:
        assert time.monotonic() < deadline, f"{batch.id} is still {batch.status}"
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
        now, then = batch.request_counts, before.request_counts
        assert now is not None
        assert then is not None
        assert then.completed <= now.completed
        assert then.failed <= now.failed
        assert now.completed + now.failed <= now.total or now.total == 0
        before = batch
    return batch


def test_upload_create_poll_download(client: OpenAI) -> None:
    """The way of the documentation, over every surface, each object valid in the SDK's types."""
    file = upload(client, "hello", "größe 🌊", name="größe 1.jsonl")
    assert (file.object, file.purpose, file.status) == ("file", "batch", "processed")
    assert file.filename == "größe 1.jsonl"
    assert file.expires_at == file.created_at + MONTH_S
    assert client.files.retrieve(file.id) == file
    assert client.files.wait_for_processing(file.id, max_wait_seconds=0) == file
    content = client.files.content(file.id).content
    assert len(content) == file.bytes
    assert content == jsonl([chat("0", "hello"), chat("1", "größe 🌊")])

    batch = create(client, file)
    assert batch.status == "validating"
    assert batch.expires_at == batch.created_at + DAY_S
    assert batch.output_file_id is None
    batch = ended(client, batch)

    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 2, "completed": 2, "failed": 0}
    assert batch.in_progress_at is not None
    assert batch.finalizing_at is not None
    assert batch.completed_at is not None
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert times == sorted(times)
    assert (batch.failed_at, batch.expired_at, batch.cancelled_at) == (None, None, None)
    assert (batch.error_file_id, batch.errors) == (None, None)
    assert batch.model == "echo"
    assert batch.usage is not None
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens > 0

    assert batch.output_file_id is not None
    output = client.files.retrieve(batch.output_file_id)
    assert output.purpose == "batch_output"
    assert output.filename.endswith(".jsonl")
    answers = rows(client.files.content(output.id).content)
    assert {id: said(row) for id, row in answers.items()} == {"0": "hello", "1": "größe 🌊"}
    for row in answers.values():
        assert set(row) == {"id", "custom_id", "response", "error"}
        assert row["id"].startswith("batch_req_")
        assert (row["error"], row["response"]["status_code"]) == (None, 200)
        assert row["response"]["request_id"]
        completion = ChatCompletion.model_validate(row["response"]["body"])
        assert completion.choices[0].finish_reason == "stop"


async def test_the_asyncio_client_gets_there_too(aclient: AsyncOpenAI) -> None:
    """Upload, create, poll, download, awaited."""
    async with aclient as client:
        file = await client.files.create(
            file=("in.jsonl", jsonl([chat("a", "tide")])), purpose="batch"
        )
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        with anyio.fail_after(60):
            while batch.status not in ENDED:
                await anyio.sleep(0.02)
                batch = await client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        content = (await client.files.content(batch.output_file_id)).content
        assert said(rows(content)["a"]) == "tide"
        listed = [found.id async for found in client.batches.list(limit=1)]
        assert batch.id in listed


def test_lines_that_fail_are_in_the_error_file(plain: OpenAI) -> None:
    """With the status that the line got; the batch itself is completed."""
    batch = ended(plain, create(plain, upload(plain, "good", "!status 418")))
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 2, "completed": 1, "failed": 1}
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    assert set(rows(plain.files.content(batch.output_file_id).content)) == {"0"}
    assert plain.files.retrieve(batch.error_file_id).purpose == "batch_output"
    row = rows(plain.files.content(batch.error_file_id).content)["1"]
    assert (row["error"], row["response"]["status_code"]) == (None, 418)
    error = row["response"]["body"]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "status_418"


def test_when_every_line_fails_there_is_only_an_error_file(plain: OpenAI) -> None:
    """And the batch is completed all the same."""
    batch = ended(plain, create(plain, upload(plain, "!status 400", "!status 404")))
    assert (batch.status, batch.output_file_id) == ("completed", None)
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 2, "completed": 0, "failed": 2}
    assert batch.error_file_id is not None


def test_cancel_in_mid_run_keeps_what_is_done(plain: OpenAI) -> None:
    """Every line is in exactly one of the two files, and the counts say so."""
    batch = create(plain, upload(plain, "done", *(f"!sleep 2 {n}" for n in range(23))))
    while batch.request_counts is None or not batch.request_counts.completed:
        time.sleep(0.02)
        batch = plain.batches.retrieve(batch.id)
    cancelling = plain.batches.cancel(batch.id)
    assert cancelling.status == "cancelling"
    assert cancelling.cancelling_at is not None
    assert plain.batches.cancel(batch.id).status == "cancelling"

    batch = ended(plain, cancelling)
    assert batch.status == "cancelled"
    assert (batch.completed_at, batch.failed_at) == (None, None)
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    done = rows(plain.files.content(batch.output_file_id).content)
    unrun = rows(plain.files.content(batch.error_file_id).content)
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {
        "total": 24,
        "completed": len(done),
        "failed": len(unrun),
    }
    assert sorted(map(int, [*done, *unrun])) == list(range(24))
    assert {row["error"]["code"] for row in unrun.values()} == {"batch_cancelled"}
    assert {row["response"] for row in unrun.values()} == {None}


def test_a_batch_of_a_wrong_file_fails_with_every_problem(client: OpenAI) -> None:
    """Where the file is checked in the batch, as at OpenAI: nothing of it runs."""
    file = client.files.create(
        file=("in.jsonl", jsonl([chat("a", "fine")]) + b'[1]\n{"custom_id": "b"}\n'),
        purpose="batch",
        extra_headers={"X-Tidemill-Validation": "batch"},
    )
    batch = ended(client, create(client, file))
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.failed_at >= batch.created_at
    assert (batch.output_file_id, batch.error_file_id, batch.completed_at) == (None, None, None)
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(problem.line, problem.param) for problem in batch.errors.data] == [
        (2, None),
        (3, "method"),
        (3, "url"),
        (3, "body"),
    ]
    with pytest.raises(openai.ConflictError, match="failed"):
        client.batches.cancel(batch.id)


def test_a_batch_past_its_window_expires(tmp_path: Path) -> None:
    """By both clients: lines that did not start say so, what had started is kept."""
    texts = ["first", "!sleep 4 in flight at the end", *(f"late {n}" for n in range(8))]
    with Server(window_seconds=2, batch_local_concurrency=1) as server:
        clients = [SURFACES[name](server.base_url, KEY) for name in ("v1", "azure")]
        batches = [create(client, upload(client, *texts)) for client in clients]
        for client, batch in zip(clients, batches, strict=True):
            assert batch.expires_at == batch.created_at + 2
            batch = ended(client, batch)
            assert batch.status == "expired"
            assert batch.expired_at is not None
            assert batch.expires_at is not None
            assert batch.expired_at >= batch.expires_at
            assert (batch.completed_at, batch.failed_at, batch.cancelled_at) == (None, None, None)
            assert batch.error_file_id is not None
            unrun = rows(client.files.content(batch.error_file_id).content)
            assert {row["error"]["code"] for row in unrun.values()} == {"batch_expired"}
            assert {row["response"] for row in unrun.values()} == {None}
            done = {}
            if batch.output_file_id is not None:
                done = rows(client.files.content(batch.output_file_id).content)
            assert batch.request_counts is not None
            assert (batch.request_counts.completed, batch.request_counts.failed) == (
                len(done),
                len(unrun),
            )
            assert sorted(map(int, [*done, *unrun])) == list(range(10))
            client.close()


def test_a_batch_that_has_ended_cannot_be_cancelled(client: OpenAI) -> None:
    """409, said once: the SDK is told not to repeat it."""
    batch = ended(client, create(client, upload(client, "x")))
    with pytest.raises(openai.ConflictError, match="completed") as caught:
        client.batches.cancel(batch.id)
    assert caught.value.code == "batch_not_cancellable"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert client.batches.retrieve(batch.id) == batch


def test_paging_walks_every_batch_once_newest_first(other: OpenAI) -> None:
    """Also while batches arrive; the last page says that it is the last."""
    ids = [create(other, upload(other, f"page {n}")).id for n in range(7)]
    page = other.batches.list(limit=3)
    assert [batch.id for batch in page.data] == ids[:-4:-1]
    assert page.has_more
    late = create(other, upload(other, "late")).id
    walked = [batch.id for batch in page]
    assert walked == [*reversed(ids)]
    assert next(iter(other.batches.list(limit=1))).id == late
    assert other.batches.list(after=ids[0]).data == []
    assert other.batches.list(after=ids[0]).has_more is False


def test_paging_walks_every_file_once(other: OpenAI) -> None:
    """In both orders, filtered by purpose."""
    ids = [upload(other, f"file {n}").id for n in range(5)]
    batch = ended(other, create(other, other.files.retrieve(ids[0])))
    newest = [file.id for file in other.files.list(purpose="batch", limit=2)]
    oldest = [file.id for file in other.files.list(purpose="batch", limit=2, order="asc")]
    assert newest == oldest[::-1]
    assert [id for id in oldest if id in ids] == ids
    outputs = [file.id for file in other.files.list(purpose="batch_output")]
    assert batch.output_file_id in outputs
    assert not set(outputs) & set(newest)


def test_a_deleted_file_is_gone_everywhere(client: OpenAI) -> None:
    """Retrieve, content and a second delete answer 404, and it is not listed."""
    file = upload(client, "x")
    deleted = client.files.delete(file.id)
    assert deleted.to_dict() == {"id": file.id, "object": "file", "deleted": True}
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(file.id)
        assert caught.value.type == "invalid_request_error"
    assert file.id not in [listed.id for listed in client.files.list()]


def test_results_outlive_their_input(plain: OpenAI) -> None:
    """Deleting the input of an ended batch takes nothing else."""
    file = upload(plain, "keep me")
    batch = ended(plain, create(plain, file))
    plain.files.delete(file.id)
    assert batch.output_file_id is not None
    assert said(rows(plain.files.content(batch.output_file_id).content)["0"]) == "keep me"


def test_expiry_can_be_chosen(client: OpenAI) -> None:
    """Of the input at upload, of the results at create."""
    file = client.files.create(
        file=("in.jsonl", jsonl([chat("0", "x")])),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert file.expires_at == file.created_at + 3600
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        output_expires_after={"anchor": "created_at", "seconds": 7200},
    )
    batch = ended(client, batch)
    assert batch.output_file_id is not None
    output = client.files.retrieve(batch.output_file_id)
    assert output.expires_at == output.created_at + 7200


def test_metadata_comes_back(client: OpenAI) -> None:
    """From create, retrieve and list; limits count characters, not bytes."""
    metadata = {"k" * 64: "ü" * 512, **{str(n): "v" for n in range(15)}}
    batch = client.batches.create(
        input_file_id=upload(client, "x").id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata=metadata,
    )
    assert batch.metadata == metadata
    assert client.batches.retrieve(batch.id).metadata == metadata
    listed = next(found for found in client.batches.list() if found.id == batch.id)
    assert listed.metadata == metadata
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(
            input_file_id=batch.input_file_id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={**metadata, "one": "more"},
        )
    assert (caught.value.param or "").startswith("metadata")


Call = Callable[[OpenAI], object]


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.files.retrieve("file-none"),
        lambda c: c.files.content("file-none"),
        lambda c: c.files.delete("file-none"),
        lambda c: c.batches.retrieve("batch_none"),
        lambda c: c.batches.cancel("batch_none"),
    ],
)
def test_what_is_unknown_is_a_404_that_names_it(client: OpenAI, call: Call) -> None:
    """On every route that takes an id."""
    with pytest.raises(openai.NotFoundError, match=r"(file-|batch_)none") as caught:
        call(client)
    assert caught.value.request_id


def test_another_owner_s_objects_do_not_exist(plain: OpenAI, other: OpenAI) -> None:
    """Not for any verb, and not in a list."""
    file = upload(plain, "mine")
    batch = create(plain, file)
    calls: list[Call] = [
        lambda c: c.files.retrieve(file.id),
        lambda c: c.files.content(file.id),
        lambda c: c.files.delete(file.id),
        lambda c: c.batches.retrieve(batch.id),
        lambda c: c.batches.cancel(batch.id),
    ]
    for call in calls:
        with pytest.raises(openai.NotFoundError):
            call(other)
    assert file.id not in [listed.id for listed in other.files.list()]
    assert batch.id not in [listed.id for listed in other.batches.list()]


def test_a_wrong_key_is_an_authentication_error(client: OpenAI) -> None:
    """On every surface; the key is not given away in the message."""
    wrong = client.with_options(api_key="tm-wrong-key-12345678")
    wrong._api_key_provider = None  # the token surfaces ask their provider otherwise
    if isinstance(wrong, openai.AzureOpenAI):
        wrong._azure_ad_token_provider = None
    with pytest.raises(openai.AuthenticationError) as caught:
        wrong.files.list()
    assert caught.value.code == "invalid_api_key"
    assert "tm-wrong-key-12345678" not in str(caught.value)


def test_a_bad_file_is_refused_with_every_problem(plain: OpenAI) -> None:
    """At upload, with line numbers; nothing is kept."""
    content = b'{"custom_id": "a"}\nnot json\n' + jsonl([chat("b", "x", stream=True)])
    before = [file.id for file in plain.files.list()]
    with pytest.raises(openai.BadRequestError) as caught:
        plain.files.create(file=("in.jsonl", content), purpose="batch")
    assert caught.value.code == "invalid_batch_line"
    body = caught.value.body
    assert isinstance(body, dict)
    found = {(p["line"], p["code"]) for p in body["errors"]["data"]}
    assert {
        (1, "missing_required_parameter"),
        (2, "invalid_json_line"),
        (3, "streaming_unsupported"),
    } <= found
    assert [file.id for file in plain.files.list()] == before


def test_a_file_can_be_streamed_from_disk_and_back(plain: OpenAI, tmp_path: Path) -> None:
    """An upload by path, a download in pieces; every line once."""
    path = tmp_path / "many.jsonl"
    path.write_bytes(jsonl(chat(f"line {n}", f"text {n}") for n in range(2000)))
    batch = ended(plain, create(plain, plain.files.create(file=path, purpose="batch")))
    assert batch.output_file_id is not None
    with plain.files.with_streaming_response.content(batch.output_file_id) as response:
        content = b"".join(response.iter_bytes(1000))
    answers = rows(content)
    assert {id: said(row) for id, row in answers.items()} == {
        f"line {n}": f"text {n}" for n in range(2000)
    }


@pytest.mark.parametrize("surface", [name for name in SURFACES if not name.startswith("jobs")])
def test_models_and_chat_answer_on_every_surface(live: Server, surface: str) -> None:
    """The interactive side of the same server, streamed and not; below ``/jobs`` there is none."""
    with SURFACES[surface](live.base_url, KEY) as client:
        assert "echo" in [model.id for model in client.models.list()]
        asked = [{"role": "user", "content": "hello tide"}]
        answer = client.chat.completions.create(model="echo", messages=asked)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == "hello tide"
        pieces = client.chat.completions.create(model="echo", messages=asked, stream=True)  # type: ignore[call-overload]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces if chunk.choices)
        assert text == "hello tide"
