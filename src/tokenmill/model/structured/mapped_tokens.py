"""A mapped vocabulary as llguidance takes one: bytes of each token, which are special, and an encoder of text.

llguidance reads a tokenizer.json of 262,144 tokens in 3 s; its tokens alone in 1.3 s, of which half goes into its sets
of tokens. It does so twice: in the engine, and in the sandbox that tries grammars.
"""

from __future__ import annotations

from pathlib import Path

from tokenmill.model.vocabulary.byte_level import byte_level_bytes
from tokenmill.model.vocabulary.mapped_backend import MappedBackend
from tokenmill.model.vocabulary.mapped_file import MappedVocabulary, open_vocabulary
from tokenmill.model.vocabulary.recipe import IS_ADDED, IS_SPECIAL

_NUM_BYTE_CHARACTERS = len("<0x0A>")


class MappedTokens:
    """Has the attributes and the call of `llguidance.TokenizerWrapper`, without a Hugging Face tokenizer behind them.

    Attributes:
        tokens: bytes of each token below the model's `vocab_size`; none past the vocabulary.
    """

    bos_token_id = None

    def __init__(self, vocabulary: MappedVocabulary, vocab_size: int, eos_token_id: int) -> None:
        native = vocabulary.native
        ids = range(vocab_size)
        spellings = [token or "" for token in map(native.token, ids)]
        special = [_is_special(token, flags) for token, flags in zip(spellings, map(native.flags, ids), strict=True)]
        spell = byte_level_bytes if vocabulary.recipe.is_byte_level else _marked_bytes
        self.eos_token_id = eos_token_id
        self.tokens = [
            token.encode() if is_special else spell(token) for token, is_special in zip(spellings, special, strict=True)
        ]
        self.special_token_ids = [token_id for token_id, is_special in enumerate(special) if is_special]
        self._encoder = MappedBackend(vocabulary, adds_prefix=False)

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the ids of a text, of which bytes that are no text become replacement characters."""
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._encoder.encode(text, add_special_tokens=False)


def mapped_tokens(tokenizer: Path, cache: Path, vocab_size: int, eos_token_id: int) -> MappedTokens | None:
    """Return the tokens of a tokenizer.json; None: it is not mapped, see `open_vocabulary`."""
    vocabulary = open_vocabulary(tokenizer.parent, cache)
    return None if vocabulary is None else MappedTokens(vocabulary, vocab_size, eos_token_id)


def _is_special(token: str, flags: int) -> bool:
    """Return True for a token that llguidance takes for no text: special ones, and added ones that look like marks."""
    return bool(flags & IS_SPECIAL) or (bool(flags & IS_ADDED) and token.startswith("<") and token.endswith(">"))


def _marked_bytes(token: str) -> bytes:
    """Return the bytes of a token with marks for spaces, or the one byte that `<0x0A>` stands for."""
    if len(token) == _NUM_BYTE_CHARACTERS and token.startswith("<0x"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()
