"""What a request may use, told before it runs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.estimates import DEFAULT_OUTPUT, Demand, Tally, of_body, of_line
from tidemill.types import BatchParams, Usage

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("fields", "params", "output"),
    [
        ({}, None, DEFAULT_OUTPUT),
        ({"max_tokens": 7}, None, 7),
        ({"max_completion_tokens": 9, "max_tokens": 7}, None, 9),
        ({"max_output_tokens": 3}, BatchParams(max_decoding_length=5), 3),
        ({}, BatchParams(max_decoding_length=5), 5),
        ({"max_tokens": 7, "n": 3}, None, 21),
        ({"max_tokens": "many", "n": -1}, None, DEFAULT_OUTPUT),
        ({"max_tokens": True}, None, DEFAULT_OUTPUT),
        ({"max_tokens": 2**80}, None, DEFAULT_OUTPUT),
        ({"max_tokens": None}, None, DEFAULT_OUTPUT),
    ],
)
def test_output_is_what_the_request_allows(
    fields: dict[str, object], params: BatchParams | None, output: int
) -> None:
    """The request's own limit, then its batch's, then a default; once per choice."""
    body = json.dumps({"model": "m", **fields}).encode()
    assert of_body(body, CHAT, params) == (
        "m",
        Usage(input=-(-len(body) // 4), output=output),
    )


@pytest.mark.parametrize(
    ("prompt", "more", "output"),
    [
        ("one", {}, 7),
        ([1, 2, 3], {}, 7),
        (["one", "two"], {}, 14),
        ([[1, 2], [3], [4]], {"n": 2}, 42),
        (["one", "two"], {"n": 2, "best_of": 3}, 42),
        ([], {}, 7),
        ({"id": "p"}, {}, 7),
    ],
)
def test_each_prompt_of_a_completion_is_answered(
    prompt: object, more: dict[str, object], output: int
) -> None:
    """As often as it asks for; elsewhere a field of this name means something else."""
    body = json.dumps({"model": "m", "max_tokens": 7, "prompt": prompt, **more}).encode()
    assert of_body(body, "/v1/completions")[1].output == output
    one = of_body(json.dumps({"model": "m", "max_tokens": 7, "prompt": ["a", "b"]}).encode(), CHAT)
    assert one[1].output == 7


def test_output_that_nothing_else_limits_is_what_the_server_allows() -> None:
    """The request and its batch know better."""
    given = BatchParams(max_decoding_length=5)
    for body, params, output in (
        (b"{}", None, 40),
        (b"{}", given, 5),
        (b'{"max_tokens":7}', None, 7),
    ):
        assert of_body(body, CHAT, params, unsaid=40)[1].output == output
    tally = Tally(CHAT, unsaid=40)
    tally.feed(b'{"body":{"model":"m"}}')
    assert tally.finish()["m"].usage.output == 40


def test_embeddings_have_no_output() -> None:
    """Only their input counts."""
    assert of_body(b'{"model": "m", "max_tokens": 5}', "/v1/embeddings")[1].output == 0


@pytest.mark.parametrize(
    "line", [b"", b"{", b"[1]", b'{"body": "text"}', b"[" * 100_000, b'{"body": {"model": 3}}']
)
def test_what_cannot_be_read_has_no_model(line: bytes) -> None:
    """Whoever runs such a line says what is wrong with it."""
    assert of_line(line, CHAT)[0] == ""


@given(st.lists(st.sampled_from(["a", "b"]), max_size=20), st.integers(1, 50))
def test_a_tally_is_the_sum_of_its_lines(models: list[str], size: int) -> None:
    """However the bytes arrive, each line counts once, for its model."""
    lines = [
        json.dumps({"body": {"model": model, "max_tokens": n + 1}}).encode()
        for n, model in enumerate(models)
    ]
    data = b"\n".join(lines)
    tally = Tally(CHAT)
    for start in range(0, len(data), size):
        tally.feed(data[start : start + size])
    expected: dict[str, Demand] = {}
    for line in lines:
        model, usage = of_line(line, CHAT)
        known = expected.get(model, Demand())
        expected[model] = Demand(
            lines=known.lines + 1,
            usage=Usage(
                input=known.usage.input + usage.input, output=known.usage.output + usage.output
            ),
        )
    assert tally.finish() == expected
