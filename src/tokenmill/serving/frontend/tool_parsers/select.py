"""Select the notation of calls and the style of thinking by the names of the flags, which are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tokenmill.serving.frontend.reasoning import ReasoningStyle
from tokenmill.serving.frontend.tool_parsers import harmony
from tokenmill.serving.frontend.tool_parsers.gemma4 import Gemma4Notation
from tokenmill.serving.frontend.tool_parsers.hermes import HermesNotation
from tokenmill.serving.frontend.tool_parsers.json_list import JsonListNotation
from tokenmill.serving.frontend.tool_parsers.lfm2 import Lfm2Notation
from tokenmill.serving.frontend.tool_parsers.llama3_json import Llama3JsonNotation
from tokenmill.serving.frontend.tool_parsers.mistral import MistralNotation
from tokenmill.serving.frontend.tool_parsers.protocol import Notation
from tokenmill.serving.frontend.tool_parsers.pythonic import PythonicNotation
from tokenmill.serving.frontend.tool_parsers.qwen3_coder import Qwen3CoderNotation

NOTATIONS: Mapping[str, Notation] = MappingProxyType(
    {
        "hermes": HermesNotation(),
        "llama3_json": Llama3JsonNotation(),
        "mistral": MistralNotation(),
        "pythonic": PythonicNotation(),
        "qwen3_coder": Qwen3CoderNotation(),
        "lfm2": Lfm2Notation(),
        "granite": JsonListNotation(("<|tool_call|>", "<tool_call>")),
        "phi4_mini_json": JsonListNotation(("<|tool_call|>", "functools"), "<|/tool_call|>"),
        "gemma4": Gemma4Notation(),
        harmony.NOTATION_NAME: harmony.HarmonyNotation(),
    }
)
"""`--tool-call-parser`."""

STYLES: Mapping[str, ReasoningStyle] = MappingProxyType(
    {
        "qwen3": ReasoningStyle("<think>", "</think>"),
        "deepseek_r1": ReasoningStyle("<think>", "</think>", always_thinks=True),
        "granite": ReasoningStyle("Here is my thought process:", "Here is my response:"),
        "gemma4": ReasoningStyle("<|channel>thought", "<channel|>", needs_special_tokens=True),
        harmony.STYLE_NAME: harmony.STYLE,
    }
)
"""`--reasoning-parser`."""
