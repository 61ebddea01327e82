"""How models mark their thinking, by the names that `--reasoning-parser` takes, which are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    """The marks of one family.

    Attributes:
        always_thinks: the text begins with thinking even where neither prompt nor answer says so.
    """

    begin: str
    end: str
    always_thinks: bool = False

    def prompt_begins(self, prompt_end: str) -> bool:
        """Whether a prompt that ends like this has begun the thinking."""
        return self.always_thinks or prompt_end.rstrip().endswith(self.begin)


STYLES: Mapping[str, ReasoningStyle] = MappingProxyType(
    {
        "qwen3": ReasoningStyle("<think>", "</think>"),
        "deepseek_r1": ReasoningStyle("<think>", "</think>", always_thinks=True),
    }
)
