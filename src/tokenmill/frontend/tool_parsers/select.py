"""The notations by the names that `--tool-call-parser` takes, which are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

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
    }
)
