"""Give each text of an answer the log probabilities of its own tokens, without those of thinking, calls and marks.

An answer comes as pieces of text beside the tokens that it was made of. The bytes of the tokens are looked through for
each piece in turn, so that a token whose text was held back for a while, or shown in two pieces, still stands where its
text begins. Does not know how an answer is divided into pieces.
"""

from __future__ import annotations

from tokenmill.core.answer import AnswerPiece, PieceKind
from tokenmill.core.messages import TextOutput
from tokenmill.serving.server.openai.chat_choices import ChatTokenLogprobs, token_logprobs


class TextLogprobs:
    """The tokens of one answer whose text is still to come."""

    def __init__(self) -> None:
        """Begin an answer."""
        self._waiting: list[ChatTokenLogprobs] = []
        # What is left of the text of a token that has been taken.
        self._begun = b""

    def of(self, output: TextOutput) -> list[list[ChatTokenLogprobs]]:
        """Return the tokens of each piece that a delta, or a whole answer, has a text for; none if that is no text."""
        self._waiting += token_logprobs(output)
        pieces = [AnswerPiece(PieceKind.TEXT, output.text)] if output.answer is None else output.answer
        pieces = [piece for piece in pieces if piece.text]
        taken = [self._take(piece.text.encode(), piece is pieces[-1], piece.kind) for piece in pieces]
        return [own if piece.kind is PieceKind.TEXT else [] for piece, own in zip(pieces, taken, strict=True)]

    def _take(self, wanted: bytes, is_last: bool, kind: PieceKind) -> list[ChatTokenLogprobs]:
        """Take the tokens of a text, which stands behind all others if it is the last one."""
        if not self._waiting and not self._begun:
            return []
        spelled = self._begun + b"".join(bytes(token.bytes) for token in self._waiting)
        start = spelled.rfind(wanted) if is_last else spelled.find(wanted)
        if start < 0:
            return self._scattered(wanted) if kind is PieceKind.TEXT else []
        taken, end = list[ChatTokenLogprobs](), start + len(wanted)
        at, self._begun = len(self._begun), self._begun[end:]
        while self._waiting and at < end:
            token = self._waiting.pop(0)
            at += len(token.bytes)
            if at > start:
                taken.append(token)
                self._begun = spelled[end:at]
        return taken

    def _scattered(self, wanted: bytes) -> list[ChatTokenLogprobs]:
        """Return the tokens of a text with tokens between them that are not shown."""
        taken, left = list[ChatTokenLogprobs](), wanted
        for token in reversed(self._waiting):
            spelled = bytes(token.bytes)
            if spelled and left.endswith(spelled):
                taken.append(token)
                left = left.removesuffix(spelled)
        # A broken character is shown in another spelling than its tokens have.
        found = self._waiting if left else taken[::-1]
        self._waiting, self._begun = [], b""
        return found
