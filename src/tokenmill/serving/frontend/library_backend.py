"""A tokenizer of the `tokenizers` library as a whole: every kind of model and option that it knows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import tokenizers

from tokenmill.model.vocabulary.recipe import JsonObject

# Longer text is encoded without holding up other threads.
_LONG_TEXT = 4096


class Backend(Protocol):
    """The parts of a tokenizer that depend on where its vocabulary lies."""

    decoder: JsonObject | None

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        ...

    @property
    def longest_token(self) -> int:
        """Number of characters in the longest token."""
        ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text."""
        ...

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Return the ids of several texts."""
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of ids; unknown ones give none."""
        ...

    def token(self, token_id: int) -> str | None:
        """Return a token's spelling."""
        ...

    def token_id(self, token: str) -> int | None:
        """Return the id of a spelling."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Return True for an added token that is special."""
        ...

    def is_added(self, token_id: int) -> bool:
        """Return True for an added token."""
        ...

    def visible_tokens(self, token_ids: Sequence[int], skip_special_tokens: bool) -> list[str]:
        """Return the spellings that a decoder is handed."""
        ...


class LibraryBackend:
    """Encodes and decodes with the library.

    Attributes:
        decoder: the entry of tokenizer.json.
    """

    def __init__(self, library: tokenizers.Tokenizer, decoder: JsonObject | None) -> None:
        self._library = library
        self.decoder = decoder
        added = library.get_added_tokens_decoder()
        self._added = set(added)
        self._special = {token.content for token in added.values() if token.special}

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self._library.get_vocab_size(with_added_tokens=True))

    @functools.cached_property
    def longest_token(self) -> int:
        """Number of characters in the longest token."""
        return max(map(len, self._library.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text."""
        if len(text) > _LONG_TEXT:
            return self.encode_batch([text], add_special_tokens)[0]  # which lets other threads run meanwhile
        ids: list[int] = self._library.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Return the ids of several texts, encoded on several cores."""
        encodings: list[Any] = self._library.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of ids; unknown ones give none."""
        return str(self._library.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str | None:
        """Return a token's spelling."""
        return self._library.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """Return the id of a spelling."""
        return self._library.token_to_id(token)

    def is_special(self, token_id: int) -> bool:
        """Return True for an added token that is special."""
        return self._library.id_to_token(token_id) in self._special

    def is_added(self, token_id: int) -> bool:
        """Return True for an added token."""
        return token_id in self._added

    def visible_tokens(self, token_ids: Sequence[int], skip_special_tokens: bool) -> list[str]:
        """Return the spellings that a decoder is handed."""
        hidden = self._special if skip_special_tokens else ()
        tokens = [self._library.id_to_token(token_id) for token_id in token_ids]
        return [token for token in tokens if token is not None and token not in hidden]
