"""Convert text to token ids and back with one tokenizer.json, by the `tokenizers` library or a mapped vocabulary.

Does not know chat templates, requests or the model's own vocabulary size (which may be larger).
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from tokenmill.config.model_files import read_json
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.core.json_text import whole_characters
from tokenmill.model.vocabulary.byte_level import byte_level_bytes
from tokenmill.model.vocabulary.mapped_backend import MappedBackend
from tokenmill.model.vocabulary.mapped_file import FLAGS, open_vocabulary
from tokenmill.serving.frontend.decoders import ByteLevel, Stage, build_stages
from tokenmill.serving.frontend.library_backend import Backend, LibraryBackend


class _TokenizerFile(msgspec.Struct):
    """The one entry of tokenizer.json that is read here; msgspec skips the rest fast."""

    decoder: dict[str, Any] | None = None


class Tokenizer:
    """One tokenizer; `load` reads it from a checkpoint's folder.

    Attributes:
        vocab_size: number of ids, added tokens included.
        bos_token, eos_token: the strings named by tokenizer_config.json, or None.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        config: dict[str, Any] | None = None,
        source: str = "tokenizer.json",
    ) -> None:
        self._backend = backend
        self._source = source
        self._config = config or {}
        self._is_byte_level = any(isinstance(stage, ByteLevel) for stage in self.stages())
        self.bos_token = _token_text(self._config.get("bos_token"))
        self.eos_token = _token_text(self._config.get("eos_token"))
        self._bos_change = self._find_bos_change()
        self._outside_text: dict[int, Sequence[int]] = {}

    @classmethod
    def load(cls, folder: Path, cache: Path | None = None) -> Tokenizer:
        """Read tokenizer.json and tokenizer_config.json.

        Args:
            cache: the folder of mapped vocabularies, where a large one is taken from or put; None: it is not mapped.

        Raises:
            InvalidCheckpoint: tokenizer.json is missing or broken, or its decoder cannot run incrementally.
        """
        config = read_json(folder, "tokenizer_config.json")
        vocabulary = None if cache is None else open_vocabulary(folder, cache)
        backend = _library(folder, config) if vocabulary is None else MappedBackend(vocabulary)
        return cls(backend, config=config, source=str(folder / "tokenizer.json"))

    @property
    def path(self) -> Path:
        """The tokenizer.json that it was read from."""
        return Path(self._source)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._backend.vocab_size

    @property
    def longest_token(self) -> int:
        """Number of characters in the longest token: n tokens stand for at most n times as many."""
        return self._backend.longest_token

    @property
    def special_tokens(self) -> dict[str, str]:
        """Named special tokens (`bos_token`, `eos_token`, `pad_token` ...) for chat templates."""
        named = {key: _token_text(value) for key, value in self._config.items() if key.endswith("_token")}
        return {key: text for key, text in named.items() if text is not None}

    @functools.cached_property
    def added_first(self) -> int | None:
        """Id of the token added before every text, usually BOS; None without one."""
        bare, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        return whole[0] if whole[:1] != bare[:1] else None

    @property
    def added_end(self) -> int | None:
        """Id of the token that tokenizer_config.json adds behind every text, in tokenizer.json or not; None: none."""
        is_added = self._config.get("add_eos_token") is True and self.eos_token is not None
        return self._backend.token_id(self.eos_token or "") if is_added else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text; `add_special_tokens` adds the tokens that the model expects around plain text (such as BOS).

        Lone surrogates, which no text file can hold, are encoded as U+FFFD.
        """
        if not text.isascii():
            text = whole_characters(text)
        ids = self._backend.encode(text, add_special_tokens)
        return self._with_bos_change(ids) if add_special_tokens else ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Encode several texts at once."""
        batch = self._backend.encode_batch(texts, add_special_tokens)
        return [self._with_bos_change(ids) for ids in batch] if add_special_tokens else batch

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode a whole sequence; unknown ids give no text."""
        return self._backend.decode(token_ids, skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it, or None for an unknown id."""
        return self._backend.token(token_id)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its spelling in the vocabulary, or None for an unknown token."""
        return self._backend.token_id(token)

    def visible_tokens(self, token_ids: Sequence[int], skip_special_tokens: bool) -> list[str]:
        """Return the token strings that `decode` would hand to the decoder."""
        return self._backend.visible_tokens(token_ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token in a text, even if they are only part of a character."""
        token = self._backend.token(token_id)
        if token is None:
            return b""
        if self._backend.is_special(token_id):
            return token.encode()
        if self._is_byte_level:
            return byte_level_bytes(token)
        if len(token) == 6 and token.startswith("<0x"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    def ids_outside_text(self, vocab_size: int) -> Sequence[int]:
        """Return the ids below `vocab_size` that are no text of their own: added tokens, parts of characters, gaps."""
        if vocab_size not in self._outside_text:
            is_added = self._backend.is_added
            outside = (i for i in range(vocab_size) if is_added(i) or not self._is_text(i))
            self._outside_text[vocab_size] = array("i", outside)
        return self._outside_text[vocab_size]

    def _is_text(self, token_id: int) -> bool:
        try:
            return bool(self.token_bytes(token_id).decode())
        except UnicodeDecodeError:
            return False

    @property
    def joins_with_spaces(self) -> bool:
        """True if decoding puts spaces between all tokens, special ones too."""
        return self._backend.decoder is None

    def stages(self) -> list[Stage]:
        """Return new decoder stages for one sequence."""
        return build_stages(self._backend.decoder, self._source)

    def _find_bos_change(self) -> int | None:
        """Compare `add_bos_token` with tokenizer.json; return BOS's id to add it, -1 to drop it, None for no change."""
        wanted = self._config.get("add_bos_token")
        bos_id = self._backend.token_id(self.bos_token) if self.bos_token else None
        if wanted is None or bos_id is None:
            return None
        has_bos = self._backend.encode("", add_special_tokens=True)[:1] == [bos_id]
        if wanted == has_bos:
            return None
        return int(bos_id) if wanted else -1

    def _with_bos_change(self, ids: list[int]) -> list[int]:
        if self._bos_change is None:
            return ids
        return ids[1:] if self._bos_change == -1 else [self._bos_change, *ids]


class IncrementalDetokenizer:
    """Decodes the growing ids of one request: its text deltas join to exactly `Tokenizer.decode` of all ids.

    It takes time linear in the new tokens, whatever bytes they stand for.

    What cannot be decided yet (a character whose bytes are not all there) is held back until it can, or until
    `finish`.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stages = tokenizer.stages()

    def push(self, token_ids: Sequence[int]) -> str:
        """Take in new ids and return the text they complete."""
        pieces = self._tokenizer.visible_tokens(token_ids, self._skip_special_tokens)
        if not pieces:
            return ""
        for stage in self._stages:
            pieces = stage.push(pieces)
        return "".join(pieces)

    def finish(self) -> str:
        """Return the text held back; nothing may be pushed afterwards."""
        pieces: list[str] = []
        for stage in self._stages:
            pieces = [*stage.push(pieces), *stage.finish()] if pieces else stage.finish()
        return "".join(pieces)


def _token_text(entry: object) -> str | None:
    """Return a special token of tokenizer_config.json, which is a string or an object with a `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _library(folder: Path, config: dict[str, Any]) -> LibraryBackend:
    """Return the library's tokenizer of a folder; raises as `Tokenizer.load`."""
    path = folder / "tokenizer.json"
    try:
        raw = path.read_bytes()
        decoder = msgspec.json.decode(raw, type=_TokenizerFile).decoder
        library = tokenizers.Tokenizer.from_buffer(raw)
    except FileNotFoundError as error:
        raise InvalidCheckpoint(f"{folder} has no tokenizer.json") from error
    except OSError as error:
        raise InvalidCheckpoint(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # the library raises a bare Exception for what it cannot parse
        raise InvalidCheckpoint(f"{path} is not a tokenizer: {error}") from error
    library.no_truncation()
    library.no_padding()
    _add_missing_tokens(library, config)
    return LibraryBackend(library, decoder)


def _add_missing_tokens(library: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Add the tokens that only tokenizer_config.json lists, if they get the id that it gives them."""
    entries = config.get("added_tokens_decoder")
    if not isinstance(entries, dict):
        return
    for key, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        content = _token_text(entry)
        if content is None or library.token_to_id(content) is not None:
            continue
        if library.get_vocab_size(with_added_tokens=True) == int(key):
            flags = {name: bool(entry.get(name, False)) for name in FLAGS if name != "special"}
            token = tokenizers.AddedToken(content, special=bool(entry.get("special")), **flags)
            add = library.add_special_tokens if token.special else library.add_tokens
            add([token])
