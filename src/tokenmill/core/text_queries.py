"""Questions that a text worker answers by itself, without an engine, and its answers."""

from __future__ import annotations

from typing import Any, Literal

from tokenmill.core.part_messages import Message


class EncodeText(Message, kw_only=True):
    """Tokenize a text or a chat without generating.

    Attributes:
        wants: the ids with their spelling in the vocabulary, with their bytes too, or the text that a chat becomes.
    """

    id: str
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool = True
    wants: Literal["ids", "pieces", "text"] = "ids"


class DecodeTokens(Message):
    """Turn token ids into text without generating."""

    id: str
    token_ids: list[int]


class FindParsers(Message):
    """Ask how the model writes calls and marks its thinking; answered with `ParsersFound`."""

    id: str


class Encoded(Message):
    """Reply to `EncodeText`; `pieces` and `text` are there where they were asked for."""

    id: str
    token_ids: list[int]
    tokens: list[str]
    pieces: list[bytes] = []
    text: str = ""


class Decoded(Message):
    """Reply to `DecodeTokens`."""

    id: str
    text: str


class ParsersFound(Message, kw_only=True):
    """Reply to `FindParsers`: names of `--tool-call-parser` and `--reasoning-parser`, and why; a name "": none."""

    id: str
    notation: str
    notation_reason: str
    style: str
    style_reason: str


TextQuery = EncodeText | DecodeTokens | FindParsers
TextReply = Encoded | Decoded | ParsersFound
