"""JSON schemas drawn at random, small enough that a model without any sense comes to an end."""

from __future__ import annotations

import datetime
import random
import re
from typing import Any

import jsonschema

FORMATS = jsonschema.FormatChecker(["ipv4"])

_NAMES = ["name", "age", "a b", "ünïcode", 'quo"te', "back\\slash", "x", "items", "", "true"]
_PATTERNS = ["^[a-c]{1,4}$", "^[0-9]{2}-[0-9]{2}$", "^(yes|no)$", "^x?y*z{2}$"]
_VALUES: list[Any] = ["red", "green", "", "a\nb", "né", 0, -3, 2.5, True, None]


@FORMATS.checks("date", ValueError)
def is_day_of_some_year(text: object) -> bool:
    """A grammar knows the days of a month, but neither leap years nor that the calendar has no year 0."""
    if not isinstance(text, str):  # a format is said of strings
        return True
    return bool(re.fullmatch(r"\d{4}-\d\d-\d\d", text) and datetime.date.fromisoformat(f"2000{text[4:]}"))


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A whole schema, sometimes with definitions that it refers to."""
    schema = _schema(rng, depth)
    if rng.random() < 0.2:
        definition = _schema(rng, 1)
        return {
            "$defs": {"part": definition},
            "type": "object",
            "properties": {"one": {"$ref": "#/$defs/part"}, "many": {"type": "array", "items": schema, "maxItems": 2}},
            "required": ["one"],
            "additionalProperties": False,
        }
    return schema


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves = [_string, _integer, _number, _boolean, _null, _enum, _const, _pattern, _format]
    branches = [_object, _object, _object, _array, _any_of, _types]
    return rng.choice(branches if depth and rng.random() < 0.75 else leaves)(rng, depth - 1)


def _string(rng: random.Random, _: int) -> dict[str, Any]:
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 5)}


def _integer(rng: random.Random, _: int) -> dict[str, Any]:
    low = rng.randint(-200, 200)
    return {"type": "integer", rng.choice(["minimum", "exclusiveMinimum"]): low, "maximum": low + rng.randint(2, 500)}


def _number(rng: random.Random, _: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return {"type": "number", "minimum": low, "exclusiveMaximum": low + rng.randint(1, 50)}


def _boolean(rng: random.Random, _: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _null(rng: random.Random, _: int) -> dict[str, Any]:
    return {"type": "null"}


def _enum(rng: random.Random, _: int) -> dict[str, Any]:
    return {"enum": rng.sample(_VALUES, rng.randint(1, 5))}


def _const(rng: random.Random, _: int) -> dict[str, Any]:
    return {"const": rng.choice([*_VALUES, {"a": [1, "b"]}])}


def _pattern(rng: random.Random, _: int) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(_PATTERNS)}


def _format(rng: random.Random, _: int) -> dict[str, Any]:
    return {"type": "string", "format": rng.choice(["date", "ipv4"])}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {"type": "array", "items": _schema(rng, depth), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: _schema(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth) for _ in range(rng.randint(1, 3))]}


def _types(rng: random.Random, _: int) -> dict[str, Any]:
    return {"type": rng.sample(["boolean", "null", "integer"], 2), "minimum": 0, "maximum": 99}


_WRITABLE = ["name", "age", "x", "items", "true_", "ünïcode", "class_", "note"]
_FORBIDDEN = ["a b", 'quo"te', "back\\slash", "class", "a>b", "true", "q\nr"]
_TOOL_NAMES = ["get", "get_all", "a.b-c", "run_2", "x"]


def random_tools(rng: random.Random, notation: str) -> list[dict[str, Any]]:
    """Functions in OpenAI's form. A notation that cannot write an odd name refuses it if the tool is strict."""
    names = [
        name for name in _TOOL_NAMES if notation not in ("pythonic", "lfm2") or name.replace(".", "").isidentifier()
    ]
    tools = []
    for name in dict.fromkeys([*rng.sample(names, rng.randint(1, 3)), *(["x"] if notation == "pythonic" else [])]):
        strict = rng.choice([True, True, None, False])
        function: dict[str, Any] = {"name": name, "parameters": _parameters(rng, strict)}
        if strict is not None:
            function["strict"] = strict
        tools.append({"type": "function", "function": function})
    return tools


def _parameters(rng: random.Random, strict: bool | None) -> dict[str, Any]:
    names = rng.sample(_WRITABLE, rng.randint(0, 4))
    if strict and rng.random() < 0.1:
        names.append(rng.choice(_FORBIDDEN))
    properties: dict[str, Any] = {name: _schema(rng, rng.randint(0, 2)) for name in names}
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if names and rng.random() < 0.25:
        schema["$defs"] = {"part": properties[names[0]]}
        properties[names[0]] = {"$ref": "#/$defs/part"}
    schema["required"] = [name for name in names if rng.random() < 0.6]
    if rng.random() < 0.5:
        schema["additionalProperties"] = False
    return schema
