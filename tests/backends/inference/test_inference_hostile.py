"""Hostile bodies: one clear 400 each, and never an exception."""

from __future__ import annotations

import json

import pytest

from tests.backends.inference.conftest import CHAT, EMBED, RESPONSES, TEXT, Ask
from tidemill.types import Answer, Refusal

pytestmark = pytest.mark.anyio

HEAD = b'{"model":"echo","messages":[{"role":"user","content":"hi"}],'
DEEP = 100_000

BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "invalid_json"),
    "spaces": (b"  ", "invalid_json"),
    "array": (b"[]", "invalid_type"),
    "string": (b'"x"', "invalid_type"),
    "null": (b"null", "invalid_type"),
    "number": (b"42", "invalid_type"),
    "cut": (HEAD, "invalid_json"),
    "trailing": (HEAD + b'"n":1} {}', "invalid_json"),
    "trailing comma": (HEAD + b'"n":1,}', "invalid_json"),
    "single quotes": (b"{'model':'echo'}", "invalid_json"),
    "bom": (b"\xef\xbb\xbf{}", "invalid_json"),
    "utf-16": ('{"model":"echo"}'.encode("utf-16"), "invalid_json"),
    "nan": (HEAD + b'"temperature":NaN}', "invalid_json"),
    "infinity": (HEAD + b'"temperature":Infinity}', "invalid_json"),
    "minus infinity": (HEAD + b'"temperature":-Infinity}', "invalid_json"),
    "1e999": (HEAD + b'"temperature":1e999}', "invalid_value"),
    "1e999 in a hint": (HEAD + b'"prediction":{"a":1e999}}', "invalid_value"),
    "huge integer": (HEAD + b'"max_tokens":' + b"9" * 4000 + b"}", "invalid_value"),
    "surrogate": (HEAD + b'"user":"\\ud83d"}', "invalid_json"),
    "surrogate inside": (HEAD + b'"user":"a\\ud83d b"}', "invalid_json"),
    "bad utf-8": (HEAD + b'"user":"\xff"}', "invalid_json"),
    "bad utf-8 key": (HEAD + b'"\xff":1}', "invalid_json"),
    "control character": (HEAD + b'"user":"a\x01"}', "invalid_json"),
    "deep array": (HEAD + b'"prediction":{"a":' + b"[" * DEEP, "invalid_json"),
    "deep object": (HEAD + b'"prediction":' + b'{"a":' * DEEP, "invalid_json"),
    "deep schema": (
        HEAD
        + b'"response_format":{"type":"json_schema","json_schema":{"name":"s","schema":'
        + b'{"items":' * DEEP
        + b"1"
        + b"}" * (DEEP + 3),
        "invalid_json",
    ),
    "deep unknown": (HEAD + b'"foo":' + b"[" * DEEP, "unknown_parameter"),
    "deep content": (
        b'{"model":"echo","messages":[{"role":"user","content":' + b"[" * DEEP,
        "invalid_type",
    ),
    "deep logit bias": (HEAD + b'"logit_bias":' + b'{"1":' * DEEP, "invalid_type"),
}


@pytest.mark.parametrize(("body", "code"), BAD.values(), ids=BAD)
async def test_a_hostile_body_is_a_clear_400(ask: Ask, body: bytes, code: str) -> None:
    """Every such body gets one 400 with a code and a short message without a traceback."""
    outcome = await ask(CHAT, body)
    assert isinstance(outcome, Refusal)
    assert (outcome.status_code, outcome.code) == (400, code)
    assert 10 < len(outcome.message) < 300
    assert "Traceback" not in outcome.message
    assert "jSON" not in outcome.message
    assert not outcome.retry


@pytest.mark.parametrize("endpoint", [CHAT, TEXT, EMBED, RESPONSES])
async def test_deep_nesting_is_refused_on_every_endpoint(ask: Ask, endpoint: str) -> None:
    """No endpoint lets a ``RecursionError`` out."""
    for field in (b"messages", b"prompt", b"input", b"metadata", b"text", b"tools"):
        outcome = await ask(endpoint, b'{"model":"echo","' + field + b'":' + b"[" * DEEP)
        assert isinstance(outcome, Refusal)
        assert outcome.status_code == 400


async def test_the_last_of_two_equal_keys_is_run(ask: Ask) -> None:
    """Both checks and runs keep the last: what was checked is what is run."""
    outcome = await ask(
        CHAT,
        b'{"model":"nope","messages":[{"role":"user","content":"a"}],'
        b'"messages":[{"role":"user","content":"b","content":"c"}],"model":"echo"}',
    )
    assert isinstance(outcome, Answer)
    assert json.loads(outcome.body)["choices"][0]["message"]["content"] == "c"
    outcome = await ask(CHAT, HEAD + b'"model":"nope"}')
    assert isinstance(outcome, Refusal)
    assert outcome.code == "model_not_found"


@pytest.mark.parametrize(
    "text", ["\x00", "\u2028", "\x85", "😀", "\ufeff", "a\r\nb", '"\\', " leading", "𝄞" * 1000]
)
async def test_odd_text_passes_unchanged(ask: Ask, text: str) -> None:
    """What is legal JSON text comes back as it was."""
    body = {"model": "echo", "messages": [{"role": "user", "content": text}]}
    for raw in (json.dumps(body).encode(), json.dumps(body, ensure_ascii=False).encode()):
        outcome = await ask(CHAT, raw)
        assert isinstance(outcome, Answer)
        assert json.loads(outcome.body)["choices"][0]["message"]["content"] == text


async def test_the_surrogate_is_named(ask: Ask) -> None:
    """The message says what is wrong with the text."""
    outcome = await ask(CHAT, HEAD + b'"user":"\\ud83d"}')
    assert isinstance(outcome, Refusal)
    assert "surrogate" in outcome.message
