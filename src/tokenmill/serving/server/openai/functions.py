"""Read and answer chats in the form that OpenAI's API had before tools: `functions` and `function_call`.

A function is a tool, and a call of one is a call of a tool: what clients send is turned into tools, and of the answer
only the names differ. An answer has one call at most.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import TextOutput
from tokenmill.serving.server.generation.tools import NamedTool
from tokenmill.serving.server.openai.chat_choices import (
    ChatChoice,
    ChatChoices,
    ChatChunkChoice,
    FunctionDelta,
    ToolCallDelta,
)

Messages = list[dict[str, Any]]


def asks_for_functions(functions: Messages | None, choice: str | dict[str, Any] | None) -> bool:
    """Return True if a chat is answered in the older form."""
    return bool(functions) or choice not in (None, "none", "auto")


def tools_of(functions: Messages) -> list[dict[str, Any]]:
    """Return functions as tools."""
    for i, function in enumerate(functions):
        if not isinstance(function.get("name"), str):
            raise InvalidRequest(f"functions[{i}].name must be a string", "functions")
    return [{"type": "function", "function": function} for function in functions]


def choice_of(choice: str | dict[str, Any] | None, functions: Messages) -> str | NamedTool | None:
    """Return `function_call` as a `tool_choice`.

    Raises:
        InvalidRequest: it is none of those that there are, or names no function.
    """
    if choice in (None, "none", "auto"):
        return choice
    name = choice.get("name") if isinstance(choice, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest('function_call must be none, auto, or {"name": ...}', "function_call")
    if not any(function.get("name") == name for function in functions):
        raise InvalidRequest(f"function_call: {name[:64]!r} is not among the functions", "function_call")
    return NamedTool(name)


def messages_with_tools(messages: Messages) -> Messages:
    """Return messages with calls of functions, and their results, as those of tools.

    A result belongs to the latest call of its function.
    """
    found, ids = [], dict[str, str]()
    for i, message in enumerate(messages):
        call = message.get("function_call")
        if message.get("role") == "function":
            call_id = ids.get(str(message.get("name")), f"call_{i}")
            found.append({**message, "role": "tool", "tool_call_id": call_id})
        elif isinstance(call, dict) and not message.get("tool_calls"):
            ids[str(call.get("name"))] = f"call_{i}"
            bare = {name: value for name, value in message.items() if name != "function_call"}
            found.append(bare | {"tool_calls": [{"id": f"call_{i}", "type": "function", "function": call}]})
        else:
            found.append(message)
    return found


class FunctionChoices(ChatChoices):
    """A `ChoiceEncoder` that names the one call of an answer `function_call`."""

    def chunk_choices(self, index: int, output: TextOutput) -> list[ChatChunkChoice]:
        """Return the choice for a delta, if it is worth sending."""
        choices = super().chunk_choices(index, output)
        for choice in choices:
            choice.delta.function_call = _joined(choice.delta.tool_calls)
            choice.delta.tool_calls = UNSET
            choice.finish_reason = _reason(choice.finish_reason)
        return choices

    def choice(self, index: int, output: TextOutput) -> ChatChoice:
        """Return a whole choice."""
        choice = super().choice(index, output)
        if choice.message.tool_calls:
            choice.message.function_call = choice.message.tool_calls[0].function
        choice.message.tool_calls = UNSET
        choice.finish_reason = _reason(choice.finish_reason)
        return choice


def _joined(calls: list[ToolCallDelta] | UnsetType) -> FunctionDelta | UnsetType:
    """Return the parts of a call that come at once as one."""
    if not calls:
        return UNSET
    return FunctionDelta(calls[0].function.name, "".join(call.function.arguments for call in calls))


def _reason(reason: str | None) -> str | None:
    return "function_call" if reason == "tool_calls" else reason
