"""JSON schema to a grammar, and the grammar of one sequence while it generates."""

from __future__ import annotations

import ctypes
import json
import re
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as C
from llama_cpp.llama_grammar import json_schema_to_gbnf
from numpy.typing import NDArray

from tidemill.backends.llama.model import Model
from tidemill.backends.llama.schema import prepare
from tidemill.errors import RequestRefused

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""``llama_token_data``, as an array of it lies in memory."""

# JSON allows no raw control character in a string, the converter's own rules do.
_CHAR = (
    r'char ::= [^"\\\x00-\x1F\x7F] | "\\" (["\\/bfnrt] | '
    r'"u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F])'
)
_DOT = r'dot ::= [^"\\\x00-\x1F\x7F]'
_LARGEST = 512 * 1024


def from_schema(schema: dict[str, Any], *, begin: str = "", end: str = "", param: str) -> str:
    """A GBNF grammar for JSON that matches ``schema`` (``{}``: any object), between two literals.

    Raises ``RequestRefused`` naming ``param`` for a schema that is broken, fetches from elsewhere,
    or asks for what a grammar cannot enforce.
    """
    try:
        prepared, rules = prepare(schema)
        gbnf = json_schema_to_gbnf(json.dumps(prepared))
    except RecursionError as exc:
        raise _bad(param, "it is nested too deeply") from exc
    except (AssertionError, ValueError, LookupError, TypeError, AttributeError) as exc:
        raise _bad(param, str(exc).strip().split("\n")[0] or type(exc).__name__) from exc
    if len(gbnf) > _LARGEST:
        raise _bad(param, "its grammar is too large")
    if rules:
        spelled = {f'"\\"{constant}\\""': rule for constant, rule in rules.items()}
        anyone = "|".join(re.escape(constant) for constant in spelled)
        gbnf = re.sub(anyone, lambda found: f"({spelled[found[0]]})", gbnf)
    lines = []
    for line in gbnf.splitlines():
        if line.startswith("char ::="):
            line = _CHAR
        elif line.startswith("dot ::="):
            line = _DOT
        elif line.startswith("root ::=") and (begin or end):
            line = "answer" + line.removeprefix("root")
        lines.append(line)
    if begin or end:
        lines.append(f"root ::= {json.dumps(begin)} answer {json.dumps(end)}")
    return "\n".join(lines)


def _bad(param: str, reason: str) -> RequestRefused:
    return RequestRefused(
        f"The JSON schema cannot be used: {reason.rstrip('.')}.", param=param, code="invalid_schema"
    )


class Grammar:
    """A grammar and how far one sequence has come in it."""

    def __init__(self, model: Model, gbnf: str, *, param: str) -> None:
        """Raises ``RequestRefused`` when llama.cpp does not take the grammar."""
        self.sampler = C.llama_sampler_init_grammar(model.vocab, gbnf.encode(), b"root")
        if not self.sampler:
            raise _bad(param, "its grammar is too large or left-recursive")

    def allow(self, candidates: NDArray[np.void]) -> None:
        """Set the logit of every candidate that may not come next to minus infinity."""
        apply(self.sampler, candidates)

    def allows(self, token: int) -> bool:
        """Whether one token may come next."""
        one = np.array([(token, 0.0, 0.0)], dtype=CANDIDATE)
        self.allow(one)
        return bool(np.isfinite(one["logit"][0]))

    def accept(self, token: int) -> None:
        """Advance by a token that ``allows`` said yes to; any other aborts the process."""
        C.llama_sampler_accept(self.sampler, token)

    def close(self) -> None:
        """Free it."""
        C.llama_sampler_free(self.sampler)


def apply(sampler: Any, candidates: NDArray[np.void]) -> int:
    """Run a sampler over candidates in place; returns the index that it selected, or -1.

    Samplers may sort and shorten the array; the index is one into what is left at its front.
    """
    array = C.llama_token_data_array(
        data=ctypes.cast(candidates.ctypes.data, C.llama_token_data_p),
        size=len(candidates),
        selected=-1,
        sorted=False,
    )
    C.llama_sampler_apply(sampler, ctypes.byref(array))
    return int(array.selected)
