"""Read the tools of /v1/responses, of several kinds, as functions, and name a call as its tool was given.

    function    as it is
    namespace   its functions, flat, as `namespace__name`; a call gets both names back
    custom      a function with one string, `input`; a call gets the raw text back

Tools that OpenAI's servers run (web_search, image_generation, ...) and kinds that came later are left out and listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import msgspec

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.json_text import decode_json
from tokenmill.serving.frontend.lark_regex import lark_regex
from tokenmill.serving.server.generation.tools import NamedTool

# Codex puts the tools that have no server of their own into a namespace of this name.
_PLAIN_NAMESPACE = "functions"
_MOST_CHARACTERS = 64
_ODD = re.compile(r"[^A-Za-z0-9_.\-]")
_FUNCTION = ("name", "description", "parameters", "strict")


class ToolName(msgspec.Struct, frozen=True):
    """The name by which a client calls a tool; `is_custom`: its input is a text, not JSON."""

    name: str
    namespace: str = ""
    is_custom: bool = False

    def item(self, arguments: str) -> dict[str, Any]:
        """Return the fields of an output item that calls the tool with these arguments."""
        space = {"namespace": self.namespace} if self.namespace else {}
        if self.is_custom:
            return {"type": "custom_tool_call", "name": self.name, "input": custom_input(arguments)} | space
        return {"type": "function_call", "name": self.name, "arguments": arguments} | space


@dataclass(slots=True)
class ResponseTools:
    """The tools of one body.

    Attributes:
        functions: in the form of chats.
        names: how the client calls a function, by the function's name; those that differ only.
        left_out: where tools stand that no model here can call, and their type.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    names: dict[str, ToolName] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def read_tools(tools: list[dict[str, Any]] | None) -> ResponseTools:
    """Return the tools of a body.

    Raises:
        InvalidRequest: naming the tool at fault.
    """
    read = ResponseTools()
    for number, tool in enumerate(tools or ()):
        for one, namespace, where in _flat(tool, f"tools[{number}]"):
            _add(read, one, namespace, where)
    return read


def flat_name(name: str, namespace: str = "") -> str:
    """Return the name under which the model knows a tool: at most 64 characters, the same for the same tool."""
    if not namespace or namespace == _PLAIN_NAMESPACE:
        return name
    whole = f"{namespace}__{name}"
    flat = _ODD.sub("_", whole)
    if flat == whole and len(flat) <= _MOST_CHARACTERS:
        return flat
    # The end tells tools of one namespace apart, and a checksum those whose ends are alike.
    checksum = sha256(whole.encode("utf-8", "replace")).hexdigest()[:8]
    return f"{checksum}_{flat[-(_MOST_CHARACTERS - 9) :]}"


def custom_input(arguments: str) -> str:
    """Return the text that a call gives a custom tool; arguments that are no JSON, as after a cut, stay as they are."""
    try:
        given = decode_json(arguments or "{}")
    except msgspec.DecodeError:
        return arguments
    text = given.get("input", "") if isinstance(given, dict) else given
    return text if isinstance(text, str) else msgspec.json.encode(text).decode()


def custom_arguments(text: str) -> str:
    """Return the arguments of the function that stands for a custom tool."""
    return msgspec.json.encode({"input": text}).decode()


def read_choice(choice: str | dict[str, Any] | None) -> str | NamedTool | None:
    """Return `tool_choice`, with a tool under the name that the model knows.

    Raises:
        InvalidRequest: it is of another form.
    """
    if not isinstance(choice, dict):
        return choice
    name, namespace = choice.get("name"), choice.get("namespace") or ""
    if choice.get("type") not in ("function", "custom") or not isinstance(name, str) or not isinstance(namespace, str):
        raise InvalidRequest("tool_choice must be none, auto, required, or a function with its name", "tool_choice")
    return NamedTool(flat_name(name, namespace))


def _flat(tool: dict[str, Any], where: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield a tool, or the tools of a namespace, each with its namespace and place."""
    if tool.get("type") != "namespace":
        yield tool, "", where
        return
    name, inner = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not name or not isinstance(inner, list):
        raise InvalidRequest(f"{where}: a namespace needs a name and a list of tools", "tools")
    for number, one in enumerate(inner):
        place = f"{where}.tools[{number}]"
        if not isinstance(one, dict):
            raise InvalidRequest(f"{place} must be an object", "tools")
        yield one, name, place


def _add(read: ResponseTools, tool: dict[str, Any], namespace: str, where: str) -> None:
    kind, name = tool.get("type"), tool.get("name")
    if kind not in ("function", "custom"):
        read.left_out.append(f"{where}:{str(kind)[:40]}")
        return
    if not isinstance(name, str):
        raise InvalidRequest(f"{where}.name must be a string", "tools")
    flat = flat_name(name, namespace)
    own = _function(tool) if kind == "function" else _custom(tool, where)
    read.functions.append({"type": "function", "function": own | {"name": flat}})
    if flat != name or namespace or kind == "custom":
        read.names[flat] = ToolName(name, namespace, kind == "custom")


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    return {name: tool[name] for name in _FUNCTION if tool.get(name) is not None}


def _custom(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the function that stands for a custom tool: its grammar is a pattern, which the grammar of calls keeps.

    A Lark grammar is shown to the model too.
    """
    text: dict[str, Any] = {"type": "string"}
    description = str(tool.get("description") or "")
    format = tool.get("format") or {}
    if not isinstance(format, dict):
        raise InvalidRequest(f"{where}.format must be an object", "tools")
    if format.get("type") == "grammar":
        syntax, definition = format.get("syntax"), format.get("definition")
        if syntax not in ("lark", "regex") or not isinstance(definition, str):
            raise InvalidRequest(f"{where}.format: a grammar needs a definition, and lark or regex as syntax", "tools")
        regex = definition if syntax == "regex" else lark_regex(definition, f"{where}.format")
        text["pattern"] = f"^(?:{regex})$"
        if syntax == "lark":
            description = f"{description}\n\nThe input follows this grammar (Lark):\n{definition}"
    # Descriptions of such tools forbid JSON, in which calls are written here.
    description = f"{description}\n\nThe raw text is the argument `input`.".lstrip()
    parameters = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    return {"name": tool.get("name"), "description": description, "parameters": parameters, "strict": True}
