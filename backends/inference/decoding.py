"""Bytes to a typed body, or one refusal that names the field. Codes are those of OpenAI's API."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from tidemill.errors import RequestRefused

T = TypeVar("T")

_PLACE = re.compile(r"^(?P<what>.*?) - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`$", re.DOTALL)
_PART = re.compile(r"^(?P<part>.*content\[\d+\])\.\w+$")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_JSON_NAMES = {
    "int": "integer",
    "float": "number",
    "str": "string",
    "bool": "boolean",
}

_STATELESS = "Responses are not stored here; send the whole conversation in 'input'."
_HINTS = {
    "function_call": "Use 'tool_choice'.",
    "functions": "Use 'tools'.",
    "modalities": "Only 'text' is produced here.",
    "best_of": "Only 1 is possible; use 'n' for several choices.",
    "suffix": "Text cannot be inserted before a suffix here.",
    "background": "Use a batch for work that nobody waits for.",
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
}


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The decoded body. Raises ``RequestRefused`` with code, message and param of the first thing
    wrong."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as exc:
        raise _explain(str(exc)) from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        hint = (
            "; an unpaired surrogate escape such as \\ud83d is not text"
            if _SURROGATE.search(body)
            else ""
        )
        raise RequestRefused(
            f"The body is not valid JSON: {_lower(str(exc))}{hint}.", code="invalid_json"
        ) from exc
    except RecursionError as exc:
        raise RequestRefused("The body is nested too deeply.", code="invalid_json") from exc


def missing(param: str) -> RequestRefused:
    """A required parameter is absent or null."""
    return RequestRefused(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )


def invalid(param: str, why: str) -> RequestRefused:
    """A value that has the right type and still cannot be."""
    return RequestRefused(f"Invalid value for '{param}': {why}", param=param, code="invalid_value")


def unsupported(param: str, why: str = "") -> RequestRefused:
    """A documented parameter that this server or this model cannot honour."""
    message = f"The parameter '{param}' is not supported here."
    return RequestRefused(f"{message} {why}".rstrip(), param=param, code="unsupported_parameter")


def _explain(text: str) -> RequestRefused:
    """Turn msgspec's sentence into ours; the wording of msgspec 0.19 to 0.23 is known here only."""
    match = _PLACE.match(text)
    what, path = (match["what"], match["path"]) if match else (text, "")
    param = path.removesuffix("[...]")
    top = re.split(r"[.\[]", param, maxsplit=1)[0]
    name = what.split("`")[1] if what.count("`") >= 2 else ""
    part = _PART.match(param)
    if part and what.startswith(("Invalid enum value", "Expected `null`")):
        where = part["part"]
        return RequestRefused(
            f"Content parts of this kind are not supported at '{where}': "
            "the models here read text only.",
            param=where,
            code="unsupported_value",
        )
    if what.startswith("Object contains unknown field"):
        if not param:
            return RequestRefused(
                f"Unrecognized request argument supplied: {name}",
                param=name,
                code="unknown_parameter",
            )
        where = f"{param}.{name}"
        return RequestRefused(
            f"Unknown parameter: '{where}'.", param=where, code="unknown_parameter"
        )
    if what.startswith("Object missing required field"):
        return missing(f"{param}.{name}" if param else name)
    if what.startswith("Expected `null`, got"):
        return unsupported(param, _HINTS.get(top, ""))
    if not param:
        return RequestRefused(
            f"The body must be a JSON object: {_lower(what)}.", code="invalid_type"
        )
    hint = _HINTS.get(top, "")
    if what.startswith("Invalid enum value"):
        return RequestRefused(
            f"Invalid value for '{param}': {what.removeprefix('Invalid enum value ')} is not "
            f"possible here. {hint}".rstrip(),
            param=param,
            code="unsupported_value" if hint else "invalid_value",
        )
    if match is not None and match["key"]:
        return invalid(param, "its keys must be token ids (integers, 0 or more).")
    if ", got " in what:
        return RequestRefused(
            f"Invalid type for '{param}': {_json(_lower(what))}. {hint}".rstrip(),
            param=param,
            code="invalid_type",
        )
    return invalid(param, f"{_json(_lower(what))}.")


def _lower(text: str) -> str:
    return text if text[:2].isupper() else text[:1].lower() + text[1:]


def _json(text: str) -> str:
    """Type names as JSON has them, without quotes."""

    def rename(match: re.Match[str]) -> str:
        return " or ".join(_JSON_NAMES.get(n, n) for n in match[1].split(" | "))

    return re.sub(r"`([^`]*)`", rename, text)


def decoder(type_: type[T]) -> msgspec.json.Decoder[T]:
    """A strict decoder, made once per body type."""
    return msgspec.json.Decoder(type_)
