"""The form that a client demands of an answer: one frozen, checked struct that crosses process boundaries."""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.names import did_you_mean

MAX_CHARACTERS = 128 << 10
MAX_CHOICES = 1000


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Constraints of an answer: exactly one of the first five fields is set; vLLM's names.

    Attributes:
        json: a JSON schema, as an object or as its text.
        json_object: any JSON object.
        regex: a regular expression for the whole answer; without look-around and back-references.
        choice: the answer is one of these.
        grammar: a grammar in Lark's notation, as llguidance reads it, with a rule `start`.
        is_lenient: unsupported parts of a schema are left out instead of refused.
        param: the request's field, for error messages.

    Raises:
        InvalidRequest: not exactly one of them is given, or it is too large.
    """

    json: dict[str, Any] | bool | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    is_lenient: bool = False
    param: str = "structured_outputs"

    def __post_init__(self) -> None:
        given = [self.json is not None, self.json_object, self.regex is not None]
        given += [self.choice is not None, self.grammar is not None]
        if sum(given) != 1:
            raise InvalidRequest(
                f"{self.param}: exactly one of json, json_object, regex, choice and grammar is needed", self.param
            )
        if self.choice is not None and not 1 <= len(self.choice) <= MAX_CHOICES:
            raise InvalidRequest(f"{self.param}: 1 to {MAX_CHOICES} choices, got {len(self.choice)}", self.param)
        if "" in (self.regex, self.grammar, *(self.choice or ())):
            raise InvalidRequest(f"{self.param}: a regex, choice or grammar must not be empty", self.param)
        size = sum(map(len, self.choice or ())) + len(self.regex or "") + len(self.grammar or "")
        if size > MAX_CHARACTERS or len(self.schema_text()) > MAX_CHARACTERS:
            raise InvalidRequest(f"{self.param}: at most {MAX_CHARACTERS} characters", self.param)

    def schema_text(self) -> str:
        """Return the JSON schema as text; None: absent."""
        if self.json_object:
            return '{"type":"object"}'
        if self.json is None or isinstance(self.json, str):
            return self.json or ""
        return msgspec.json.encode(self.json).decode()


def read_form(given: object) -> StructuredOutputs:
    """Return the form that a dict of its fields stands for.

    Raises:
        InvalidRequest: it is no dict, or a field is not known, or has a value of another kind.
    """
    name = "structured_outputs"
    if not isinstance(given, dict):
        raise InvalidRequest(f"{name} must be a StructuredOutputs or a dict, got {type(given).__name__}", name)
    for field in given:
        if field not in StructuredOutputs.__struct_fields__:
            hint = did_you_mean(str(field), StructuredOutputs.__struct_fields__)
            raise InvalidRequest(f"{name} has no field {field!r}{hint}", name)
    try:
        return msgspec.convert(given, StructuredOutputs)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InvalidRequest):
            raise error.__cause__ from None
        raise InvalidRequest(f"{name}: {error}", name) from None
