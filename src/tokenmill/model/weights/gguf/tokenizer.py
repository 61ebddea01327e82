"""The tokenizer in a GGUF file's metadata, as tokenizer.json: byte-level BPE only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

# How text is cut before the merges: patterns that the model's own tokenizer.json has, by llama.cpp's name for them.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        "qwen2": _CONTRACTIONS + r"|\p{N}" + _REST,
        "llama-bpe": _CONTRACTIONS + r"|\p{N}{1,3}" + _REST,
    }
)
CONTROL, USER_DEFINED = 3, 4


def tokenizer_of(metadata: Mapping[str, Any]) -> Tokenizer | None:
    """Return the tokenizer, or None if it is of a kind that cannot be told from the metadata alone."""
    pattern = PATTERNS.get(str(metadata.get("tokenizer.ggml.pre")))
    if metadata.get("tokenizer.ggml.model") != "gpt2" or pattern is None:
        return None
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)])
    return tokenizer
