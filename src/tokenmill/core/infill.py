"""`Infill`: a gap in a text that a model is to fill, and the marks that models put around what is there.

Fill-in-the-middle training is of Bavarian et al., 2022 (arXiv:2207.14255). The order is prefix, suffix, middle, as in
all public code models; files of a repository stand before them (Qwen2.5-Coder, StarCoder2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType

import msgspec


class ContextFile(msgspec.Struct):
    """Another text that a model should know: a file of the same repository."""

    filename: str
    text: str


class Infill(msgspec.Struct):
    """A gap between two texts.

    Attributes:
        prefix, suffix: the texts before and behind the gap.
        start: the beginning of the filling, which the model continues.
        files: other texts, the least related first.
    """

    prefix: str
    suffix: str
    start: str = ""
    files: list[ContextFile] = []

    def num_characters(self) -> int:
        """Return the length of all texts together."""
        files = sum(len(file.filename) + len(file.text) for file in self.files)
        return len(self.prefix) + len(self.suffix) + len(self.start) + files


class Mark(Enum):
    """A token that says what comes next."""

    PREFIX = "prefix"
    SUFFIX = "suffix"
    MIDDLE = "middle"
    PAD = "pad"
    REPOSITORY = "repository"
    FILE = "separator"


# Of Qwen, Granite, StarCoder, DeepSeek, CodeLlama (twice), GLM and CodeGemma.
SPELLINGS: Mapping[Mark, Sequence[str]] = MappingProxyType(
    {
        Mark.PREFIX: (
            "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim▁begin\uff5c>", "<PRE>", "▁<PRE>",
            "<|code_prefix|>", "<|prefix|>",
        ),
        Mark.SUFFIX: (
            "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim▁hole\uff5c>", "<SUF>", "▁<SUF>",
            "<|code_suffix|>", "<|suffix|>",
        ),
        Mark.MIDDLE: (
            "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim▁end\uff5c>", "<MID>", "▁<MID>",
            "<|code_middle|>", "<|middle|>",
        ),
        Mark.PAD: ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        Mark.REPOSITORY: ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
        Mark.FILE: ("<|file_sep|>",),
    }
)  # fmt: skip
