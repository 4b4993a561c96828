"""200 structures of graded difficulty, and whether an answer has one: by jsonschema and `re`, which share nothing with what made the answer.

The shapes are those of JSON Schema's keywords, alone and together. All are finite or nearly so: a small model at temperature 1 comes to an end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema

Structure = dict[str, Any]

SHORT = {"type": "string", "maxLength": 6}
SMALL = {"type": "integer", "minimum": 0, "maximum": 99}


def fits(structure: Structure, text: str) -> bool:
    """All of the text is what the structure says."""
    if "choice" in structure:
        return text in structure["choice"]
    if "regex" in structure:
        return re.fullmatch(structure["regex"], text) is not None
    if "grammar" in structure:
        return re.fullmatch(structure["matches"], text) is not None
    try:
        jsonschema.Draft202012Validator(structure["json"]).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def structures() -> list[Structure]:
    found = [*_scalars(), *_arrays(), *_objects(), *_combined(), *_nested(), *_mixed(), *_regexes(), *_choices(), *_grammars()]
    assert len(found) >= 200, len(found)
    return found


def _schema(schema: Any) -> Structure:
    return {"json": schema, "disable_any_whitespace": True}


def _closed(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    listed = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": listed, "additionalProperties": False, **more}


def _scalars() -> Iterator[Structure]:
    for schema in (
        {"type": "null"},
        {"type": "boolean"},
        {"const": 7},
        {"const": 'a "b" \\ c'},
        {"const": [1, {"a": None}]},
        {"enum": [1, "1", None, True, [], {}]},
    ):
        yield _schema(schema)
    for low, high in ((0, 0), (0, 9), (-9, 9), (10, 99), (-1000, 1000), (7, 13), (999, 1001), (-3, -1)):
        yield _schema({"type": "integer", "minimum": low, "maximum": high})
    for low, high in ((0, 10), (-5, 5), (95, 105)):
        yield _schema({"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high})
    for of, low, high in ((5, 0, 100), (7, 0, 50), (10, -50, 50)):
        yield _schema({"type": "integer", "multipleOf": of, "minimum": low, "maximum": high})
    for low, high in ((0, 1), (2, 2), (3, 5), (0, 12), (1, 8)):
        yield _schema({"type": "string", "minLength": low, "maxLength": high})
    for pattern in ("^[a-c]{2,4}$", "^(foo|bar)[0-9]{2}$", "^[A-Z][a-z]{1,5}$", "^[0-9]{3}-[0-9]{4}$", "^(ab){1,3}c?$", "^[^a-z]{1,3}$"):
        yield _schema({"type": "string", "pattern": pattern})
    for form in ("date", "time", "ipv4", "uuid"):
        yield _schema({"type": "string", "format": form})
    for kinds in (["null", "boolean"], ["integer", "null"], ["string", "boolean"]):
        yield _schema({"type": kinds, "maxLength": 5, "minimum": 0, "maximum": 99})
    for words in (["red", "green"], ["", "a", "ab", "abc"], ["é", "日本", "🙂"], [f"item {i}" for i in range(40)], [0.5, 1.25, -3.75]):
        yield _schema({"enum": words})


def _arrays() -> Iterator[Structure]:
    for low, high in ((0, 0), (0, 2), (1, 1), (2, 4), (3, 3), (5, 8)):
        yield _schema({"type": "array", "items": SMALL, "minItems": low, "maxItems": high})
    for items in (SHORT, {"type": "boolean"}, {"enum": ["x", "y"]}, {"type": "null"}, {"const": 0}):
        yield _schema({"type": "array", "items": items, "minItems": 1, "maxItems": 3})
    for prefix in ([SMALL, SHORT], [{"type": "boolean"}] * 3, [{"const": 1}, {"const": "two"}, {"type": "null"}]):
        yield _schema({"type": "array", "prefixItems": prefix, "items": False, "minItems": len(prefix)})
    for depth in range(1, 5):
        schema: dict[str, Any] = SMALL
        for _ in range(depth):
            schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 2}
        yield _schema(schema)


def _objects() -> Iterator[Structure]:
    for count in (0, 1, 2, 3, 5, 8, 12):
        yield _schema(_closed({f"key{i}": {"type": "boolean"} for i in range(count)}))
    for count in range(1, 6):
        yield _schema(_closed({f"k{i}": SMALL for i in range(count)}, required=[]))
    for name in ("with space", 'quote"d', "back\\slash", "é", "日本", "a.b", "$ref ", "0"):
        yield _schema(_closed({name: SMALL}))
    for value in (SMALL, SHORT, {"type": "null"}, {"enum": ["on", "off"]}, {"type": "array", "items": SMALL, "maxItems": 2}):
        yield _schema(_closed({"first": value, "second": value}))
    for extra in ({"type": "boolean"}, SMALL):
        yield _schema({"type": "object", "properties": {"a": SMALL}, "required": ["a"], "additionalProperties": extra, "maxProperties": 2})
    for optional in (["b"], ["a", "c"], ["b", "c"]):
        properties = {"a": SMALL, "b": SHORT, "c": {"type": "boolean"}}
        yield _schema(_closed(properties, required=[name for name in properties if name not in optional]))


def _combined() -> Iterator[Structure]:
    alternatives = [SMALL, SHORT, {"type": "boolean"}, {"type": "null"}, _closed({"a": SMALL}), {"type": "array", "items": SMALL, "maxItems": 2}]
    for i, one in enumerate(alternatives):
        for other in alternatives[i + 1 :]:
            yield _schema({"anyOf": [one, other]})
    yield _schema({"oneOf": [{"type": "integer", "minimum": 0, "maximum": 5}, {"type": "string", "maxLength": 3}]})
    yield _schema({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]})
    yield _schema({"allOf": [_closed({"a": SMALL}), {"required": ["a"]}]})
    for reference in (SMALL, SHORT, _closed({"x": SMALL})):
        yield _schema({"$defs": {"it": reference}, **_closed({"one": {"$ref": "#/$defs/it"}, "two": {"$ref": "#/$defs/it"}})})
    yield _schema({"$defs": {"tag": {"enum": ["a", "b"]}}, "type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 3})


def _mixed() -> Iterator[Structure]:
    """Objects of three fields, each of another kind, one of them optional or null."""
    kinds: list[dict[str, Any]] = [
        SMALL,
        SHORT,
        {"type": "boolean"},
        {"enum": ["low", "high", None]},
        {"type": "array", "items": SHORT, "minItems": 1, "maxItems": 2},
        {"type": "string", "pattern": "^[a-z]{3}$"},
        {"anyOf": [SMALL, {"type": "null"}]},
    ]
    for i, first in enumerate(kinds):
        for j, second in enumerate(kinds[i + 1 :], i + 1):
            third = kinds[(i + j) % len(kinds)]
            required = ["first", "second", "third"][: 2 + (i + j) % 2]
            yield _schema(_closed({"first": first, "second": second, "third": third}, required=required))
    for count in range(2, 12):
        digits = {"type": "string", "pattern": f"^[0-9]{{{count}}}$"}
        yield _schema({"type": "array", "prefixItems": [digits, {"const": count}], "items": False, "minItems": 2})
    for least in range(1, 11):
        yield _schema({"type": "string", "minLength": least, "maxLength": least + least % 3})


def _nested() -> Iterator[Structure]:
    for depth in range(1, 7):
        schema: dict[str, Any] = SMALL
        for level in range(depth):
            schema = _closed({f"level{level}": schema})
        yield _schema(schema)
    person = _closed({"name": SHORT, "age": SMALL, "tags": {"type": "array", "items": {"enum": ["x", "y", "z"]}, "maxItems": 2}})
    yield _schema(person)
    yield _schema({"type": "array", "items": person, "minItems": 1, "maxItems": 2})
    yield _schema(_closed({"kind": {"const": "pair"}, "left": person, "right": {"anyOf": [person, {"type": "null"}]}}))
    call = _closed({"name": {"enum": ["search", "open"]}, "arguments": {"anyOf": [_closed({"query": SHORT}), _closed({"id": SMALL})]}})
    yield _schema({"type": "array", "items": call, "minItems": 1, "maxItems": 2})


def _regexes() -> Iterator[Structure]:
    patterns = [
        r"[a-z]{3}",
        r"\d{4}-\d{2}-\d{2}",
        r"(yes|no|maybe)",
        r"[A-F0-9]{8}",
        r"a{5}b{2}",
        r"(ab|cd){2,3}",
        r"[^aeiou\s]{4}",
        r"-?\d{1,3}(\.\d{1,2})?",
    ]
    patterns += [
        r"[a-z]{2,8}@[a-z]{2,8}\.(com|org)",
        r"(\d{1,3}\.){3}\d{1,3}",
        r"#[0-9a-f]{6}",
        r"[A-Z]{2}\d{2} [A-Z]{2}",
        r"(one|two)(, (three|four)){1,2}\.",
    ]
    patterns += [rf"x{{{count}}}" for count in (1, 2, 9, 17, 33)]
    patterns += [
        r"[αβγ]{2,3}",
        r"[一-三]{1,2}",
        r"(\[\d\]){1,4}",
        r"\(([a-z],){2}[a-z]\)",
        r"q[^\"]{1,5}q",
        r"(?:0|[1-9]\d{0,3})",
        r"[a-z]+(-[a-z]+){1,2}!{1,3}"[:-5] + "!",
    ]
    for pattern in patterns:
        yield {"regex": pattern}


def _choices() -> Iterator[Structure]:
    for choices in (
        ["yes", "no"],
        ["a", "ab", "abc"],
        ["only"],
        ["New York", "São Paulo", "東京"],
        ["1", "10", "100"],
        ['say "hi"', "back\\slash", "tab\there"],
    ):
        yield {"choice": choices}
    for count in (5, 20, 100):
        yield {"choice": [f"option number {i}" for i in range(count)]}


def _grammars() -> Iterator[Structure]:
    yield {"grammar": 'start: "yes" | "no"', "matches": "yes|no"}
    yield {"grammar": 'start: digit digit\ndigit: "0" | "1"', "matches": "[01]{2}"}
    yield {"grammar": 'start: "(" inner ")"\ninner: "a" | "b" "c"', "matches": r"\((a|bc)\)"}
    yield {"grammar": "start: WORD\nWORD: /[a-z]{2,5}/", "matches": "[a-z]{2,5}"}
    yield {"grammar": 'root ::= "x" ("y" | "z") "!"', "matches": "x[yz]!"}
    yield {"grammar": 'root ::= [0-9] [0-9] "-" [a-c]', "matches": r"\d\d-[a-c]"}
