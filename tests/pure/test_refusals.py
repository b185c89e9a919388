"""What providers' refusals mean."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tidemill.backends.refusals import (
    Failure,
    Meaning,
    meaning_of,
    meaning_of_problems,
    named_models,
    problems_of,
    read,
    unserved,
)
from tidemill.types import Problem

QUOTA = {"code": "token_limit_exceeded", "message": "full"}
MODEL = {"code": "model_not_found", "message": "none"}


@pytest.mark.parametrize(
    ("code", "message", "meaning"),
    [
        ("model_not_found", "", Meaning.MODEL),
        ("DeploymentNotFound", "The API deployment does not exist.", Meaning.MODEL),
        (None, "The model `gpt-5.6` is not supported by the Batch API.", Meaning.MODEL),
        (None, "Model gpt-5.6 doesn't support batch.", Meaning.MODEL),
        ("invalid_request", "This deployment is not available for batch jobs.", Meaning.MODEL),
        ("model_mismatch", "All lines must use one model.", Meaning.MIXED),
        ("token_limit_exceeded", "The model has no tokens left.", Meaning.QUOTA),
        (None, "Enqueued token limit reached for model gpt-4.1.", Meaning.QUOTA),
        ("429", "You exceeded your quota; model not available.", Meaning.QUOTA),
        ("invalid_json_line", "This line is not parseable as valid JSON.", None),
        (None, "Cannot find file file-1.", None),
        (None, "Unsupported parameter: 'foo'.", None),
    ],
)
def test_codes_come_before_words(code: str | None, message: str, meaning: Meaning | None) -> None:
    """A quota error never teaches, whatever else its text says about the model."""
    assert meaning_of(code, message) is meaning


@pytest.mark.parametrize(
    ("status", "error", "meaning"),
    [
        (400, {"code": "odd", "errors": [QUOTA], "message": "The model is not found."}, "quota"),
        (400, {"code": "model_not_found", "errors": [QUOTA], "message": ""}, "model"),
        (400, {"errors": {"data": [MODEL]}, "message": "Over quota."}, "model"),
        (400, {"message": "The model is not found."}, "model"),
        (429, {"code": "token_limit_exceeded", "message": ""}, "quota"),
        (429, {"code": "rate_limit_exceeded", "message": ""}, "transient"),
        (403, {"code": "model_not_permitted", "message": ""}, "model"),
        (403, {"message": "Forbidden."}, "credential"),
        (501, {"code": "model_not_available_for_batch", "message": ""}, "model"),
        (501, {"code": "batch_api_not_supported", "message": ""}, "unserved"),
        (501, {"message": "The model is not found."}, "transient"),
        (503, {"code": "model_not_found", "message": ""}, "transient"),
    ],
)
def test_an_answer_is_read_by_code_then_problems_then_words(
    status: int, error: dict[str, Any], meaning: str
) -> None:
    """Each only where those before say nothing. An answer of 5xx says nothing, but for a 501 with a
    code: another Tidemill gives both of its own so."""
    answer = httpx.Response(
        status, json={"error": error}, request=httpx.Request("POST", "http://x")
    )
    failure = read(openai.APIStatusError("", response=answer, body=error))
    assert failure.meaning == meaning
    assert failure.given == error


@pytest.mark.parametrize(
    ("status", "meaning", "found"),
    [
        (404, Meaning.GONE, Meaning.UNSERVED),
        (405, Meaning.REQUEST, Meaning.UNSERVED),
        (501, Meaning.TRANSIENT, Meaning.UNSERVED),
        (404, Meaning.MODEL, Meaning.MODEL),
        (400, Meaning.REQUEST, Meaning.REQUEST),
        (503, Meaning.TRANSIENT, Meaning.TRANSIENT),
    ],
)
def test_no_such_route_is_no_batch_api(status: int, meaning: Meaning, found: Meaning) -> None:
    """Where the call names no object; and it is certain that nothing was made."""
    failure = unserved(Failure(meaning=meaning, message="m", status=status))
    assert failure.meaning is found
    assert failure.certain is (status != 503)


def test_a_name_is_found_only_whole() -> None:
    """Word borders know the characters that models' names are made of."""
    models = ["gpt-4.1", "gpt-4.1-mini", "4.1", "org/gpt"]
    assert named_models(["The model 'gpt-4.1-mini' is bad."], models) == {"gpt-4.1-mini"}
    assert named_models(["No gpt-4.1. No more."], models) == {"gpt-4.1"}
    assert named_models(["gpt-4.1, org/gpt: no"], models) == {"gpt-4.1", "org/gpt"}
    assert named_models(["gpt-4.10"], models) == frozenset()


def test_problems_without_line_or_param_are_read() -> None:
    """Azure leaves both out, and sometimes the code or the message."""
    data = {"data": [{"code": "x", "message": "y"}, {"line": "7"}, "junk"]}
    assert problems_of(data) == (
        Problem(code="x", message="y"),
        Problem(code="batch_failed", message="The provider gave no reason."),
    )
    assert problems_of(None) == ()


def test_quota_wins_over_a_model_among_several_problems() -> None:
    """A batch that failed for both must not teach."""
    model = Problem(code="model_not_found", message="no such model")
    quota = Problem(code="token_limit_exceeded", message="full")
    assert meaning_of_problems([model, quota]) is Meaning.QUOTA
    assert meaning_of_problems([model]) is Meaning.MODEL
    assert meaning_of_problems([]) is None
