"""Choose the arguments that a notation with arguments by name can write, and refuse a strict tool that needs more.

A notation that writes one JSON object enforces its whole schema. Where each argument has a tag or a name of its own, a
grammar says which arguments there are and what each may be, and nothing of the object as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenmill.core.errors import InvalidRequest
from tokenmill.serving.frontend.tool_parsers.protocol import Tool

# What these say of an object cannot be said of one argument at a time.
_OF_THE_WHOLE = (
    "$ref", "allOf", "anyOf", "oneOf", "not", "if", "minProperties", "maxProperties", "dependentRequired",
    "dependentSchemas", "dependencies",
)  # fmt: skip


def named_arguments(tool: Tool, is_writable: Callable[[str], bool]) -> dict[str, Any]:
    """Return the schemas of a tool's arguments by name, without names that the notation cannot write.

    Raises:
        InvalidRequest: a strict tool needs an argument that is left out, or says something of the whole object.
    """
    properties: dict[str, Any] = tool.parameters.get("properties") or {}
    written = {name: schema for name, schema in properties.items() if is_writable(name)}
    for name in _required(tool):
        if name not in written:
            refuse_strict(tool, f"the argument {name[:80]!r}")
    for keyword in _OF_THE_WHOLE:
        if keyword in tool.parameters:
            refuse_strict(tool, keyword)
    return written


def refuse_strict(tool: Tool, what: str) -> None:
    """Refuse a strict tool because of a part of its schema; of any other that part is left out.

    Raises:
        InvalidRequest: the tool is strict.
    """
    if tool.is_strict:
        raise InvalidRequest(
            f"tools: {tool.name} is strict, but the model's notation of calls cannot keep to {what}: "
            "leave out strict, or change the schema",
            "tools",
        )


def _required(tool: Tool) -> list[str]:
    required = tool.parameters.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
