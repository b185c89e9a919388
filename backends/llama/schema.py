"""JSON Schema in the shape that the grammar converter keeps in full.

The converter reads a subset of JSON Schema and passes over the rest in silence; an answer would
then not match. ``prepare`` rewrites what can be said otherwise, and refuses the rest by name.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

Schema = dict[str, Any]

MOST_REPETITIONS = 1000
"""A grammar spells repetitions out; llama.cpp's own limit is twice this."""

_ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "example", "deprecated", "readOnly",
    "writeOnly", "$comment", "$schema", "$id", "$anchor", "discriminator", "strict", "name",
    "nullable", "contentMediaType", "contentEncoding", "$defs", "definitions",
})  # fmt: skip
_UNKEPT = frozenset({
    "uniqueItems", "not", "if", "then", "else", "patternProperties", "propertyNames",
    "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
    "contains", "minContains", "maxContains", "unevaluatedProperties", "unevaluatedItems",
    "additionalItems", "$dynamicRef",
})  # fmt: skip
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "integer": _BOUNDS,
    "number": _BOUNDS,
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
    "boolean": (),
    "null": (),
}
_ANY: Schema = {"anyOf": [{"type": kind} for kind in _OF_TYPE if kind != "integer"]}
_STANDS_IN = "in place of rule"
_DIGITS = "[0-9]{0,15}"
_WHOLE = f'("0" | [1-9] {_DIGITS})'
_FRACTION = '("." [0-9]{1,15})?'


def prepare(schema: Schema) -> tuple[Schema, dict[str, str]]:
    """The schema, and grammar expressions by the constant that stands in for each.

    Raises ``ValueError`` with the reason why a schema cannot be kept, and ``RecursionError`` for
    one that is nested too deeply.
    """
    if not _constrains(schema):
        return {"type": "object"}, {}
    rewriting = _Rewriting(schema)
    out = rewriting.node(schema)
    if not rewriting.definitions:
        return out, rewriting.rules
    # The converter does not look for definitions beside a reference.
    out = {"anyOf": [out]} if "$ref" in out else out
    return {**out, "$defs": rewriting.definitions}, rewriting.rules


def _constrains(schema: Schema) -> bool:
    return any(key not in _ANNOTATIONS for key in schema)


class _Rewriting:
    """One schema on its way, with the definitions that it refers to.

    Definitions get names of their own: the converter knows them by the last part of their path,
    which two may share, or share with one of its own rules.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._names: dict[str, str] = {}
        self.definitions: dict[str, Schema] = {}
        self.rules: dict[str, str] = {}

    def node(self, node: Any) -> Schema:
        """Any schema within the root."""
        if node is True or (isinstance(node, dict) and not _constrains(node)):
            return _ANY
        if not isinstance(node, dict):
            raise ValueError(f"{node!r} is not a schema")
        node = {key: value for key, value in node.items() if key not in _ANNOTATIONS}
        if unkept := sorted(_UNKEPT & node.keys()):
            raise ValueError(f"the keyword '{unkept[0]}' is not supported")
        if "$ref" in node:
            return self._reference(node["$ref"])
        if "const" in node:
            return {"const": self._value(node["const"])}
        if "enum" in node:
            return {"enum": [self._value(value) for value in node["enum"]]}
        for key in ("anyOf", "oneOf", "allOf"):
            if key in node:
                return self._combined(key, node)
        kind = node.get("type") or _kind(node)
        if isinstance(kind, list):
            return {"anyOf": [self._typed(one, node) for one in kind]}
        return self._typed(kind, node)

    def _reference(self, ref: Any) -> Schema:
        if not (isinstance(ref, str) and ref.startswith("#")):
            raise ValueError(f"$ref {ref!r} is not within the schema (#/...)")
        if ref not in self._names:
            self._names[ref] = f"definition-{len(self._names)}"
            self.definitions[self._names[ref]] = self.node(self._target(ref))
        return {"$ref": f"#/$defs/{self._names[ref]}"}

    def _target(self, ref: str) -> Any:
        found: Any = self._root
        for part in ref.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if not (isinstance(found, dict) and key in found):
                raise ValueError(f"$ref {ref!r} leads nowhere")
            found = found[key]
        return found

    def _combined(self, key: str, node: Schema) -> Schema:
        beside = sorted(node.keys() - {key, "type"})
        if beside:
            raise ValueError(f"'{beside[0]}' beside '{key}' is not supported")
        parts = [self.node(part) for part in node[key]]
        if len(parts) == 1:
            return parts[0]
        return {("allOf" if key == "allOf" else "anyOf"): parts}

    def _typed(self, kind: Any, node: Schema) -> Schema:
        if not isinstance(kind, str) or kind not in _OF_TYPE:
            raise ValueError(f"{kind!r} is not a type")
        own = {key: node[key] for key in _OF_TYPE[kind] if key in node}
        for key in ("minLength", "maxLength", "minItems", "maxItems"):
            if key in own and not (isinstance(own[key], int) and 0 <= own[key] <= MOST_REPETITIONS):
                raise ValueError(f"{key} may be 0 to {MOST_REPETITIONS}, not {own[key]!r}")
        if kind == "object":
            return self._object(own)
        if kind == "array":
            return self._array(own)
        if kind == "string" and "pattern" in own:
            if "minLength" in own or "maxLength" in own:
                raise ValueError("a length beside 'pattern' is not supported")
            return {"type": kind, "pattern": pattern(own["pattern"])}
        if any(key in own for key in _BOUNDS):
            return self._bounded(kind, own)
        return {"type": kind, **own}

    def _object(self, own: Schema) -> Schema:
        properties = own.get("properties", {})
        missing = [name for name in own.get("required", ()) if name not in properties]
        if missing:
            raise ValueError(f"'required' names {missing[0]!r}, which is not among the properties")
        out: Schema = {"type": "object", **own}
        if "properties" in own:
            names = {name: self._value(name) for name in properties}
            out["properties"] = {names[name]: self.node(properties[name]) for name in properties}
            out["required"] = [names[name] for name in own.get("required", ())]
        if isinstance(own.get("additionalProperties"), dict):
            out["additionalProperties"] = self.node(own["additionalProperties"])
        return out

    def _value(self, value: Any) -> Any:
        """A value or a name that the answer repeats. The converter escapes a text once where its
        grammar needs it twice, so that what has a backslash in JSON gets a stand-in."""
        spelled = json.dumps(value)
        if "\\" not in spelled and _STANDS_IN not in spelled:
            return value
        literal = json.dumps(value, ensure_ascii=False)
        escaped = literal.replace("\\", "\\\\").replace('"', '\\"')
        return self._stand_in(f'"{escaped}"')

    def _stand_in(self, rule: str) -> str:
        """A constant that the converter takes, for an expression that it would not make."""
        name = f"{_STANDS_IN} {len(self.rules)}"
        self.rules[name] = rule
        return name

    def _array(self, own: Schema) -> Schema:
        if "prefixItems" in own:
            if own.get("items"):
                raise ValueError("'items' beside 'prefixItems' is not supported")
            return {"type": "array", "items": [self.node(item) for item in own["prefixItems"]]}
        return {"type": "array", **own, "items": self.node(own.get("items", True))}

    def _bounded(self, kind: str, own: Schema) -> Schema:
        """Bounds that a grammar can hold: a short range of whole numbers, or from 0 (or 1) up, or
        fractions between 0 and 1."""
        low, high, over, under, step = (own.get(key) for key in _BOUNDS)
        rule = None
        if kind == "integer":
            if over is not None:
                low = max(math.floor(over) + 1, over if low is None else low)
            if under is not None:
                high = min(math.ceil(under) - 1, under if high is None else high)
            if low is not None and high is not None and high - low <= MOST_REPETITIONS:
                values = range(math.ceil(low), math.floor(high) + 1)
                if kept := [v for v in values if not step or v % step == 0]:
                    return {"enum": kept}
                raise ValueError("no whole number is within its bounds")
            if high is None and step is None and low in (0, 1):
                rule = _WHOLE if low == 0 else f"[1-9] {_DIGITS}"
        elif (over, under, step, low) == (None, None, None, 0):
            if high is None:
                rule = f"{_WHOLE} {_FRACTION}"
            elif high == 1:
                rule = f'("0" {_FRACTION} | "1" (".0")?)'
        if rule is None:
            named = ", ".join(f"{key} {own[key]}" for key in _BOUNDS if key in own)
            raise ValueError(f"these bounds of type {kind} are not supported: {named}")
        return {"const": self._stand_in(rule)}


def _kind(node: Schema) -> str:
    """The type of a schema that names none, from the keywords that it has."""
    for kind, keywords in _OF_TYPE.items():
        if any(key in node for key in keywords):
            return "number" if kind == "integer" else kind
    raise ValueError(f"{sorted(node)[0]!r} is not a keyword that can be kept")


_ESCAPED = ('"', "\\")
_CLASSES = {"d": "0-9", "w": "a-zA-Z0-9_", "s": " "}


def pattern(regex: Any) -> str:
    """A regular expression whose matches are JSON strings without escapes."""
    if not isinstance(regex, str):
        raise ValueError("a pattern is a string")
    for numbers in re.findall(r"\{([\d,\s]*)\}", regex):
        if any(int(n) > MOST_REPETITIONS for n in re.findall(r"\d+", numbers)):
            raise ValueError(f"a pattern may repeat at most {MOST_REPETITIONS} times")
    for first, last in re.findall(r"(?<!\\)([^\[\]\\])-([^\[\]\\])", regex):
        if any(first <= kept <= last for kept in _ESCAPED):
            raise ValueError(
                f"the range {first}-{last} of a pattern has a character that JSON escapes"
            )
    out, inside, at = [], "", 0
    while at < len(regex):
        two = regex[at : at + 2]
        if inside != "[^" and (two in ('\\"', "\\\\") or two[0] == '"'):
            raise ValueError("a quotation mark or a backslash in a pattern is not supported")
        if two[0] == "\\" and two[1:].isalnum() and two[1:] not in _CLASSES:
            raise ValueError(f"'{two}' in a pattern is not supported")
        if two[0] == "\\" and two[1:] in _CLASSES:
            out.append(_CLASSES[two[1]] if inside else f"[{_CLASSES[two[1]]}]")
            at += 2
        elif two == "[^" and not inside:
            # Neither a quotation mark nor a backslash nor a control character ends up in the text.
            out.append('[^"\\\\\\x00-\\x1F')
            inside, at = two, at + 2
        elif two[0] == "\\":
            sign = f"\\x{ord(two[1:]):02X}"
            out.append(sign if inside else f"[{sign}]")
            at += 2
        else:
            inside = (inside or "[") if two[0] == "[" else "" if two[0] == "]" else inside
            out.append(two[0])
            at += 1
    return "".join(out)
