"""Divide an answer into content blocks for the APIs that reply with a list: reasoning, texts and calls in order."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from tokenmill.core.answer import PieceKind
from tokenmill.core.messages import TextOutput


@dataclass(slots=True)
class Block:
    """One content block; `text` is its text so far, for a call the JSON of its arguments.

    Attributes:
        id: of a call: made here; the client names it when it returns the result.
        name: of a call: the function's name.
    """

    kind: PieceKind
    index: int
    id: str
    name: str = ""
    text: str = ""


class BlockBegins(msgspec.Struct, frozen=True):
    """A new block begins; the one before it has ended."""

    block: Block


class BlockGrows(msgspec.Struct, frozen=True):
    """More text of the latest block."""

    block: Block
    delta: str


class BlockEnds(msgspec.Struct, frozen=True):
    """A block is complete."""

    block: Block


Change = BlockBegins | BlockGrows | BlockEnds


class ContentBlocks:
    """The content blocks of an answer, built as its deltas come."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._is_open = False

    @property
    def has_calls(self) -> bool:
        """True if the model calls a tool."""
        return any(block.kind is PieceKind.CALL for block in self.blocks)

    def add(self, output: TextOutput) -> Iterator[Change]:
        """Add a delta of the answer and yield the changes it makes."""
        if output.answer is None:
            if output.text:
                yield from self._grow(PieceKind.TEXT, output.text)
            return
        for piece in output.answer:
            if piece.name is not None:
                yield from self._begin(PieceKind.CALL, piece.name)
            if piece.text:
                yield from self._grow(piece.kind, piece.text)

    def add_whole(self, output: TextOutput) -> None:
        """Add an answer that is not streamed: first all reasoning, then all text, then the calls."""
        if output.answer is not None:
            order = list(PieceKind)
            output.answer.sort(key=lambda piece: order.index(piece.kind))
        for _ in (*self.add(output), *self.finish()):
            pass

    def finish(self) -> Iterator[Change]:
        """End the last block and yield the changes; an answer without blocks gets one of empty text."""
        if not self.blocks:
            yield from self._begin(PieceKind.TEXT)
        if self._is_open:
            self._is_open = False
            yield BlockEnds(self.blocks[-1])

    def _grow(self, kind: PieceKind, text: str) -> Iterator[Change]:
        if not self._is_open or self.blocks[-1].kind is not kind:
            yield from self._begin(kind)
        block = self.blocks[-1]
        block.text += text
        yield BlockGrows(block, text)

    def _begin(self, kind: PieceKind, name: str = "") -> Iterator[Change]:
        if self._is_open:
            yield BlockEnds(self.blocks[-1])
        self._is_open = True
        self.blocks.append(Block(kind, len(self.blocks), secrets.token_hex(12), name))
        yield BlockBegins(self.blocks[-1])
