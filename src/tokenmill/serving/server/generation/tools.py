"""Check `tools` and `tool_choice` and turn them into rules for the calls in an answer."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import CallRules
from tokenmill.serving.frontend.chat_messages import check_depth
from tokenmill.serving.server.context import ToolParsers

# Calls can be demanded of any model: the grammar makes it write them in this notation where no other is configured.
DEFAULT_NOTATION = "hermes"
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


class NamedTool(msgspec.Struct, frozen=True):
    """A `tool_choice` that names the function to call."""

    name: str


def call_rules(
    tools: list[dict[str, Any]] | None, choice: str | NamedTool | None, is_parallel: bool, parsers: ToolParsers
) -> CallRules | None:
    """Return the rules by which an answer may call tools; None: the model sees no tools and calls none.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    names = [_checked_name(tool, f"tools[{number}]") for number, tool in enumerate(tools or ())]
    if len(set(names)) != len(names):
        raise InvalidRequest("tools: two functions have the same name", "tools")
    named = choice.name if isinstance(choice, NamedTool) else None
    if named is None and choice not in (None, "none", "auto", "required"):
        raise InvalidRequest("tool_choice must be none, auto, required, or name a function", "tool_choice")
    is_required = named is not None or choice == "required"
    if not names and is_required:
        raise InvalidRequest("tool_choice needs tools", "tool_choice")
    if named is not None and named not in names:
        raise InvalidRequest(f"tool_choice: {named!r} is not among the tools", "tool_choice")
    if not names or choice == "none":
        return None
    if not is_required and not (parsers.finds_calls and parsers.notation):
        raise InvalidRequest(
            "tools with tool_choice auto need a server started with --enable-auto-tool-choice and --tool-call-parser",
            "tool_choice",
        )
    check_depth(tools, "tools")
    notation = parsers.notation or DEFAULT_NOTATION
    return CallRules(notation, names if named is None else [named], is_required, is_parallel and named is None)


def _checked_name(tool: dict[str, Any], where: str) -> str:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise InvalidRequest(f'{where} must be {{"type": "function", "function": {{...}}}}', "tools")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where}.function.name must be 1 to 64 letters, digits, dots, dashes, underscores", "tools"
        )
    if not isinstance(function.get("parameters") or {}, dict):
        raise InvalidRequest(f"{where}.function.parameters must be a JSON schema", "tools")
    if not isinstance((function.get("parameters") or {}).get("properties") or {}, dict):
        raise InvalidRequest(f"{where}.function.parameters.properties must be an object", "tools")
    return name
