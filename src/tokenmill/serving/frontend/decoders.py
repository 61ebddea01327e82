"""The decoders of tokenizer.json as incremental stages, which decode a stream of tokens in linear time.

A decoder turns the strings of tokens into text. The `tokenizers` library runs it over a whole sequence; these stages
run it over a stream, and what they give concatenates to exactly the same text. A stage holds back what it cannot
decide yet (half a UTF-8 character, a run of byte tokens) until more comes or `finish` is called.

Knows nothing of ids, vocabularies or special tokens.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.vocabulary.byte_level import byte_level_bytes

# In this order; see `cleanup` in wordpiece.rs of `tokenizers`.
_CLEANED = (
    *((f" {mark}", mark) for mark in (".", "?", "!", ",")),
    (" ' ", "'"),
    *((f" {end}", end) for end in ("n't", "'m")),
    (" do not", " don't"),
    *((f" {end}", end) for end in ("'s", "'ve", "'re")),
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")


class Stage(Protocol):
    """One decoder of a chain. Its pieces are token strings, or parts of them once an earlier stage has joined them."""

    def push(self, pieces: list[str]) -> list[str]:
        """Decode further pieces; return the text that is certain by now."""
        ...

    def finish(self) -> list[str]:
        """Return what was held back; nothing may be pushed afterwards."""
        ...


class PerPiece:
    """A decoder that handles one token at a time; `first` says whether it begins the sequence."""

    def __init__(self, decode: Callable[[str, bool], str]) -> None:
        self._decode = decode
        self._first = True

    def push(self, pieces: list[str]) -> list[str]:
        """Decode each piece by itself."""
        decoded = []
        for piece in pieces:
            decoded.append(self._decode(piece, self._first))
            self._first = False
        return decoded

    def finish(self) -> list[str]:
        """Return nothing: this decoder holds nothing back."""
        return []


class ByteLevel:
    """GPT-2's byte level: each character of a token stands for a byte, and the bytes of all tokens are UTF-8 text."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, pieces: list[str]) -> list[str]:
        """Decode up to the last whole character."""
        return [self._utf8.decode(b"".join(byte_level_bytes(piece) for piece in pieces))]

    def finish(self) -> list[str]:
        """Return U+FFFD for a character that is still incomplete."""
        return [self._utf8.decode(b"", final=True)]


class ByteFallback:
    """SentencePiece's byte fallback: a run of `<0xE2>` tokens is one UTF-8 text, or one U+FFFD a byte if it is invalid.

    Whether a run is valid is only known at its end, so all of it is held back.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, pieces: list[str]) -> list[str]:
        """Collect byte tokens; release the run before any other token."""
        decoded = []
        for piece in pieces:
            byte = _BYTE_TOKEN.fullmatch(piece)
            if byte:
                self._run.append(int(byte[1], 16))
            else:
                decoded += [*self.finish(), piece]
        return decoded

    def finish(self) -> list[str]:
        """Release the run."""
        run, self._run = bytes(self._run), bytearray()
        if not run:
            return []
        try:
            return [run.decode("utf-8")]
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)


class StripStart:
    """Removes up to `count` leading `content` characters of the whole text (its pieces have been fused before)."""

    def __init__(self, content: str, count: int) -> None:
        self._content = content
        self._left = count

    def push(self, pieces: list[str]) -> list[str]:
        """Strip while still at the start of the text."""
        text = "".join(pieces)
        while self._left and text:
            if text[0] != self._content:
                self._left = 0
                break
            text = text[1:]
            self._left -= 1
        return [text]

    def finish(self) -> list[str]:
        """Return nothing: this decoder holds nothing back."""
        return []


def build_stages(decoder: dict[str, Any] | None, source: str) -> list[Stage]:
    """Build the stages of the `decoder` entry of a tokenizer.json; without one, tokens are joined by spaces.

    Args:
        source: the file the entry is from, for messages.

    Raises:
        InvalidCheckpoint: a decoder that cannot be run incrementally, by name.
    """
    if decoder is None:
        return [PerPiece(lambda piece, first: piece if first else " " + piece)]
    chain = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    stages: list[Stage] = []
    fused = False
    for entry in chain:
        kind = entry.get("type")
        if kind != "Fuse":
            stages.append(_build_stage(entry, fused, source))
        fused = fused or kind in ("Fuse", "ByteLevel")
    return stages


def _build_stage(entry: dict[str, Any], fused: bool, source: str) -> Stage:
    kind = str(entry.get("type"))
    if kind == "ByteLevel" and not fused:
        return ByteLevel()
    if kind == "ByteFallback" and not fused:
        return ByteFallback()
    if (
        kind == "Replace"
        and "String" in entry.get("pattern", {})
        and (not fused or len(entry["pattern"]["String"]) == 1)
    ):
        pattern, content = entry["pattern"]["String"], entry["content"]
        return PerPiece(lambda piece, _first: piece.replace(pattern, content))
    if kind == "Strip" and entry.get("stop", 0) == 0:
        content, count = entry["content"], entry["start"]
        if fused:
            return StripStart(content, count)
        return PerPiece(lambda piece, _first: _strip_start(piece, content, count))
    if kind in _WORDS and not fused:
        return PerPiece(_WORDS[kind](entry))
    raise InvalidCheckpoint(f"{source}: the decoder {kind!r} is not supported in this form: {entry}")


def _word_pieces(entry: dict[str, Any]) -> Callable[[str, bool], str]:
    prefix, cleans = entry["prefix"], entry.get("cleanup", False)

    def decode(piece: str, first: bool) -> str:
        text = piece if first else piece[len(prefix) :] if piece.startswith(prefix) else f" {piece}"
        return _cleaned(text) if cleans else text

    return decode


def _cleaned(text: str) -> str:
    """Return a token's text without the spaces before punctuation, as the `tokenizers` library cleans it."""
    for spaced, joined in _CLEANED:
        text = text.replace(spaced, joined)
    return text


def _spaced_pieces(entry: dict[str, Any]) -> Callable[[str, bool], str]:
    replacement = entry.get("replacement", "▁")
    keeps_first = entry.get("prepend_scheme", "always") == "never" or entry.get("add_prefix_space") is False
    return lambda piece, first: piece.replace(replacement, "" if first and not keeps_first else " ")


# Decoders that see one token at a time, and whether it is the first.
_WORDS: Mapping[str, Callable[[dict[str, Any]], Callable[[str, bool], str]]] = MappingProxyType(
    {"WordPiece": _word_pieces, "Metaspace": _spaced_pieces}
)


def _strip_start(piece: str, content: str, count: int) -> str:
    while count and piece.startswith(content):
        piece, count = piece[len(content) :], count - 1
    return piece
