"""Whatever a model would rather say: an answer under a schema is JSON, and matches it."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidemill.backends.llama.grammar import Grammar, from_schema
from tidemill.backends.llama.model import Model
from tidemill.backends.llama.sampling import Chooser
from tidemill.types import Sampling

pytestmark = pytest.mark.llama

Schema = dict[str, Any]
MOST_TOKENS = 600
"""The schemas here are bounded: no answer to them is longer."""


def bounded_ints() -> st.SearchStrategy[Schema]:
    """An integer between two numbers."""
    return st.tuples(st.integers(-40, 40), st.integers(0, 300)).map(
        lambda at: {"type": "integer", "minimum": at[0], "maximum": at[0] + at[1]}
    )


def strings() -> st.SearchStrategy[Schema]:
    """A string of bounded length, or of a form."""
    lengths = st.tuples(st.integers(0, 3), st.integers(0, 5)).map(
        lambda n: {"type": "string", "minLength": n[0], "maxLength": n[0] + n[1]}
    )
    forms = st.sampled_from(
        [
            {"type": "string", "pattern": "^[a-c]{2,4}-\\d$"},
            {"type": "string", "pattern": "^(yes|no|größe)$"},
            {"type": "string", "pattern": "^v\\d\\.\\d$"},
            {"type": "string", "format": "date"},
        ]
    )
    return lengths | forms


leaves = (
    bounded_ints()
    | strings()
    | st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": {"a": [1, "é"]}}])
    | st.lists(
        st.sampled_from(["a", 'q"', "é漢🦀", 7, -1, None, True]), min_size=1, max_size=4
    ).map(lambda values: {"enum": values})
)


def within(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    """Arrays, objects and choices of schemas."""
    arrays = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
        lambda a: {"type": "array", "items": a[0], "minItems": a[1], "maxItems": a[1] + a[2]}
    )
    names = st.sampled_from(["a", "b c", 'd"e', "größe"])
    objects = st.dictionaries(names, inner, min_size=1, max_size=3).flatmap(
        lambda named: st.sets(st.sampled_from(sorted(named))).map(
            lambda required: {
                "type": "object",
                "properties": named,
                "required": sorted(required),
                "additionalProperties": False,
            }
        )
    )
    return arrays | objects | st.lists(inner, min_size=1, max_size=3).map(lambda c: {"anyOf": c})


schemas = st.recursive(leaves, within, max_leaves=5)


def matches(schema: Schema, value: Any) -> bool:
    """JSON Schema as far as these schemas go, written from the specification."""
    if "anyOf" in schema:
        return any(matches(one, value) for one in schema["anyOf"])
    if "const" in schema:
        return same(schema["const"], value)
    if "enum" in schema:
        return any(same(one, value) for one in schema["enum"])
    match schema["type"]:
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return type(value) is str and spelled(schema, value)
        case "boolean":
            return type(value) is bool
        case "null":
            return value is None
        case "array":
            return (
                type(value) is list
                and schema["minItems"] <= len(value) <= schema["maxItems"]
                and all(matches(schema["items"], one) for one in value)
            )
    named = schema["properties"]
    return (
        type(value) is dict
        and set(schema["required"]) <= value.keys() <= named.keys()
        and all(matches(named[name], one) for name, one in value.items())
    )


def same(one: Any, other: Any) -> bool:
    """Equal as JSON: true is not 1."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def spelled(schema: Schema, value: str) -> bool:
    """Length, pattern and format of a string."""
    if schema.get("format") == "date":
        year, month, day = value.split("-")
        assert len(year) == 4
        return 1 <= int(month) <= 12 and 1 <= int(day) <= 31
    if "pattern" in schema:
        return re.search(schema["pattern"], value) is not None
    return bool(schema["minLength"] <= len(value) <= schema["maxLength"])


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(schemas, st.integers(0, 2**32 - 1))
def test_a_model_that_talks_nonsense_still_answers_the_schema(
    model: Model, temperature: float, schema: Schema, seed: int
) -> None:
    """Its logits are dice, drawn hot or followed greedily: every token is held to the grammar, so
    what comes out is whole, is JSON, and matches."""
    gbnf = from_schema(schema, param="response_format")
    chooser = Chooser(
        model,
        Sampling(temperature=temperature, seed=seed),
        grammar=Grammar(model, gbnf, param="response_format"),
    )
    dice, said = np.random.default_rng(seed), b""
    for _ in range(MOST_TOKENS):
        token = chooser.choose(dice.standard_normal(model.n_vocab, dtype=np.float32) * 4)
        assert token is not None, said
        if model.is_end(token):
            break
        said += model.piece(token)
    else:
        raise AssertionError(f"no end: {said!r}")
    chooser.close()
    assert matches(schema, json.loads(said.decode("utf-8"))), said
