"""From the deltas of an answer to what they say: content, thoughts and tool calls."""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.frontend.answer import AnswerParser, AnswerPart
from tokenmill.messages import TextOutput


class AnswerReader:
    """Reads one answer."""

    def __init__(self, make_parser: Callable[[bool], AnswerParser]) -> None:
        """`make_parser` is told whether the prompt has begun the model's thinking."""
        self._make_parser = make_parser
        self._parser: AnswerParser | None = None

    def read(self, output: TextOutput) -> list[AnswerPart]:
        """What a delta says; the last one also brings what was held back."""
        if self._parser is None:
            self._parser = self._make_parser(output.is_thinking)
        parts = [self._parser.feed(output.text)]
        if output.finish_reason is not None:
            parts.append(self._parser.finish())
        return parts
