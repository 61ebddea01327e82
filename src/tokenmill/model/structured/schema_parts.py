"""Parts of JSON schemas with which llguidance begins but cannot go on, or does not begin at all.

    patternProperties whose keys are all named in `properties`   after a comma no key could follow: said of these keys
    minProperties that keys which repeat could meet              refused by name
    anything that it knows nothing of, in a lenient schema       left out

Knows llguidance only by the two questions that it is handed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from tokenmill.core.errors import InvalidRequest
from tokenmill.model.structured.schema_walk import Places, Schema

IsUsed = Callable[[str, list[str]], bool]
"""A test of a regular expression for keys: True if these keys exhaust it, no other one matches."""
IsUsable = Callable[[Schema], bool]
"""A test of a schema: True if llguidance takes it, be it that nothing matches."""

_PLACES = Places(
    single=(
        "items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames",
    ),
    lists=("allOf", "anyOf", "oneOf", "prefixItems"),
    named=("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"),
)  # fmt: skip
_DEFINITIONS = ("$defs", "definitions")
# Beside these, llguidance joins the keys of several schemas.
_JOINING = ("$ref", "allOf", "anyOf", "oneOf")
_KEYS = ("properties", "patternProperties", "minProperties")


def with_reachable_keys(schema: Schema, is_used_up: IsUsed, is_lenient: bool) -> Schema:
    """Return the schema with rules of patterns moved to the named keys, where a pattern matches no others.

    Raises:
        InvalidRequest: it is not lenient; names a keyword that cannot be kept to.
    """
    parts = [*_parts(schema)]
    is_joined = any("allOf" in part or (any(n in part for n in _JOINING) and _has_keys(part)) for part in parts)
    names = [*dict.fromkeys(name for part in parts for name in _named(part, "properties"))] if is_joined else []

    def change(part: Schema) -> Schema:
        if (least := part.get("minProperties")) is not None and not _can_count(part, least, is_joined):
            sentence = f"minProperties: {least} keys cannot be told to differ; name them in required"
            part = _without(part, ("minProperties",), sentence, is_lenient)
        own = [*_named(part, "properties")]
        for pattern, wanted in _named(part, "patternProperties").items():
            if is_joined and names and is_used_up(pattern, names):
                sentence = f"patternProperties: {pattern[:80]!r} matches only names in properties; write it there"
                # What is left must not forbid the keys that the pattern let in.
                part = _without(part, ("patternProperties", "additionalProperties"), sentence, is_lenient)
            elif own and is_used_up(pattern, own):
                meant = [name for name in own if not is_used_up(pattern, [other for other in own if other != name])]
                part = _moved(part, pattern, wanted, meant)
        return part

    changed: Schema = _PLACES.changed(schema, change)
    return changed


def without_unsupported(schema: Schema, is_usable: IsUsable) -> Schema:
    """Return the schema without the keywords that llguidance does not take: the fewest found by a look at each."""
    if is_usable(schema):
        return schema
    # One reference to elsewhere, and nothing beside it is looked at.
    schema = _PLACES.changed(schema, _without_references_to_elsewhere)
    for looks_inside in (False, True):
        if is_usable(schema):
            return schema
        schema = _Pruning(schema, is_usable, looks_inside).schema()
    return schema


class _Pruning:
    """One pass through a schema: first what stands alone, then also keywords that hold or name other schemas."""

    def __init__(self, schema: Schema, is_usable: IsUsable, looks_inside: bool) -> None:
        self._schema = schema
        self._definitions = {name: schema[name] for name in _DEFINITIONS if isinstance(schema.get(name), dict)}
        self._is_usable = is_usable
        self._looks_inside = looks_inside
        self._known: dict[str, bool] = {}

    def schema(self) -> Schema:
        """Return the pruned schema."""
        pruned: Schema = _PLACES.changed(self._schema, self._prune)
        return pruned

    def _works(self, part: Schema) -> bool:
        key = json.dumps(part)
        if key not in self._known:
            self._known[key] = self._is_usable({**self._definitions, **part} if self._looks_inside else part)
        return self._known[key]

    def _prune(self, part: Schema) -> Schema:
        typed = {"type": part["type"]} if "type" in part and self._works({"type": part["type"]}) else {}
        kept: Schema = {}
        for name, value in part.items():
            if name == "patternProperties" and isinstance(value, dict):
                kept[name] = {one: own for one, own in value.items() if self._works({name: {one: True}})}
            elif self._is_looked_at(name) and not self._works({**typed, name: value}):
                continue
            else:
                kept[name] = value
        if not self._looks_inside or self._works(kept):
            return kept
        for name in reversed(kept):
            fewer = {other: value for other, value in kept.items() if other != name}
            if self._works(fewer):
                return fewer
        return typed

    def _is_looked_at(self, name: str) -> bool:
        if name in _DEFINITIONS or name == "x-guidance":
            return False
        return self._looks_inside or not (name in _PLACES or name == "$ref")


def _without_references_to_elsewhere(part: Schema) -> Schema:
    is_elsewhere = "$ref" in part and not str(part["$ref"]).startswith("#")
    return {name: value for name, value in part.items() if not (name == "$ref" and is_elsewhere)}


def _can_count(part: Schema, least: Any, is_joined: bool) -> bool:
    """Return True if `least` keys are certain to differ: keys that are not named may come twice."""
    required = part.get("required")
    certain = len(set(map(str, required))) if isinstance(required, list) and not is_joined else 0
    return not isinstance(least, int) or least <= certain + 1


def _without(part: Schema, keywords: tuple[str, ...], why: str, is_lenient: bool) -> Schema:
    if not is_lenient:
        raise InvalidRequest(why)
    return {name: value for name, value in part.items() if name not in keywords}


def _moved(part: Schema, pattern: str, wanted: Any, names: list[str]) -> Schema:
    properties = {
        name: {"allOf": [own, wanted]} if name in names else own for name, own in _named(part, "properties").items()
    }
    left = {one: own for one, own in _named(part, "patternProperties").items() if one != pattern}
    return {**part, "properties": properties, "patternProperties": left}


def _has_keys(part: Schema) -> bool:
    return any(name in part for name in _KEYS)


def _named(part: Schema, keyword: str) -> dict[str, Any]:
    value = part.get(keyword)
    return value if isinstance(value, dict) else {}


def _parts(schema: Any) -> Iterator[Schema]:
    """Yield a schema and all schemas in it."""
    found: list[Schema] = []
    _PLACES.changed(schema, lambda part: found.append(part) or part)  # type: ignore[func-returns-value]
    yield from found
