"""Choose the parsers of a server's chat answers: those that flags name, else those found for the model.

Does not know how they are found; see `frontend/parser_finder.py`.
"""

from __future__ import annotations

import msgspec

from tokenmill.config.configs import ServerConfig
from tokenmill.config.fields import template_defaults
from tokenmill.config.server_settings import NO_PARSER
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.text_queries import ParsersFound
from tokenmill.serving.server.context import ToolParsers

NOTHING_FOUND = ParsersFound(id="", notation="", notation_reason="", style="", style_reason="")


class ParserChoice(msgspec.Struct, frozen=True):
    """The parsers in use, and the lines of the start screen that say which and why."""

    parsers: ToolParsers
    facts: list[tuple[str, str]]


def needs_finding(config: ServerConfig) -> bool:
    """Return True if a flag leaves a parser open."""
    return config.tool_call_parser is None or config.reasoning_parser is None


def choose_parsers(config: ServerConfig, found: ParsersFound) -> ParserChoice:
    """Return the choice; flags go before what is found.

    Raises:
        InvalidConfig: the model is to decide about calls, and no parser of calls is known.
    """
    notation, why_notation = _chosen(
        config.tool_call_parser, "--tool-call-parser", found.notation, found.notation_reason
    )
    style, why_style = _chosen(config.reasoning_parser, "--reasoning-parser", found.style, found.style_reason)
    if notation == "openai" and style != "openai_gptoss":
        # The format marks both, so its calls are not read without its thinking.
        if config.reasoning_parser is None:
            style, why_style = "openai_gptoss", "calls in openai's notation need it"
        else:
            notation, why_notation = "", "openai needs --reasoning-parser openai_gptoss"
    if config.enable_auto_tool_choice and not notation:
        raise InvalidConfig(f"--enable-auto-tool-choice: {why_notation}; name a parser with --tool-call-parser")
    finds_calls = bool(notation) and config.enable_auto_tool_choice is not False
    auto = "auto tool choice is on" if finds_calls else "auto tool choice is off"
    facts = [
        ("tools", f"{notation or 'no parser'} ({why_notation}); {auto}"),
        ("thinking", f"{style or 'no parser'} ({why_style})"),
    ]
    limits = (config.reasoning_budget, config.reasoning_budget_message)
    defaults = template_defaults(config.default_chat_template_kwargs)
    return ParserChoice(
        ToolParsers(notation, finds_calls, style, config.tool_grammar == "on", *limits, defaults), facts
    )


def _chosen(given: str | None, flag: str, name: str, reason: str) -> tuple[str, str]:
    """Return the name of a parser, "" for none, and the reason."""
    if given is None:
        return name, reason
    return ("" if given == NO_PARSER else given), f"{flag} {given}"
