"""Rules of values as Gemma 4 writes them: strings between tokens of their own, keys without quotes, no white space.

    string           <|"|>text<|"|>, with enum, const, lengths, patterns and formats that a regular expression says
    object           {key:value,other:value}, keys in the schema's order; open ones without named keys take any
    array            [value,value]
    number, boolean  as JSON has them

What a schema says beyond that is enforced by writing the value as JSON, which the parser reads too; a model that was
trained on its own notation should seldom have to. Inner objects take only the keys that they name.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenmill.serving.frontend.grammar_builder import GrammarBuilder, literal
from tokenmill.serving.frontend.json_schema import closed
from tokenmill.serving.frontend.tool_parsers.protocol import Tool
from tokenmill.serving.frontend.whole_regex import FORMATS, whole

QUOTE = '<|"|>'
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_MAX_LENGTH = 1024  # of a string whose length is counted
_MAX_CHOICES = 256
_SILENT = ("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly")
_DEFINITIONS = ("$defs", "definitions")
# The keywords that native rules keep, by type.
_KEPT = {
    "string": ("minLength", "maxLength", "pattern", "format", "enum", "const"),
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items",),
}
_ANYTHING = """start: {start}
value: string | NUMBER | "true" | "false" | "null" | object | array
object: "{{" (pair ("," pair)*)? "}}"
pair: KEY ":" value
array: "[" (value ("," value)*)? "]"
string: {string}
KEY: /[A-Za-z_][A-Za-z0-9_.-]{{0,63}}/
NUMBER: /-?(0|[1-9][0-9]{{0,18}})(\\.[0-9]{{1,18}})?/"""


class Gemma4Values:
    """Writes the rules of one answer's values; equal schemas share a rule."""

    def __init__(self, builder: GrammarBuilder) -> None:
        self._builder = builder
        self._rules: dict[str, str] = {}

    def arguments(self, tool: Tool) -> str:
        """Return the rule of a call's arguments, with their braces."""
        parameters = closed({"type": "object", **tool.parameters}, tool.is_strict)
        return _ToolValues(self._builder, self._rules, tool, parameters).value(parameters)


class _ToolValues:
    """The rules of one tool's values.

    Attributes:
        within: definitions that the value is within; a schema that comes back to one of them is recursive.
    """

    def __init__(self, builder: GrammarBuilder, rules: dict[str, str], tool: Tool, parameters: dict[str, Any]) -> None:
        self._builder = builder
        self._rules = rules
        self._is_strict = tool.is_strict
        self._definitions = {key: parameters[key] for key in _DEFINITIONS if isinstance(parameters.get(key), dict)}
        self._within: list[str] = []

    def value(self, schema: Any) -> str:
        """Return the rule of a value: in Gemma's form if that keeps to the schema, else as JSON."""
        if schema is False:
            return self._json({"not": {}})
        own: dict[str, Any] = schema if isinstance(schema, dict) else {}
        return self._native(own) or self._json(own)

    def _native(self, schema: dict[str, Any]) -> str | None:
        said = {key: one for key, one in schema.items() if key not in (*_SILENT, *_DEFINITIONS)}
        if "$ref" in said:
            return self._referred(said)
        alternatives = said.get("anyOf", None if self._is_strict else said.get("oneOf"))
        if isinstance(alternatives, list) and alternatives and len(said) == 1:
            return f"({' | '.join(map(self.value, alternatives))})"
        kinds = said.get("type", [])
        if isinstance(kinds, list) and len(kinds) != 1:
            rest = {key: one for key, one in said.items() if key != "type"}
            return self._of_kinds(kinds, rest)
        kind = kinds[0] if isinstance(kinds, list) else kinds
        if kind not in _KEPT:
            return None
        if any(key != "type" and key not in _KEPT[kind] for key in said):
            return None
        return {"string": self._string, "object": self._object, "array": self._array}[kind](said)

    def _of_kinds(self, kinds: list[Any], rest: dict[str, Any]) -> str | None:
        """Return the rule of a value of several types, of which each takes the keywords that are for it; or of any."""
        if not kinds and {*rest} <= {"enum", "const"} and rest:
            return self._choice(rest)
        if not kinds:
            return self._anything("value") if not rest else None
        if rest and not {*rest} <= {*_KEPT["string"], "null"} - {"enum", "const"}:
            return None
        return f"({' | '.join(self.value({'type': one, **(rest if one == 'string' else {})}) for one in kinds)})"

    def _referred(self, said: dict[str, Any]) -> str | None:
        """Return the rule of a definition, unless it is within itself."""
        folder, _, name = str(said["$ref"]).removeprefix("#/").partition("/")
        found = self._definitions.get(folder, {}).get(name)
        if len(said) > 1 or not isinstance(found, dict) or name in self._within:
            return None
        self._within.append(name)
        try:
            return self._native(found)
        finally:
            self._within.pop()

    def _json(self, schema: dict[str, Any]) -> str:
        given = {**self._definitions, **schema}
        return self._once(
            f"json {self._is_strict} {json.dumps(given)}", lambda: self._builder.value(given, self._is_strict)
        )

    def _choice(self, said: dict[str, Any]) -> str | None:
        choices = [said["const"]] if "const" in said else said["enum"]
        if not isinstance(choices, list) or not 0 < len(choices) <= _MAX_CHOICES:
            return None
        if any(isinstance(one, list | dict) or (isinstance(one, str) and QUOTE in one) for one in choices):
            return None
        texts = [one for one in choices if isinstance(one, str)]
        others = [literal(json.dumps(one)) for one in choices if not isinstance(one, str)]
        strings = [f"{self._quote} ({' | '.join(map(literal, texts))}) {self._quote}"] if texts else []
        return f"({' | '.join([*strings, *others])})"

    def _string(self, said: dict[str, Any]) -> str | None:
        if "enum" in said or "const" in said:
            return self._choice(said) if {*said} <= {"type", "enum", "const"} else None
        least, most = said.get("minLength", 0), said.get("maxLength", 0)
        if not all(isinstance(one, int) and 0 <= one <= _MAX_LENGTH for one in (least, most)):
            return None
        forms = []
        for keyword, form_of in (("pattern", whole), ("format", FORMATS.get)):
            if keyword in said:
                forms.append(form_of(str(said[keyword])))
        known = [form for form in forms if form is not None]
        if len(known) < len(forms) or said.get("maxLength") == 0:
            return None
        return self._once(f"text {least} {most} {known}", lambda: self._text(least, most, known))

    def _text(self, least: int, most: int, forms: list[str]) -> str:
        return self._builder.text_between(self._quote, QUOTE, least, most, forms)

    @property
    def _quote(self) -> str:
        return self._builder.marker(QUOTE)

    def _array(self, said: dict[str, Any]) -> str:
        item = self.value(said.get("items", {}))
        return f'"[" ({item} ("," {item})*)? "]"'

    def _object(self, said: dict[str, Any]) -> str | None:
        named: Any = said.get("properties") or {}
        required: Any = said.get("required") or []
        if not isinstance(named, dict) or not isinstance(required, list) or not {*required} <= named.keys():
            return None
        if not named and said.get("additionalProperties", True) is not False:
            return self._anything("object") if said.get("additionalProperties", True) in (True, {}) else None
        if isinstance(said.get("additionalProperties"), dict) or not all(map(_KEY.fullmatch, named)):
            return None
        pairs = [(f"{literal(key + ':')} {self.value(one)}", key in required) for key, one in named.items()]
        return f'"{{" {_in_order(pairs)} "}}"'

    def _anything(self, start: str) -> str:
        """Return the rule of any value, or any object."""
        string = self._once("text 0 0 []", lambda: self._text(0, 0, []))
        return self._once(start, lambda: self._builder.lark(_ANYTHING.format(start=start, string=string)))

    def _once(self, key: str, make: Any) -> str:
        if key not in self._rules:
            self._rules[key] = make()
        return self._rules[key]


def _in_order(pairs: list[tuple[str, bool]]) -> str:
    """Return the rule of pairs in this order with commas between them, of which those not required may be missing."""

    def behind(rest: list[tuple[str, bool]]) -> str:
        return " ".join(f'("," {pair})' + ("" if is_required else "?") for pair, is_required in rest)

    starts = []
    for at, (pair, is_required) in enumerate(pairs):
        starts.append(f"{pair} {behind(pairs[at + 1 :])}")
        if is_required:
            return f"({' | '.join(starts)})"
    return f"({' | '.join(starts)})?" if starts else ""
