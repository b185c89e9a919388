"""JSON schemas as grammars: what they let through, what they hold back, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidemill.backends.llama.grammar import Grammar, from_schema
from tidemill.backends.llama.model import Model
from tidemill.errors import RequestRefused

pytestmark = pytest.mark.llama


def accepts(model: Model, schema: dict[str, Any], text: str) -> bool:
    """Whether a model could answer exactly this text."""
    grammar = Grammar(model, from_schema(schema, param="p"), param="p")
    try:
        for token in model.tokenize(text, special=False, parse=False):
            if not grammar.allows(token):
                return False
            grammar.accept(token)
        return grammar.allows(2)  # the end token of this model
    finally:
        grammar.close()


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": ["integer", "null"]}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({}, ['{"a": [1, {"b": null}]}', "{}"], ["[]", '"a"', "1"]),
        (PERSON, ['{"name": "A", "age": null}', '{"name": ""}'], ["{}", '{"name": "A", "x": 1}']),
        ({"type": "array", "items": PERSON}, ['[{"name": "A"}]', "[]"], ["[1]"]),
        ({"enum": ["a", 1, None]}, ['"a"', "1", "null"], ['"b"', "2"]),
        ({"const": {"a": 1}}, ['{"a": 1}'], ['{"a": 2}']),
        ({"enum": ['say "hi"', "C:\\bin", "a\nb", "é漢", "🦀"]},
         ['"say \\"hi\\""', '"C:\\\\bin"', '"a\\nb"', '"é漢"', '"🦀"'], ['"C:\\bin"', '"🐙"']),
        ({"const": {"🦀": ["\\"]}}, ['{"🦀": ["\\\\"]}'], ['{"🦀": ["\\b"]}']),
        ({"type": "object", "properties": {'a"b': {"type": "null"}, "🦀": {"type": "null"}},
          "required": ['a"b'], "additionalProperties": False},
         ['{"a\\"b": null}', '{"a\\"b": null, "🦀": null}'], ['{"🦀": null}', "{}"]),
        ({"enum": ["in place of rule 1", 'q"']}, ['"in place of rule 1"', '"q\\""'], ['""']),
        ({"type": "integer", "minimum": -2, "maximum": 12}, ["-2", "0", "12"], ["-3", "13", "1.5"]),
        ({"type": "integer", "exclusiveMinimum": 3, "maximum": 9, "multipleOf": 4}, ["4", "8"],
         ["3", "5", "0"]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": 4.5, "exclusiveMaximum": 7},
         ["5", "6"], ["3", "4", "7"]),
        ({"type": "integer", "exclusiveMinimum": 0}, ["1", "30"], ["0"]),
        ({"type": "integer", "minimum": 0}, ["0", "123456"], ["-1", "012", "1.0"]),
        ({"type": "integer", "minimum": 1}, ["1", "20"], ["0", "-1"]),
        ({"type": "number", "minimum": 0}, ["0", "0.5", "12.25"], ["-1", "01"]),
        ({"type": "number", "minimum": 0, "maximum": 1}, ["0", "0.25", "1"], ["1.5", "-0.5"]),
        ({"type": "string", "maxLength": 3}, ['""', '"abc"', '"é漢a"'], ['"abcd"']),
        ({"type": "string", "pattern": "^\\d{3}-[\\w.]+$"}, ['"123-a.b"'], ['"12-a"', '"123-"']),
        ({"type": "string", "pattern": "^.+$"}, ['"ab c"'], ['""', '"a"b"', '"a\\"']),
        ({"type": "string", "pattern": "^[^x]*$"}, ['"abc"'], ['"axb"', '"a"b"']),
        ({"type": "string", "pattern": '^[^"\\\\]+\\.[a-f-]$'}, ['"x.b"', '"y.-"'], ['"xb"']),
        ({"type": "string", "pattern": "^\\(\\d{1,3}\\.\\d\\)[\\]\\-]$"}, ['"(12.5)]"', '"(1.5)-"'],
         ['"12.5]"', '"(1x5)]"', '"(1.5)x"']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2024-13-01"', '"x"']),
        ({"type": "array", "minItems": 2, "maxItems": 2}, ['[1, "a"]'], ["[]", "[1]", "[1,2,3]"]),
        ({"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}]},
         ["[true, null]"], ["[true]", "[null, true]"]),
        ({"type": "object", "properties": {"any": {"description": "what you like"}},
          "required": ["any"]}, ['{"any": 1}', '{"any": [true]}'], ["{}"]),
        ({"type": ["object", "null"], "properties": {"a": {"type": "boolean"}},
          "required": ["a"]}, ["null", '{"a": true}'], ["{}", '{"a": 1}']),
        ({"$ref": "#/$defs/P", "$defs": {"P": PERSON}}, ['{"name": "A"}'], ["{}"]),
        ({"allOf": [{"$ref": "#/$defs/P"}], "$defs": {"P": PERSON}}, ['{"name": "A"}'], ["{}"]),
        ({"anyOf": [{"type": "null"}, {"type": "boolean"}], "title": "T"}, ["null", "true"], ["1"]),
    ],
)  # fmt: skip
def test_a_grammar_is_its_schema(
    model: Model, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    """Texts that match can be said to their end, those that do not cannot."""
    for text in good:
        json.loads(text)
        assert accepts(model, schema, text), text
    for text in bad:
        assert not accepts(model, schema, text), text


def test_a_tree_may_hold_trees(model: Model) -> None:
    """Definitions may refer to themselves."""
    tree = {
        "$ref": "#/$defs/Tree",
        "$defs": {
            "Tree": {
                "type": "object",
                "properties": {"leaves": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}},
                "required": ["leaves"],
            }
        },
    }
    assert accepts(model, tree, '{"leaves": [{"leaves": []}]}')
    assert not accepts(model, tree, '{"leaves": [1]}')


def test_definitions_with_like_names_are_told_apart(model: Model) -> None:
    """Also one that is called like a type, and one that is no definition at all."""
    schema = {
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/one/x"},
            "b": {"$ref": "#/$defs/two/x"},
            "c": {"$ref": "#/$defs/string"},
            "d": {"$ref": "#/properties/a"},
        },
        "required": ["a", "b", "c", "d"],
        "$defs": {
            "one": {"x": {"type": "boolean"}},
            "two": {"x": {"type": "null"}},
            "string": {"enum": [7]},
        },
    }
    assert accepts(model, schema, '{"a": true, "b": null, "c": 7, "d": false}')
    assert not accepts(model, schema, '{"a": true, "b": true, "c": 7, "d": false}')
    assert not accepts(model, schema, '{"a": true, "b": null, "c": "x", "d": false}')


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "https://example.org/s.json"}, "is not within the schema"),
        ({"type": "object", "properties": {"a": {"$ref": "file:///etc/passwd"}}}, "not within"),
        ({"$ref": "#/$defs/missing"}, "leads nowhere"),
        ({"type": "unicorn"}, "'unicorn' is not a type"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems' is not supported"),
        ({"type": "integer", "minimum": 7}, "bounds of type integer are not supported: minimum 7"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf 0.5"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "no whole number"),
        ({"type": "object", "required": ["a"]}, "'required' names 'a'"),
        ({"type": "string", "pattern": "x"}, "Pattern must start"),
        ({"type": "string", "pattern": "^a\\\\b$"}, "a quotation mark or a backslash"),
        ({"type": "string", "pattern": '^a"b$'}, "a quotation mark or a backslash"),
        ({"type": "string", "pattern": '^["a]$'}, "a quotation mark or a backslash"),
        ({"type": "string", "pattern": "^[ -~]+$"}, "the range  -~ of a pattern"),
        ({"type": "string", "pattern": "^[A-z]+$"}, "the range A-z of a pattern"),
        ({"type": "string", "pattern": "^\\D+\\n$"}, "'\\D' in a pattern is not supported"),
        ({"type": "string", "pattern": "^a{99999}$"}, "at most 1000 times"),
        ({"type": "string", "minLength": 10_000_000}, "minLength may be 0 to 1000"),
        ({"type": "string", "maxLength": "long"}, "maxLength may be"),
        ({"anyOf": [{"type": "null"}], "properties": {}}, "'properties' beside 'anyOf'"),
        ({"type": "object", "properties": {"a": 5}}, "5 is not a schema"),
        ({"type": "object", "properties": 5}, "cannot be used"),
        ({"enum": []}, "cannot be used"),
        ({"unheard": 1}, "'unheard' is not a keyword"),
        ({"$ref": "#"}, "left-recursive"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(
    model: Model, schema: dict[str, Any], reason: str
) -> None:
    """An answer that only nearly matches is worse than a clear refusal."""
    with pytest.raises(RequestRefused) as caught:
        Grammar(model, from_schema(schema, param="response_format"), param="response_format")
    assert reason in caught.value.message
    assert caught.value.param == "response_format"


def test_a_schema_without_end_is_refused() -> None:
    """A thousand levels are a mistake, not a reason to fall over."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(3000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(RequestRefused, match="nested too deeply"):
        from_schema(schema, param="response_format")
