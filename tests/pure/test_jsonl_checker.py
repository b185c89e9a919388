"""What the check of an input file accepts, and what it says about the rest."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.errors import InvalidFile, TooLarge
from tidemill.jsonl import Checker, Fed
from tidemill.types import FileFacts, NewLine, Problem

CHAT = "/v1/chat/completions"


def line(custom_id: Any = "a", **changes: Any) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    request = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **changes}
    return json.dumps({k: v for k, v in request.items() if v is not ...}).encode()


def body(**changes: Any) -> bytes:
    inner = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **changes}
    return line(body={k: v for k, v in inner.items() if v is not ...})


def checker(**options: Any) -> Checker:
    return Checker(**{"max_bytes": 10**8, "max_lines": 1000, "knows": None, **options})


def check(data: bytes, **options: Any) -> tuple[list[bytes], list[NewLine], FileFacts]:
    subject = checker(**options)
    fed = subject.feed(data)
    rest, facts = subject.finish()
    return fed.chunks + rest.chunks, fed.lines + rest.lines, facts


def problems(data: bytes, **options: Any) -> tuple[Problem, ...]:
    with pytest.raises(InvalidFile) as caught:
        check(data, **options)
    assert caught.value.code == "invalid_batch_line"
    assert caught.value.status == 400
    return caught.value.problems


def only(data: bytes, **options: Any) -> Problem:
    [problem] = problems(data, **options)
    return problem


def feed_in_pieces(subject: Checker, data: bytes, size: int) -> tuple[list[Fed], FileFacts]:
    fed = [subject.feed(data[at : at + size]) for at in range(0, len(data), size)]
    rest, facts = subject.finish()
    return [*fed, rest], facts


# --- what is accepted ---------------------------------------------------------------------------


def test_a_good_file() -> None:
    """A good file gives its lines with their place, and its facts."""
    data = b"\xef\xbb\xbf" + line("ä") + b"\r\n\n" + line("b")
    chunks, lines, facts = check(data, knows=lambda m: m == "m", permits=lambda m: True)
    assert b"".join(chunks) == data
    assert [(at.no, at.custom_id, at.model) for at in lines] == [(1, "ä", "m"), (3, "b", "m")]
    for at in lines:
        assert json.loads(data[at.offset : at.offset + at.length])["custom_id"] == at.custom_id
    assert facts == FileFacts(
        lines=2, models=("m",), endpoint=CHAT, max_line_bytes=lines[0].length, checked=True
    )


custom_ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=256)


@given(
    ids=st.lists(custom_ids, min_size=1, max_size=12, unique=True),
    end=st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\r\n \r\n"]),
    bom=st.booleans(),
    last=st.booleans(),
    size=st.integers(1, 400),
)
def test_any_chunking_gives_the_same(
    ids: list[str], end: bytes, bom: bool, last: bool, size: int
) -> None:
    """Statements 145, 148, 149, 151: custom_ids are kept as they are, in whatever pieces the file
    came, and the chunks are the upload byte for byte."""
    data = b"\xef\xbb\xbf" * bom + end.join(line(i) for i in ids) + end * last
    fed, facts = feed_in_pieces(checker(), data, size)
    chunks = [chunk for one in fed for chunk in one.chunks]
    lines = [at for one in fed for at in one.lines]
    assert b"".join(chunks) == data
    assert [at.custom_id for at in lines] == ids
    assert (lines, facts) == check(data)[1:]


@pytest.mark.parametrize("url", [CHAT, "/chat/completions"])
@pytest.mark.parametrize("endpoint", [None, CHAT])
def test_both_spellings_of_an_endpoint(url: str, endpoint: str | None) -> None:
    """Statement 227, D3: with and without ``/v1`` are equal, also inside one file."""
    facts = check(line("a", url=url) + b"\n" + line("b"), endpoint=endpoint)[2]
    assert facts.endpoint == CHAT


@pytest.mark.parametrize(
    ("url", "extra"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/embeddings", {"input": ["x", "y"]}),
        ("/v1/embeddings", {"input": [1, 2]}),
    ],
)
def test_every_endpoint(url: str, extra: dict[str, Any]) -> None:
    """D3: four endpoints, each with the one field that it cannot do without."""
    assert check(line(url=url, body={"model": "m", **extra}))[2].endpoint == url
    [name] = extra
    assert only(line(url=url, body={"model": "m"})).param == f"body.{name}"


def test_several_models() -> None:
    """D4: a file may name several models; they are listed in the order of their first line."""
    data = b"\n".join(
        line(str(n), body={"model": m, "messages": [{}]}) for n, m in enumerate("zaz")
    )
    assert check(data)[2].models == ("z", "a")


def test_the_last_of_two_equal_keys_counts() -> None:
    """C26: the model that is checked is the one that a parser of the line will see."""
    twice = line().replace(b'"model": "m"', b'"model": "other", "model": "m"')
    assert check(twice, knows=lambda m: m == "m")[1][0].model == json.loads(twice)["body"]["model"]


def test_without_the_check_only_lines_are_counted() -> None:
    """D1: with ``validation = "batch"`` anything is stored as it came, and the batch will tell."""
    data = b"nonsense\n\n\xff\xfe\n" + line("a") + b"\n" + line("a")
    chunks, lines, facts = check(data, check=False, max_lines=1)
    assert b"".join(chunks) == data
    assert lines == []
    assert facts == FileFacts(lines=4, max_line_bytes=len(line("a")), checked=False)


# --- what is refused ----------------------------------------------------------------------------


def test_json_error() -> None:
    """Statement 165: OpenAI's own words, the line's number, ``param`` null."""
    assert only(line() + b"\n{nope\n") == Problem(
        code="invalid_json_line",
        message="This line is not parseable as valid JSON.",
        line=2,
        param=None,
    )


@pytest.mark.parametrize("value", ["[1]", '"x"', "null", "42", "true"])
def test_json_that_is_no_object(value: str) -> None:
    """Statement 182, C03: an error with its line number."""
    problem = only(line() + b"\n" + value.encode())
    assert (problem.code, problem.line) == ("invalid_json_line", 2)
    assert "not a JSON object" in problem.message


def test_every_missing_key_is_named() -> None:
    """Statements 168 to 172, C25: four empty lines' worth of complaints in one answer."""
    found = problems(b"{}\n" + line(method=...) + b"\n" + line("b", url=None))
    assert [(p.line, p.param, p.code) for p in found] == [
        *[(1, name, "missing_required_parameter") for name in ("custom_id", "method", "url")],
        (1, "body", "missing_required_parameter"),
        (2, "method", "missing_required_parameter"),
        (3, "url", "missing_required_parameter"),
    ]
    assert found[0].message == "Missing required parameter: 'custom_id'."


@pytest.mark.parametrize(
    ("data", "param", "words"),
    [
        (line(7), "custom_id", "a string, not a number"),
        (line(""), "custom_id", "1 to 256 characters, not 0"),
        (line("x" * 257), "custom_id", "1 to 256 characters, not 257"),
        (line(method="GET"), "method", "'POST', not 'GET'"),
        (line(method=True), "method", "not a boolean"),
        (line(body="text"), "body", "an object, not a string"),
        (body(stream="yes"), "body.stream", "a boolean, not a string"),
        (body(model=...), "body.model", "Model parameter is required."),
        (body(model=""), "body.model", "Model parameter is required."),
        (body(model=3), "body.model", "a string, not a number"),
        (body(messages=...), "body.messages", "Missing required parameter"),
        (body(messages=[]), "body.messages", "at least one message"),
        (body(messages="hi"), "body.messages", "must be a list"),
    ],
)
def test_wrong_values(data: bytes, param: str, words: str) -> None:
    """Statements 174, 177, 178, 183, 184, C10: the field, the line, and what to send instead."""
    problem = only(data)
    assert (problem.code, problem.param, problem.line) == ("invalid_request", param, 1)
    assert words in problem.message


def test_streaming() -> None:
    """Statement 176, C12: ``stream: true`` is refused; false and null are no wish to stream."""
    problem = only(body(stream=True))
    assert (problem.code, problem.param) == ("streaming_unsupported", "body.stream")
    check(body(stream=False))
    check(body(stream=None))


def test_repeated_custom_ids() -> None:
    """Statement 173, C08: on the later line, both lines named, also where one of them is bad."""
    data = b"\n".join([line("a"), b"", line("b"), line("a"), line("b", method="GET"), line("a")])
    found = [p for p in problems(data) if p.code == "duplicate_custom_id"]
    assert [(p.line, p.param) for p in found] == [
        (4, "custom_id"),
        (5, "custom_id"),
        (6, "custom_id"),
    ]
    assert "line 4" in found[0].message
    assert "line 1" in found[0].message
    assert "line 3" in found[1].message


def test_a_url_that_no_batch_may_address() -> None:
    """D1: the error's code is the seed's, the item's code is section H's."""
    with pytest.raises(InvalidFile) as caught:
        check(line(url="/v1/images/generations"))
    assert caught.value.code == "unsupported_batch_endpoint"
    assert caught.value.problems[0].code == "invalid_url"
    assert CHAT in caught.value.message


def test_two_urls_in_one_file() -> None:
    """Statement 193: lines of two endpoints can be in no one batch."""
    data = line("a") + b"\n" + line("b", url="/v1/responses", body={"model": "m", "input": "x"})
    problem = only(data)
    assert (problem.code, problem.line, problem.param) == ("invalid_url", 2, "url")


def test_a_url_that_is_not_the_batch_s() -> None:
    """Statement 175, C13: with the endpoint known, OpenAI's words."""
    problem = only(line(), endpoint="/v1/embeddings")
    assert problem.code == "invalid_url"
    assert problem.message == "The URL provided for this request does not match the batch endpoint."


def test_an_unknown_model() -> None:
    """Statement 180, C39, D4: refused at once, with the model and the custom_id named."""
    problem = only(line("q-7"), knows=lambda m: False)
    assert (problem.code, problem.param) == ("model_not_found", "body.model")
    assert problem.message == "The model 'm' does not exist here (custom_id 'q-7')."


def test_a_model_that_the_key_may_not_use() -> None:
    """D1: 403, and the line."""
    with pytest.raises(InvalidFile) as caught:
        check(line(), permits=lambda m: False)
    assert (caught.value.status, caught.value.code) == (403, "model_not_permitted")
    assert caught.value.problems[0].line == 1


def test_several_things_wrong_with_one_line() -> None:
    """D1: every problem is reported, not the first of each line."""
    data = line(method="GET", url="/x", body={"model": 1, "stream": True})
    with pytest.raises(InvalidFile) as caught:
        check(data)
    assert [p.param for p in caught.value.problems] == [
        "method",
        "url",
        "body.stream",
        "body.model",
    ]


def test_at_most_a_hundred_problems() -> None:
    """D1: up to 100, the first as the error's own, and the message says how many more."""
    with pytest.raises(InvalidFile) as caught:
        check(b"{\n" * 500)
    assert [p.line for p in caught.value.problems] == list(range(1, 101))
    assert caught.value.message.startswith("Line 1: This line is not parseable")
    assert "99 more" in caught.value.message


@pytest.mark.parametrize("data", [b"", b"\n\n", b" \r\n\t", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_nothing_to_do(data: bytes) -> None:
    """Statements 71 and 185: a file without a request is refused."""
    with pytest.raises(InvalidFile) as caught:
        check(data)
    assert caught.value.code == "empty_batch_file"
    assert caught.value.problems[0] == Problem(
        code="empty_file", message="The file has no requests."
    )


def test_too_many_lines() -> None:
    """Statement 188, C14, D2: 400 past the limit; blank lines do not count."""
    data = b"\n\n".join(line(str(n)) for n in range(3))
    assert check(data, max_lines=3)[2].lines == 3
    with pytest.raises(InvalidFile) as caught:
        check(data, max_lines=2)
    assert caught.value.code == "batch_file_too_many_requests"
    assert caught.value.problems[0].code == "too_many_tasks"
    assert "2 requests" in caught.value.message


def test_too_many_bytes() -> None:
    """C14, D2: 413, at the first byte too many."""
    check(line(), max_bytes=len(line()))
    with pytest.raises(TooLarge):
        check(line(), max_bytes=len(line()) - 1)


def test_too_many_embedding_inputs() -> None:
    """Statement 191: 50,000 over all lines, array elements counted."""
    many = [
        line(str(n), url="/v1/embeddings", body={"model": "m", "input": ["x"] * 25_000})
        for n in range(3)
    ]
    check(b"\n".join(many[:2]))
    with pytest.raises(InvalidFile) as caught:
        check(b"\n".join(many))
    assert (caught.value.code, caught.value.problems[0].line) == (
        "batch_file_too_many_requests",
        3,
    )


# --- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bom", [True, False])
@pytest.mark.parametrize(
    ("codec", "name"),
    [("utf-16-le", "UTF-16"), ("utf-16-be", "UTF-16"), ("utf-32-le", "UTF-32"),
     ("utf-32-be", "UTF-32")],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_another_encoding_is_named(codec: str, name: str, bom: bool, size: int) -> None:
    """C01: a file saved as UTF-16 is told so, not "invalid JSON"."""
    data = (("\ufeff" if bom else "") + line().decode() + "\r\n").encode(codec)
    with pytest.raises(InvalidFile) as caught:
        feed_in_pieces(checker(), data, size)
    assert name in caught.value.message
    assert "UTF-8" in caught.value.message


@pytest.mark.parametrize("stray", [b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\xc0\x80", b"\xe2\x82"])
@pytest.mark.parametrize("where", [b"hi", b'"messages"', b'"custom_id"'])
def test_stray_bytes(stray: bytes, where: bytes) -> None:
    """Statement 186, C07: line number and byte offset, wherever in the line the bytes are."""
    bad = line("b").replace(where, where[:2] + stray + where[2:])
    data = line("a") + b"\r\n" + bad
    problem = only(data)
    at = len(line("a")) + 2 + bad.index(stray)
    assert problem.line == 2
    assert f"byte 0x{stray[0]:02X}" in problem.message
    assert f"offset {at} of the file" in problem.message


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"NaN", "NaN is not a JSON number"),
        (b"-Infinity", "-Infinity is not a JSON number"),
        (b"1e999", "a number is out of range"),
        (b"1" * 5000, "a number is out of range"),
        (rb'"\ud83d"', "half of a surrogate pair"),
        (rb'"\udc00"', "half of a surrogate pair"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'"\x00"', "valid JSON."),
        (b"01", "valid JSON."),
    ],
)
def test_hostile_values(value: bytes, words: str) -> None:
    """Statements 164, 189, 190, C26: refused with a reason, even where nothing reads the field."""
    data = line().replace(b'"hi"', value)
    problem = only(data)
    assert (problem.code, problem.line) == ("invalid_json_line", 1)
    assert words in problem.message


def test_an_escaped_pair_is_fine() -> None:
    """C26: both halves of a surrogate pair make one character."""
    assert check(line("\U0001f600"))[1][0].custom_id == "\U0001f600"


# --- cost ---------------------------------------------------------------------------------------


def test_a_bad_file_gives_no_more_chunks() -> None:
    """A file that will be refused is not stored any further."""
    subject = checker()
    subject.feed(b"{\n")
    assert subject.feed(line() + b"\n" + b" " * 200_000).chunks == []


def test_memory_does_not_grow_with_the_file() -> None:
    """C17: what the check keeps is a few bytes per line, not the file."""
    data = b"".join(line(f"request-{n}", note="x" * 500) + b"\n" for n in range(1000))
    subject = checker(max_lines=10**6)
    many = [data.replace(b"request-", b"r%d-" % n) for n in range(20)]
    tracemalloc.start()
    for piece in many:
        for at in range(0, len(piece), 65_536):
            subject.feed(piece[at : at + 65_536])
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert subject.finish()[1].lines == 20_000
    assert kept < 1_000_000
