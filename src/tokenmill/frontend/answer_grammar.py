"""The grammar of one chat answer: thinking, then what the answer must look like, or calls of tools, or either."""

from __future__ import annotations

from typing import Any

from tokenmill.frontend.constraint import GrammarBuilder, Thinking
from tokenmill.frontend.tool_parsers.protocol import Tool
from tokenmill.frontend.tool_parsers.select import NOTATIONS
from tokenmill.messages import CallRules
from tokenmill.sampling_params import Grammar
from tokenmill.structured.outputs import StructuredOutputs


def answer_grammar(
    builder: GrammarBuilder,
    outputs: StructuredOutputs | None,
    calls: CallRules | None,
    tools: list[dict[str, Any]] | None,
    thinking: Thinking | None,
) -> Grammar | None:
    """What an answer must match; None where it is free.

    Raises:
        InvalidRequest: a JSON schema is none.
    """
    alternatives = []
    param = "tools"
    if outputs is not None and not (calls is not None and calls.is_required):
        alternatives.append(builder.answer(outputs))
        param = outputs.param
    if calls is not None and (calls.is_required or alternatives):
        named = [read_tool(tool) for tool in tools or ()]
        wanted = [tool for tool in named if tool.name in calls.names]
        alternatives.append(NOTATIONS[calls.parser].rule(builder, wanted, calls.is_parallel))
    if not alternatives:
        return None
    rules = [] if thinking is None else [builder.thinking(thinking)]
    return builder.grammar([*rules, f"({' | '.join(alternatives)})"], param)


def read_tool(tool: dict[str, Any]) -> Tool:
    """A tool of OpenAI's form, which the edge has checked."""
    function = tool["function"]
    return Tool(function["name"], function.get("parameters") or {})
