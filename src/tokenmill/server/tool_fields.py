"""`tools`, `tool_choice` and what the server's parsers make of a chat's answer."""

from __future__ import annotations

import re
import secrets
import string
from dataclasses import dataclass
from typing import Any

from tokenmill.errors import InvalidRequest
from tokenmill.frontend.answer import AnswerParser
from tokenmill.frontend.chat_messages import check_depth
from tokenmill.frontend.reasoning.splitter import ReasoningSplitter
from tokenmill.frontend.reasoning.styles import STYLES
from tokenmill.frontend.tool_parsers.select import NOTATIONS
from tokenmill.messages import CallRules

MAX_TOOLS = 128
# Calls can be demanded of any model: the grammar makes it write them in this notation where no other is configured.
DEFAULT_NOTATION = "hermes"
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_CALL_ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """How the answers of one request are taken apart.

    Attributes:
        notation: of tool calls; "": the text is not searched for any.
        reasoning: the reasoning parser; "": thinking is part of the text.
        max_calls: further calls are dropped.
    """

    notation: str = ""
    reasoning: str = ""
    max_calls: int | None = None

    @property
    def needs_special_tokens(self) -> bool:
        """The notation's markers are special tokens: the text must have them."""
        return bool(self.notation) and NOTATIONS[self.notation].needs_special_tokens

    def parser(self, is_thinking: bool) -> AnswerParser:
        """For one answer; `is_thinking`: its prompt has begun the thinking."""
        splitter = ReasoningSplitter(STYLES[self.reasoning], is_thinking) if self.reasoning else None
        tools = NOTATIONS[self.notation].parser() if self.notation else None
        return AnswerParser(splitter, tools, self.max_calls)

    def call_id(self) -> str:
        """An id for a call; Mistral's templates want exactly nine letters and digits."""
        if self.notation == "mistral":
            return "".join(secrets.choice(_CALL_ID_CHARACTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class ToolParsers:
    """What the server was started with: `--tool-call-parser`, `--enable-auto-tool-choice`, `--reasoning-parser`."""

    notation: str = ""
    finds_calls: bool = False
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request's `tools` and `tool_choice` come to.

    Attributes:
        tools: shown to the model.
        rules: how calls must or may be written, for the grammar.
    """

    style: AnswerStyle
    tools: list[dict[str, Any]] | None = None
    rules: CallRules | None = None


def tool_use(
    tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None, is_parallel: bool, parsers: ToolParsers
) -> ToolUse:
    """Check the fields and decide.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    names = [_checked_name(tool, f"tools[{number}]") for number, tool in enumerate(tools or ())]
    if len(names) > MAX_TOOLS:
        raise InvalidRequest(f"{len(names)} tools in one request; at most {MAX_TOOLS}", "tools")
    if len(set(names)) != len(names):
        raise InvalidRequest("tools: two functions have the same name", "tools")
    named = _named(choice)
    if named is None and choice not in (None, "none", "auto", "required"):
        raise InvalidRequest("tool_choice must be none, auto, required, or name a function", "tool_choice")
    if not names and (named or choice == "required"):
        raise InvalidRequest("tool_choice needs tools", "tool_choice")
    if named and named not in names:
        raise InvalidRequest(f"tool_choice: there is no tool {named!r}", "tool_choice")
    if not names or choice == "none":
        return ToolUse(AnswerStyle(reasoning=parsers.reasoning))
    is_required = bool(named) or choice == "required"
    if not is_required and not (parsers.finds_calls and parsers.notation):
        raise InvalidRequest(
            "tools with tool_choice auto need a server started with --enable-auto-tool-choice and --tool-call-parser",
            "tool_choice",
        )
    check_depth(tools, "tools")
    notation = parsers.notation or DEFAULT_NOTATION
    is_parallel = is_parallel and not named
    rules = CallRules(notation, [named] if named else names, is_required, is_parallel)
    return ToolUse(AnswerStyle(notation, parsers.reasoning, None if is_parallel else 1), tools, rules)


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


def _named(choice: str | dict[str, Any] | None) -> str | None:
    """The function of `{"type": "function", "function": {"name": ...}}`."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if isinstance(choice, dict) and not (isinstance(name, str) and name):
        raise InvalidRequest("tool_choice.function.name is missing", "tool_choice")
    return name
