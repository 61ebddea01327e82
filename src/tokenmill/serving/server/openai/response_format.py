"""Read the fields that say what an answer must look like: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.structured_outputs import StructuredOutputs


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The field `response_format.json_schema`; the model does not see the name and the description.

    Attributes:
        strict: false: unsupported keywords are left out instead of refused.
    """

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The field `response_format`.

    Attributes:
        schema: of a `json_object`, as llama.cpp and Together take it: the schema of the object.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | bool | None = None


class StructuredOutputsField(msgspec.Struct, forbid_unknown_fields=True):
    """The field `structured_outputs`; exactly one of its own fields is given."""

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def structured_outputs(
    format: ResponseFormat | None, outputs: StructuredOutputsField | None
) -> StructuredOutputs | None:
    """Return the structure that either field asks for; None: free text.

    Raises:
        InvalidRequest: both fields ask for a structure, or one of them is incomplete.
    """
    is_plain = format is None or format.type == "text"
    if outputs is not None:
        if not is_plain:
            raise InvalidRequest("response_format and structured_outputs exclude each other", "structured_outputs")
        return StructuredOutputs(
            json=outputs.json,
            json_object=bool(outputs.json_object),
            regex=outputs.regex,
            choice=None if outputs.choice is None else tuple(outputs.choice),
            grammar=outputs.grammar,
        )
    if format is None or is_plain:
        return None
    if format.type == "json_object" and format.schema is not None:
        return StructuredOutputs(json=format.schema, param="response_format")
    if format.type == "json_object":
        return StructuredOutputs(json_object=True, param="response_format")
    if format.json_schema is None or format.json_schema.schema is None:
        raise InvalidRequest("response_format.json_schema.schema is missing", "response_format")
    is_lenient = format.json_schema.strict is False
    return StructuredOutputs(json=format.json_schema.schema, is_lenient=is_lenient, param="response_format")
