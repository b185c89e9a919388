"""Wire ids: a prefix and 24 or more random characters, so that an id cannot be guessed."""

from __future__ import annotations

import secrets

_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def _random(n: int = 24) -> str:
    # 62 symbols from one token of bytes: 256 % 62 favours the first 8 symbols by 1.2 %, harmless at
    # 24 symbols.
    return "".join(_ALPHABET[b % 62] for b in secrets.token_bytes(n))


def file_id() -> str:
    return "file-" + _random()


def batch_id() -> str:
    return "batch_" + _random(32)


def row_id() -> str:
    """Id of a result row."""
    return "batch_req_" + _random()


def request_id() -> str:
    return "req_" + _random()


def chat_id() -> str:
    return "chatcmpl-" + _random()


def completion_id() -> str:
    return "cmpl-" + _random()


def response_id() -> str:
    return "resp_" + _random(32)


def message_id() -> str:
    return "msg_" + _random(32)


def reasoning_id() -> str:
    return "rs_" + _random(32)


def function_call_id() -> str:
    return "fc_" + _random(32)


def call_id() -> str:
    return "call_" + _random()


def account_id(kind: str) -> str:
    """Id of a team or user."""
    return f"{kind}_{_random(12)}"


def key_id() -> str:
    return "key_" + _random(12)


def key_secret() -> str:
    """A new API key: 40 random characters behind ``tm-``."""
    return "tm-" + _random(40)
