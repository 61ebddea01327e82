"""One answer of a chat, taken apart as it comes: thinking, content, calls of tools."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.frontend.reasoning.splitter import ReasoningSplitter
from tokenmill.frontend.tool_parsers.protocol import CallArguments, CallBegins, Content, Event, ToolParser


@dataclass(slots=True)
class CallPart:
    """A part of call number `index`; the first one has its name."""

    index: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class AnswerPart:
    """What a delta brought."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallPart] = field(default_factory=list)

    def add(self, later: AnswerPart) -> None:
        """Append what came after it."""
        self.reasoning += later.reasoning
        self.content += later.content
        for call in later.calls:
            if self.calls and self.calls[-1].index == call.index:
                self.calls[-1].arguments += call.arguments
            else:
                self.calls.append(call)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class AnswerParser:
    """Thinking is split off first; what is left may hold calls.

    Attributes:
        num_calls: calls so far.
    """

    def __init__(
        self, splitter: ReasoningSplitter | None = None, tools: ToolParser | None = None, max_calls: int | None = None
    ) -> None:
        """`max_calls`: further calls are dropped."""
        self.num_calls = 0
        self._splitter = splitter
        self._tools = tools
        self._max_calls = max_calls
        self._num_seen = 0
        self._space: list[str] = []

    def feed(self, text: str) -> AnswerPart:
        """Take in a delta."""
        if self._splitter is None:
            return self._answer("", text)
        return self._answer(*self._splitter.feed(text))

    def finish(self) -> AnswerPart:
        """The text has ended; what was held back comes out."""
        part = self._answer(*self._splitter.finish()) if self._splitter is not None else AnswerPart()
        if self._tools is not None:
            self._take(self._tools.finish(), part)
            if not self._num_seen:
                part.content += "".join(self._space)
        return part

    def _answer(self, reasoning: str, text: str) -> AnswerPart:
        part = AnswerPart(reasoning)
        if self._tools is None:
            part.content = text
        elif text:
            self._take(self._tools.feed(text), part)
        return part

    def _take(self, events: list[Event], part: AnswerPart) -> None:
        for event in events:
            match event:
                case Content(text):
                    part.content += self._without_space_at_calls(text)
                case CallBegins(name):
                    self._num_seen += 1
                    self._space.clear()
                    if self._is_wanted:
                        self.num_calls += 1
                        part.calls.append(CallPart(self.num_calls - 1, name, ""))
                case CallArguments(text):
                    if self._is_wanted:
                        self._add_arguments(part, text)

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self._num_seen <= self._max_calls

    def _add_arguments(self, part: AnswerPart, text: str) -> None:
        index = self.num_calls - 1
        if part.calls and part.calls[-1].index == index:
            part.calls[-1].arguments += text
        else:
            part.calls.append(CallPart(index, None, text))

    def _without_space_at_calls(self, text: str) -> str:
        """White space that a call may follow is held back: none of it is content."""
        body = text.rstrip()
        if not body:
            self._space.append(text)
            return ""
        shown = "".join(self._space) + body
        self._space = [text[len(body) :]]
        return shown
