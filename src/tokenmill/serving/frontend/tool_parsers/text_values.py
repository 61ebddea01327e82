"""Arguments that are written as plain text, between tags: which schemas those have, and what a grammar keeps of them.

    enum, const      the texts, and null where the schema takes it
    lengths          in characters, up to 1,024
    pattern          where its anchors stand at its ends, or at those of its alternatives
    format           those of `FORMATS`
    anyOf, oneOf     the alternatives that are strings or null

Anything else that a schema says of a string is left out, and refused of a strict tool. Does not know how JSON values
are written.
"""

from __future__ import annotations

from typing import Any

from tokenmill.serving.frontend.grammar_builder import GrammarBuilder, literal
from tokenmill.serving.frontend.tool_parsers.named_arguments import refuse_strict
from tokenmill.serving.frontend.tool_parsers.protocol import Tool
from tokenmill.serving.frontend.whole_regex import FORMATS, whole

_MAX_LENGTH = 1024
_KEPT = ("type", "enum", "const", "minLength", "maxLength", "pattern", "format", "anyOf", "oneOf")
# These say nothing of a string, or nothing at all.
_SILENT = (
    "title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "properties",
    "required", "additionalProperties", "items", "minItems", "maxItems", "uniqueItems", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "$defs", "definitions", "prefixItems", "contentEncoding",
    "contentMediaType",
)  # fmt: skip


def is_text(schema: object) -> bool:
    """Return True if a value of this schema is written as plain text: it may be a string."""
    return "string" in kinds_of(schema)


def kinds_of(schema: object) -> frozenset[str]:
    """Return the types that a schema names; empty without any."""
    if not isinstance(schema, dict):
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset([named])
    if isinstance(named, list):
        return frozenset(one for one in named if isinstance(one, str))
    choices = _choices(schema)
    if choices and all(isinstance(choice, str) for choice in choices):
        return frozenset(["string"])
    return frozenset(kind for one in _alternatives(schema) for kind in kinds_of(_alone(one)))


def text_rule(builder: GrammarBuilder, tool: Tool, schema: dict[str, Any], end: str) -> str:
    """Return the rule of a text, a line break and `end`.

    Raises:
        InvalidRequest: a strict tool's schema says what cannot be kept to.
    """
    branches = [schema]
    if "type" not in schema and not _choices(schema):
        branches = [_alone(one) for one in _alternatives(schema)]
    if len(branches) > 1 and "oneOf" in schema:
        refuse_strict(tool, "oneOf")
    rules = [rule for one in branches for rule in _branch(builder, tool, one, end)]
    if not rules:
        refuse_strict(tool, f"a text that holds {end}")
    return f"({' | '.join(rules)})" if rules else builder.text_before(end)


def _branch(builder: GrammarBuilder, tool: Tool, schema: dict[str, Any], end: str) -> list[str]:
    """Return the rules of one alternative, none if it takes neither a string nor null."""
    kinds, choices = kinds_of(schema), _choices(schema)
    _check(tool, schema, kinds)
    null = [f"{literal('null' + chr(10) + end)}"] if "null" in kinds and (not choices or None in choices) else []
    if "string" not in kinds:
        return null
    if choices:
        texts = [text for text in choices if isinstance(text, str) and end not in text and _keeps(schema, text)]
        return [*(literal(f"{text}\n{end}") for text in texts), *null]
    if schema.get("maxLength") == 0:
        return [literal(f"\n{end}"), *null]
    least, most = (_length(tool, schema, name) for name in ("minLength", "maxLength"))
    forms = [form for name in ("pattern", "format") if (form := _form(tool, schema, name)) is not None]
    return [builder.text_before(end, least, most, forms), *null]


def _check(tool: Tool, schema: dict[str, Any], kinds: frozenset[str]) -> None:
    """Refuse what a strict tool says of a string and no rule keeps."""
    is_alone = "type" not in schema and not _choices(schema)
    for keyword in schema if "string" in kinds else ():
        is_known = keyword in _KEPT if is_alone or keyword not in ("anyOf", "oneOf") else False
        if not (is_known or keyword in _SILENT or keyword.startswith("x-")):
            refuse_strict(tool, f"{keyword} of a text")


def _length(tool: Tool, schema: dict[str, Any], name: str) -> int:
    """Return a length to enforce; 0 for none, and for a huge one, which would make the grammar too large."""
    value = schema.get(name)
    if not isinstance(value, int) or value <= 0:
        return 0
    if value > _MAX_LENGTH:
        refuse_strict(tool, f"{name} above {_MAX_LENGTH} of a text")
    return value if value <= _MAX_LENGTH else 0


def _form(tool: Tool, schema: dict[str, Any], name: str) -> str | None:
    """Return the regular expression of a pattern or a format that a text matches as a whole."""
    if name not in schema:
        return None
    given = str(schema[name])
    form = whole(given) if name == "pattern" else FORMATS.get(given)
    if form is None:
        refuse_strict(tool, f"the {name} {given[:80]!r} of a text")
    return form


def _keeps(schema: dict[str, Any], text: str) -> bool:
    least, most = schema.get("minLength"), schema.get("maxLength")
    return not (isinstance(least, int) and len(text) < least) and not (isinstance(most, int) and len(text) > most)


def _choices(schema: dict[str, Any]) -> list[Any]:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else []


def _alternatives(schema: dict[str, Any]) -> list[dict[str, Any]]:
    found = (schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list))
    return [one for one in next(found, ()) if isinstance(one, dict)]


def _alone(schema: dict[str, Any]) -> dict[str, Any]:
    """Return an alternative without alternatives of its own, which are not looked into."""
    return {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf")}
