"""The parts of an answer, in their order: text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import msgspec


class PieceKind(Enum):
    """The kind of a piece of an answer."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class AnswerPiece(msgspec.Struct, array_like=True):
    """A piece of an answer.

    Attributes:
        text: of a call: the JSON of its arguments, as far as the model got it right.
        name: the function, where a call begins; None: the piece continues the call before it, or is no call.
    """

    kind: PieceKind
    text: str
    name: str | None = None


def joined(pieces: Iterable[AnswerPiece]) -> list[AnswerPiece]:
    """Join adjacent pieces of an answer where possible."""
    whole: list[AnswerPiece] = []
    texts: list[list[str]] = []
    for piece in pieces:
        if piece.name is None and whole and whole[-1].kind is piece.kind:
            texts[-1].append(piece.text)
        else:
            whole.append(AnswerPiece(piece.kind, "", piece.name))
            texts.append([piece.text])
    for piece, parts in zip(whole, texts, strict=True):
        piece.text = "".join(parts)
    return whole
