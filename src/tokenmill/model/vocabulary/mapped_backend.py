"""A tokenizer over a mapped vocabulary: the library cuts text into pieces, our model encodes them.

Does not know what tokenizer_config.json says of the text's first token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import tokenizers

from tokenmill.model.vocabulary.mapped_file import MappedVocabulary
from tokenmill.model.vocabulary.recipe import IS_ADDED, IS_SPECIAL, JsonObject, make_cutter, make_part

_LONG_TEXT = 4096
_Cut = tuple[list[int], list[tuple[int, int]]]


class MappedBackend:
    """Encodes and decodes with a mapped vocabulary; see `LibraryBackend`, of which it is the equal."""

    def __init__(self, vocabulary: MappedVocabulary, adds_prefix: bool = True) -> None:
        """`adds_prefix`: a text begins as the recipe says; else it may be the middle of one, and begins as it is."""
        self._vocabulary = vocabulary
        self._native = vocabulary.native
        self._recipe = recipe = vocabulary.recipe if adds_prefix else vocabulary.recipe.without_prefix()
        self._encoder = vocabulary.encoder(recipe.prefix)
        self.decoder = recipe.decoder
        self._decode = _decoder(recipe.decoder)
        self._normalize = _normalizer(recipe.normalizer)
        self._cuts_at_once = (recipe.normalizer is None or recipe.is_form) and not recipe.adds_space

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._native.num_tokens

    @property
    def longest_token(self) -> int:
        """Number of characters in the longest token."""
        return self._native.longest

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text."""
        ids = self._encode(text)
        return [*self._recipe.before, *ids, *self._recipe.after] if add_special_tokens else ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Return the ids of several texts."""
        return [self.encode(text, add_special_tokens) for text in texts]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of ids; unknown ones give none."""
        return self._decode(self.visible_tokens(token_ids, skip_special_tokens))

    def token(self, token_id: int) -> str | None:
        """Return a token's spelling."""
        return self._native.token(token_id)

    def token_id(self, token: str) -> int | None:
        """Return the id of a spelling."""
        return self._native.token_id(token)

    def is_special(self, token_id: int) -> bool:
        """Return True for an added token that is special."""
        return bool(self._native.flags(token_id) & IS_SPECIAL)

    def is_added(self, token_id: int) -> bool:
        """Return True for an added token."""
        return bool(self._native.flags(token_id) & IS_ADDED)

    def visible_tokens(self, token_ids: Sequence[int], skip_special_tokens: bool) -> list[str]:
        """Return the spellings that a decoder is handed."""
        native = self._native
        if skip_special_tokens:
            token_ids = [token_id for token_id in token_ids if not native.flags(token_id) & IS_SPECIAL]
        return [token for token in map(native.token, token_ids) if token is not None]

    def _encode(self, text: str) -> list[int]:
        """Encode a text without the tokens around it."""
        if self._cuts_at_once and (text.isascii() or self._normalize is None or self._normalize(text) == text):
            return self._encoder.encode(text, *_cut(self._cutter, text))
        ids: list[int] = []
        for number, (begin, end) in zip(*_cut(self._outer_cutter, text), strict=True):
            if number:
                ids.append(self._recipe.added[self._outer_numbers[number - 1]]["id"])
            else:
                ids += self._encode_changed(text[begin:end])
        return ids

    def _encode_changed(self, text: str) -> list[int]:
        """Encode text between those added tokens that are found before it is changed."""
        if self._normalize is not None:
            text = self._normalize(text)
        if self._recipe.adds_space and not text.startswith(" "):
            text = f" {text}"
        numbers, spans = _cut(self._inner_cutter, text)
        return self._encoder.encode(text, [self._inner_numbers[number] for number in numbers], spans)

    @functools.cached_property
    def _cutter(self) -> tokenizers.Tokenizer:
        """Cuts text that the normalizer leaves as it is."""
        return make_cutter(self._recipe.added, self._recipe.cuts)

    @functools.cached_property
    def _outer_numbers(self) -> list[int]:
        """Places of the added tokens that are found in the text as it comes."""
        comes_first = self._recipe.adds_space or self._normalize is None
        added = self._recipe.added
        return [at for at, entry in enumerate(added) if comes_first or not entry.get("normalized")]

    @functools.cached_property
    def _inner_numbers(self) -> list[int]:
        """0 for text, then the numbers of the added tokens that are found in changed text."""
        outer = set(self._outer_numbers)
        return [0, *(at + 1 for at in range(len(self._recipe.added)) if at not in outer)]

    @functools.cached_property
    def _outer_cutter(self) -> tokenizers.Tokenizer:
        return make_cutter([self._recipe.added[at] for at in self._outer_numbers], [])

    @functools.cached_property
    def _inner_cutter(self) -> tokenizers.Tokenizer:
        return make_cutter([self._recipe.added[number - 1] for number in self._inner_numbers[1:]], self._recipe.cuts)


def _cut(cutter: tokenizers.Tokenizer, text: str) -> _Cut:
    """Return the numbers of pieces and their places; long text is cut while other threads run."""
    if len(text) > _LONG_TEXT:
        encoding = cutter.encode_batch([text], add_special_tokens=False)[0]
    else:
        encoding = cutter.encode(text, add_special_tokens=False)
    return encoding.ids, encoding.offsets


def _decoder(entry: JsonObject | None) -> Callable[[list[str]], str]:
    if entry is None:
        return " ".join
    decode: Callable[[list[str]], str] = make_part("decoder", entry).decode
    return decode


def _normalizer(entry: JsonObject | None) -> Callable[[str], str] | None:
    if entry is None:
        return None
    normalize: Callable[[str], str] = make_part("normalizer", entry).normalize_str
    return normalize
