"""Turn the token ids of one request into text deltas, which join to exactly `Tokenizer.decode` of all its ids."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.serving.frontend.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Decodes a growing sequence in time linear in the new tokens, whatever bytes they stand for.

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
