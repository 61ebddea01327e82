"""Give each text of an answer the log probabilities of its own tokens, without those of thinking, calls and marks.

An answer comes as pieces of text beside the tokens that it was made of. The bytes of the tokens are looked through for
each piece in turn, so that a token whose text was held back for a while, or shown in two pieces, still stands where its
text begins. Does not know how an answer is divided into pieces.
"""

from __future__ import annotations

from tokenmill.core.answer import PieceKind
from tokenmill.core.messages import TextOutput
from tokenmill.serving.server.openai.chat_choices import ChatTokenLogprobs, token_logprobs


class TextLogprobs:
    """The tokens of one answer whose text is still to come."""

    def __init__(self) -> None:
        """Begin an answer."""
        self._waiting: list[ChatTokenLogprobs] = []
        # What is left of the text of a token that has been taken.
        self._begun = b""

    def add(self, output: TextOutput) -> None:
        """Add the tokens of a delta, or of a whole answer."""
        self._waiting += token_logprobs(output)

    def take(self, kind: PieceKind, text: str) -> list[ChatTokenLogprobs]:
        """Return the tokens of a further piece; of a piece that is no text they are dropped."""
        if not self._waiting and not self._begun:
            return []
        wanted, spelled = text.encode(), self._begun + b"".join(bytes(token.bytes) for token in self._waiting)
        start = spelled.find(wanted)
        if start < 0:
            # A broken character is shown in another spelling; the text of a call may be written anew.
            return self._all() if kind is PieceKind.TEXT else []
        taken, end = list[ChatTokenLogprobs](), start + len(wanted)
        at, self._begun = len(self._begun), self._begun[end:]
        while self._waiting and at < end:
            token = self._waiting.pop(0)
            at += len(token.bytes)
            if at > start:
                taken.append(token)
                self._begun = spelled[end:at]
        return taken if kind is PieceKind.TEXT else []

    def _all(self) -> list[ChatTokenLogprobs]:
        taken, self._waiting, self._begun = self._waiting, [], b""
        return taken
