"""How many tokens of an answer are thinking: what `usage` calls reasoning tokens."""

from __future__ import annotations

from tokenmill.frontend.reasoning.splitter import ReasoningSplitter
from tokenmill.frontend.reasoning.styles import ReasoningStyle


class ThoughtCounter:
    """For one answer. The marks around the thinking count with it; so does a delta in which it ends.

    Attributes:
        num_tokens: those of the thinking so far.
        is_over: the answer has begun, nothing more is counted.
    """

    def __init__(self, style: ReasoningStyle, has_begun: bool) -> None:
        """`has_begun`: the prompt has begun the thinking."""
        self._splitter = ReasoningSplitter(style, has_begun)
        self._num_unsure = 0
        self.num_tokens = 0
        self.is_over = False

    def take(self, text: str, num_tokens: int) -> None:
        """Take in a delta."""
        if self.is_over:
            return
        was_thinking = self._splitter.is_thinking
        self._splitter.feed(text)
        self._num_unsure += num_tokens
        self.is_over = self._splitter.is_answering
        # Until the first mark is whole or missed, it is not known what the tokens belong to.
        if was_thinking or self._splitter.has_thought:
            self.num_tokens, self._num_unsure = self.num_tokens + self._num_unsure, 0
