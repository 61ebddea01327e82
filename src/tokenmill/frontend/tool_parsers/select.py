"""The notations of calls and the styles of thinking, by the names that the flags take, which are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tokenmill.frontend.reasoning import ReasoningStyle
from tokenmill.frontend.tool_parsers import harmony
from tokenmill.frontend.tool_parsers.hermes import HermesNotation
from tokenmill.frontend.tool_parsers.llama3_json import Llama3JsonNotation
from tokenmill.frontend.tool_parsers.mistral import MistralNotation
from tokenmill.frontend.tool_parsers.protocol import Notation
from tokenmill.frontend.tool_parsers.pythonic import PythonicNotation

NOTATIONS: Mapping[str, Notation] = MappingProxyType(
    {
        "hermes": HermesNotation(),
        "llama3_json": Llama3JsonNotation(),
        "mistral": MistralNotation(),
        "pythonic": PythonicNotation(),
        harmony.NOTATION_NAME: harmony.HarmonyNotation(),
    }
)
"""`--tool-call-parser`."""

STYLES: Mapping[str, ReasoningStyle] = MappingProxyType(
    {
        "qwen3": ReasoningStyle("<think>", "</think>"),
        "deepseek_r1": ReasoningStyle("<think>", "</think>", always_thinks=True),
        harmony.STYLE_NAME: harmony.STYLE,
    }
)
"""`--reasoning-parser`."""
