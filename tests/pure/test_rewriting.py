"""Our lines in a provider's words, and its results in ours."""

from __future__ import annotations

import json

import pytest

from tidemill.backends.events import Events, broken
from tidemill.backends.rewriting import (
    Outbound,
    custom_id_and_outcome,
    done_at,
    in_our_name,
    renamed,
    usage_of,
)
from tidemill.backends.words import in_our_words
from tidemill.errors import ProviderUnavailable
from tidemill.types import Answer, Refusal, Usage

URL = "/v1/chat/completions"
LINE = (
    b'{"custom_id":"\xc3\xa4", "method":"POST","url":"/v1/chat/completions",'
    b'"body":{"seed":1e3 , "model":"ours","x":{"model":"ours"},"t":0.10}}'
)


def test_a_line_whose_words_are_the_same_passes_untouched() -> None:
    """Not one byte of it is written anew."""
    same = Outbound({"ours": "ours"}, url=URL)
    assert same.line(LINE) is LINE


@pytest.mark.parametrize("theirs", ["ours", "theirs"])
def test_every_line_has_the_surfaces_url(theirs: str) -> None:
    """However its own was spelled; nothing else of it changes for that."""
    outbound = Outbound({"ours": theirs}, url=URL)
    for spelling in (b"/chat/completions", rb"\/v1\/chat\/completions"):
        got = outbound.line(LINE.replace(b"/v1/chat/completions", spelling))
        expected = json.loads(LINE)
        expected["body"]["model"] = theirs
        assert json.loads(got) == expected


def test_only_the_model_the_url_and_missing_fields_change() -> None:
    """Every other value keeps its own bytes, however odd."""
    outbound = Outbound(
        {"ours": "theirs"}, url="/chat/completions", defaults={"t": 0.5, "max_tokens": 3}
    )
    line = outbound.line(LINE)
    assert b'"seed":1e3' in line
    assert b'"t":0.10' in line
    assert b'"x":{"model":"ours"}' in line
    got = json.loads(line)
    assert (got["custom_id"], got["url"]) == ("ä", "/chat/completions")
    assert (got["body"]["model"], got["body"]["max_tokens"]) == ("theirs", 3)


def test_of_two_equal_keys_the_last_is_the_one_that_was_checked() -> None:
    """So it is the one that is sent."""
    line = LINE.replace(b'"model":"ours",', b'"model":"other","model":"ours",')
    assert json.loads(Outbound({"ours": "theirs"}, url=URL).line(line))["body"]["model"] == "theirs"


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (
            {
                "prompt_tokens": 5,
                "completion_tokens": 7,
                "prompt_tokens_details": {"cached_tokens": 2},
                "completion_tokens_details": {"reasoning_tokens": 3},
            },
            Usage(input=5, cached=2, output=7, reasoning=3),
        ),
        (
            {
                "input_tokens": 5,
                "output_tokens": 7,
                "input_tokens_details": {"cached_tokens": 2},
                "output_tokens_details": {"reasoning_tokens": 3},
            },
            Usage(input=5, cached=2, output=7, reasoning=3),
        ),
        ({"prompt_tokens": 5, "total_tokens": 5}, Usage(input=5)),
        ({"prompt_tokens": None, "completion_tokens": -4, "input_tokens": True}, Usage()),
        ({"prompt_tokens_details": None}, Usage()),
        (None, Usage()),
    ],
)
def test_usage_is_read_in_every_shape(usage: object, expected: Usage) -> None:
    """Odd values count as nothing, and never fail a settlement."""
    assert usage_of(json.dumps({"usage": usage}).encode()) == expected
    assert usage_of(b"not json") == Usage()


def test_a_row_is_an_answer_a_refusal_or_a_line_that_never_ran() -> None:
    """Status and body of a refusal survive."""
    ok = b'{"custom_id":"a","response":{"status_code":200,"request_id":"r","body":{"n":1}}}'
    assert custom_id_and_outcome(ok) == (
        "a",
        Answer(body=b'{"n":1}', request_id="r"),
    )
    bad = b'{"custom_id":"b","response":{"status_code":429,"body":{"e":1}},"error":null}'
    _, refused = custom_id_and_outcome(bad)
    assert isinstance(refused, Refusal)
    assert (refused.status_code, refused.body) == (429, b'{"e":1}')
    unrun = b'{"custom_id":"c","response":null,"error":{"code":"batch_expired","message":"late"}}'
    _, never = custom_id_and_outcome(unrun)
    assert isinstance(never, Refusal)
    assert (never.status_code, never.code, never.message) == (None, "batch_expired", "late")


def test_names_in_results_are_ours() -> None:
    """In bodies by their field, in messages by whole words; other words stay."""
    answer = in_our_name(Answer(body=b'{"model":"dep-2026","x":1.50}'), "gpt", "dep")
    assert isinstance(answer, Answer)
    assert answer.body == b'{"model":"gpt","x":1.50}'
    untouched = Answer(body=b'{"model": "gpt-2026"}')
    assert in_our_name(untouched, "gpt", "gpt") is untouched
    assert in_our_words("dep, dep-mini and 'dep'", {"gpt": "dep"}) == "gpt, dep-mini and 'gpt'"
    assert in_our_words("dep-4.1 of dep-4", {"a": "dep-4", "b": "dep-4.1"}) == "b of a"
    assert in_our_words("one, two", {"two": "one", "three": "two"}) == "two, three"
    assert in_our_words("dep", {"gpt": "dep", "dep": "dep"}) == "dep"
    said = {"code": "dep", "message": "no dep", "more": [{"x": "dep", "n": 1}]}
    heard = {"code": "dep", "message": "no gpt", "more": [{"x": "gpt", "n": 1}]}
    assert in_our_words(said, {"gpt": "dep"}) == heard
    assert renamed(b'{"n":1}', "gpt") == b'{"n":1}'
    refusal = Refusal(code="x", message="no dep", status_code=400, body=b'{"m":["no dep"]}')
    got = in_our_name(refusal, "gpt", "dep")
    assert isinstance(got, Refusal)
    assert (got.message, got.body) == ("no gpt", b'{"m":["no gpt"]}')


def test_work_is_dated_when_it_was_done() -> None:
    """A date that cannot be is not believed."""
    assert done_at(b'{"created": 50}', 10, 90) == 50
    assert done_at(b'{"created_at": 60}', 10, 90) == 60
    assert done_at(b'{"created": 5}', 10, 90) == 90
    assert done_at(b'{"created": "x"}', 10, 90) == 90


def test_a_responses_stream_is_renamed_inside_its_response() -> None:
    """Names of events stay, pieces may be cut anywhere, usage is read from the last event, which is
    known to be the last."""
    created = b'event: response.created\ndata: {"response":{"model":"dep","n":1.0}}\n\n'
    done = (
        b'data: {"response":{"model":"dep","usage":{"input_tokens":4,"output_tokens":2}}}\r\n\r\n'
    )
    events = Events("gpt", wants_usage=True)
    passed = [event for byte in created for event in events.feed(bytes([byte]))]
    assert not events.ended
    passed += [event for byte in done for event in events.feed(bytes([byte]))]
    assert events.ended
    assert passed[0] == b'event: response.created\ndata: {"response":{"model":"gpt","n":1.0}}\n\n'
    assert b'"model":"gpt"' in passed[1]
    assert events.usage == Usage(input=4, output=2)
    assert events.passed


def test_a_stream_that_broke_ends_in_an_event_of_its_api() -> None:
    """Chat and completions say ``error``; responses have an event type for it."""
    error = ProviderUnavailable("It broke.")
    chat = broken(error, "/v1/chat/completions", 3)
    assert json.loads(chat.removeprefix(b"data: "))["error"]["message"] == "It broke."
    head, _, data = broken(error, "/v1/responses", 3).partition(b"\n")
    assert head == b"event: error"
    event = json.loads(data.removeprefix(b"data: "))
    assert (event["type"], event["message"], event["sequence_number"]) == ("error", "It broke.", 3)
