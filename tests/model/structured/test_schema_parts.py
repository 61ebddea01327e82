"""Schemas that compile can always go on: random ones of all kinds, and parts that tools may have though nobody can."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.checkpoints import VOCAB_SIZE
from tests.seeding import seed_for
from tokenmill.core.errors import InvalidRequest
from tokenmill.model.structured.compiler import GrammarCompiler, GrammarTokenizer, explain
from tokenmill.serving.frontend.grammar_builder import GrammarBuilder
from tokenmill.serving.frontend.tokenizer import Tokenizer

SEED = seed_for(__name__)
_NAMES = ["a", "ab", "score", "x", "", "b c"]
_PATTERNS = ["^a", "^a$", "^score$", "b$", "^(a|ab)$", ".*", "^x", "^[a-z]$", "^.{0,2}$", "^(a|b)c?$"]
SCORE: dict[str, Any] = {
    "type": "object",
    "properties": {"score": {"type": "integer", "multipleOf": 5}},
    "patternProperties": {"^score$": {"type": "integer"}},
    "required": ["score"],
    "additionalProperties": False,
}


NAMED = {name: value for name, value in SCORE.items() if name != "patternProperties"}
PATTERNS = {name: value for name, value in SCORE.items() if name not in ("properties", "required")}


class Walk:
    """Compiles grammars, and writes what they allow at random."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.load(model)
        path, self._eos = str(model / "tokenizer.json"), self._tokenizer.token_id("<|im_end|>")
        assert self._eos is not None
        self._compiler = GrammarCompiler(GrammarTokenizer(path, VOCAB_SIZE, (self._eos,)))

    def text(self, schema: dict[str, Any], rng: random.Random, is_lenient: bool = False) -> str | None:
        """Return its text, None if it does not end soon. Raises InvalidRequest if it does not begin."""
        builder = GrammarBuilder(self._tokenizer)
        matcher = self._compiler.compile(builder.grammar([builder.schema(json.dumps(schema), "", is_lenient)], "").text)
        matcher, token_ids = matcher.deep_copy(), list[int]()
        for _ in range(120):
            mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            allowed = np.flatnonzero(mask).tolist()
            assert allowed and not matcher.is_error(), (explain(matcher), self._tokenizer.decode(token_ids), schema)
            if self._eos in allowed:
                return self._tokenizer.decode(token_ids)
            token_ids.append(rng.choice(allowed))
            assert matcher.consume_token(token_ids[-1]), (explain(matcher), self._tokenizer.decode(token_ids), schema)
        return None


@pytest.fixture(scope="module")
def walk(model: Path) -> Walk:
    print(f"seed {SEED}")
    return Walk(model)


def any_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    kind = rng.choice(["object"] * 4 + ["array", "anyOf", "allOf"]) if depth and rng.random() < 0.7 else "leaf"
    if kind == "leaf":
        return rng.choice([_number, _number, _string, _string, _constant])(rng)
    if kind == "object":
        return _object(rng, depth - 1)
    if kind == "array":
        least = rng.randint(0, 2)
        return {"type": "array", "items": any_schema(rng, depth - 1), "minItems": least, "maxItems": least + 1}
    return {kind: [any_schema(rng, depth - 1) for _ in range(rng.randint(1, 2))]}


def _number(rng: random.Random) -> dict[str, Any]:
    bounds = {"multipleOf": [1, 2, 5, 7, 0.5, 10], "minimum": [-3, 0, 2.5, 7], "maximum": [5, 9.5, 40, 100]}
    chosen = {name: rng.choice(values) for name, values in bounds.items() if rng.random() < 0.4}
    return {"type": rng.choice(["integer", "number"])} | chosen


def _string(rng: random.Random) -> dict[str, Any]:
    limits = {"pattern": ["^a", "b$", "^[a-c]{1,4}$", "a|b", "^$"], "minLength": [0, 1, 3], "maxLength": [3, 6]}
    return {"type": "string"} | {name: rng.choice(values) for name, values in limits.items() if rng.random() < 0.5}


def _constant(rng: random.Random) -> dict[str, Any]:
    return rng.choice([{"enum": [1, "a", None]}, {"const": "b"}, {"type": "boolean"}, {"type": ["integer", "null"]}])


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(0, 3))
    schema: dict[str, Any] = {"type": "object", "properties": {name: any_schema(rng, depth) for name in names}}
    if rng.random() < 0.7:
        patterns = rng.sample(_PATTERNS, rng.randint(1, 2))
        schema["patternProperties"] = {pattern: any_schema(rng, depth) for pattern in patterns}
    if rng.random() < 0.7:
        schema["additionalProperties"] = rng.choice([False, False, any_schema(rng, 0)])
    if rng.random() < 0.6:
        schema["required"] = rng.sample(names, rng.randint(0, len(names)))
    for name in ("minProperties", "maxProperties"):
        if rng.random() < 0.2:
            schema[name] = rng.randint(1, 3)
    return schema


def test_what_compiles_can_always_go_on_and_comes_out_right(walk: Walk) -> None:
    rng = random.Random(SEED)
    num_right = 0
    for _ in range(300):
        schema = any_schema(rng)
        try:
            text = walk.text(schema, rng)
        except InvalidRequest:
            continue
        if text is not None:
            jsonschema.validate(json.loads(text), schema)
            num_right += 1
    assert num_right > 80


@pytest.mark.parametrize("pattern", ["^score$", "^(score|rank)$", "^s[c]ore$|^rank$", "^(?:score)$"])
@pytest.mark.parametrize("is_lenient", [False, True])
def test_what_is_said_of_a_named_key_by_a_pattern_is_kept(walk: Walk, pattern: str, is_lenient: bool) -> None:
    properties = {"score": {"type": "integer", "multipleOf": 5}, "rank": {"type": "integer"}}
    wanted = {"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 90}
    schema = SCORE | {"properties": properties, "patternProperties": {pattern: wanted}, "required": [*properties]}
    for number in range(12):
        text = walk.text(schema, random.Random(SEED + number), is_lenient)
        assert text is not None
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ({"allOf": [NAMED, PATTERNS]}, "patternProperties"),
        ({"$ref": "#/$defs/s", "$defs": {"s": PATTERNS}, "properties": NAMED["properties"]}, "patternProperties"),
        ({"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "minProperties": 2}, "minProperties"),
        ({"type": "array", "items": {"type": "object", "minProperties": 3}}, "minProperties"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_by_name(walk: Walk, schema: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^the JSON schema cannot be used: {name}: "):
        walk.text(schema, random.Random(SEED))
    walk.text(schema, random.Random(SEED), is_lenient=True)


UNSUPPORTED: list[dict[str, Any]] = [
    {"type": "string", "pattern": r"^(?=.*\d).{4}$"},
    {"type": "string", "pattern": r"^(?!foo)"},
    {"type": "string", "pattern": r"^(a)\1$"},
    {"type": "string", "pattern": r"\bfoo\b"},
    {"type": "string", "pattern": "(("},
    {"type": "string", "pattern": 3},
    {"type": "string", "format": "phone"},
    {"type": "date"},
    {"type": ["string", "money"]},
    {"type": "string", "maxLength": "4"},
    {"type": "integer", "minimum": "3"},
    {"type": "integer", "multipleOf": 0},
    {"$ref": "http://example.com/schema"},
    {"$ref": "#/nowhere"},
    {"type": "array", "items": {"type": "string", "pattern": "(?<=a)b"}, "uniqueItems": True},
    {"type": "object", "patternProperties": {"(?=a)": {"type": "string"}, "^b": {"type": "integer"}}},
    {"type": "object", "patternProperties": {"^b": {"type": "integer"}, "^bc": {"type": "string"}}},
    {"type": "object", "minProperties": 2},
    {"oneOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}]},
    {"not": {"type": "string"}, "propertyNames": {"pattern": "(?=a)"}},
]


def test_tools_may_have_parts_that_are_not_supported(walk: Walk) -> None:
    rng = random.Random(SEED)
    for bad in UNSUPPORTED:
        good = {"type": "integer", "minimum": 1, "maximum": 9}
        schema = {
            "type": "object",
            "properties": {"good": good, "inner": rng.choice([bad, {"anyOf": [bad]}, {"$ref": "#/$defs/part"}])},
            "$defs": {"part": bad},
            "required": ["good"],
            "additionalProperties": False,
        }
        text = walk.text(schema, rng, is_lenient=True)
        if text is not None:
            assert json.loads(text)["good"] in range(1, 10), (bad, text)


def test_the_rest_of_a_schema_with_such_a_part_is_kept_to(walk: Walk) -> None:
    schema = {
        "type": "object",
        "properties": {"code": {"type": "string", "pattern": "(?=x)", "minLength": 2, "maxLength": 3}},
        "required": ["code"],
        "additionalProperties": False,
    }
    with pytest.raises(InvalidRequest, match="look-around"):
        walk.text(schema, random.Random(SEED))
    for number in range(8):
        text = walk.text(schema, random.Random(SEED + number), is_lenient=True)
        assert text is not None
        assert len(json.loads(text)["code"]) in (2, 3)
