"""Additions to schemas: lengths of strings, closed objects; nothing else changes."""

import copy

import pytest

from tokenmill.serving.frontend.json_schema import closed, with_string_lengths

OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, {"type": "string", "maxLength": 7}),
        ({"type": ["string", "null"]}, {"type": ["string", "null"], "maxLength": 7}),
        ({"type": "string", "minLength": 9}, {"type": "string", "minLength": 9, "maxLength": 9}),
        (
            {"anyOf": [{"type": "string"}, {"type": "null"}]},
            {"anyOf": [{"type": "string", "maxLength": 7}, {"type": "null"}]},
        ),
        ({"items": {"type": "string"}}, {"items": {"type": "string", "maxLength": 7}}),
        ({"$defs": {"x": {"type": "string"}}}, {"$defs": {"x": {"type": "string", "maxLength": 7}}}),
        (
            {"properties": {"type": {"type": "string"}, "enum": {"enum": ["x"]}}},
            {"properties": {"type": {"type": "string", "maxLength": 7}, "enum": {"enum": ["x"]}}},
        ),
    ],
)
def test_a_string_without_a_length_gets_one(schema, expected):
    before = copy.deepcopy(schema)
    assert with_string_lengths(schema, 7) == expected
    assert schema == before, "the client's own is left alone"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLength": 500},
        {"type": "string", "enum": ["a long text"]},
        {"type": "string", "const": "a long text"},
        {"type": "string", "pattern": "^a{20}$"},
        {"type": "string", "format": "date-time"},
        {"type": "integer"},
        {"allOf": [{"type": "string"}, {"maxLength": 500}]},
        {"const": {"type": "string"}, "default": {"type": "string"}},
        {"additionalProperties": False, "items": True},
    ],
)
def test_what_has_a_length_or_a_form_stays(schema):
    assert with_string_lengths(schema, 7) == schema


@pytest.mark.parametrize(
    ("schema", "additional"),
    [
        (OBJECT, False),
        ({"type": "object"}, False),
        (OBJECT | {"additionalProperties": True}, True),
        (OBJECT | {"additionalProperties": {"type": "integer"}}, {"type": "integer"}),
        ({"type": "object", "$ref": "#/$defs/x"}, None),
        ({"type": "object", "anyOf": [OBJECT]}, None),
        (OBJECT | {"patternProperties": {"^x": {}}}, None),
    ],
)
def test_an_object_is_closed_unless_it_opens_itself(schema, additional):
    assert closed(schema).get("additionalProperties") == additional
    assert "additionalProperties" not in closed(OBJECT | {"properties": {"a": OBJECT}})["properties"]["a"]


def test_strict_closes_all_of_it():
    open_object = OBJECT | {"additionalProperties": True}
    schema = open_object | {"properties": {"a": open_object, "b": {"type": "array", "items": OBJECT}}}
    strict = closed(schema, is_strict=True)
    assert strict["additionalProperties"] is False
    assert strict["properties"]["a"]["additionalProperties"] is False
    assert strict["properties"]["b"]["items"]["additionalProperties"] is False
