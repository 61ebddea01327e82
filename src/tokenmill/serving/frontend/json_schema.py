"""Add string lengths and closed objects to a client's JSON schema before a grammar is made of it."""

from __future__ import annotations

from typing import Any

from tokenmill.model.structured.schema_walk import Places, Schema

# What is under `allOf` or `not` is left as it is: there a keyword more may say something else about the whole.
_PLACES = Places(
    single=("items", "additionalProperties", "additionalItems", "contains", "then", "else"),
    lists=("anyOf", "oneOf", "prefixItems"),
    named=("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"),
)
# A string with one of these has a form of its own.
_FORMS = ("maxLength", "enum", "const", "pattern", "format")
# With one of these an object's properties do not all stand in `properties`.
_OPENERS = ("$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties", "unevaluatedProperties", "dependentSchemas")


def with_string_lengths(schema: Any, most: int) -> Any:
    """Limit strings to `most` characters where the schema gives neither a length nor a form."""

    def bound(own: Schema) -> Schema:
        kinds = own.get("type")
        is_string = kinds == "string" or (isinstance(kinds, list) and "string" in kinds)
        if not is_string or any(name in own for name in _FORMS):
            return own
        least = own.get("minLength")
        return own | {"maxLength": max(most, least) if isinstance(least, int) else most}

    return _PLACES.changed(schema, bound)


def closed(schema: Any, is_strict: bool = False) -> Any:
    """Close an object to properties that it does not name, unless it says `additionalProperties` itself.

    Args:
        is_strict: close all inner objects too, whatever they say.
    """

    def close(own: Schema) -> Schema:
        is_object = "properties" in own or own.get("type") == "object"
        if not is_object or any(name in own for name in _OPENERS):
            return own
        return own | {"additionalProperties": False} if is_strict else {"additionalProperties": False} | own

    return _PLACES.changed(schema, close) if is_strict else close(schema)
