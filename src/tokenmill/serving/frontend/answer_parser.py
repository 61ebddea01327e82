"""Split one chat answer into reasoning, text and tool calls while it streams."""

from __future__ import annotations

from tokenmill.core.answer import AnswerPiece, PieceKind, joined
from tokenmill.core.messages import GenerateText
from tokenmill.serving.frontend.grammar_builder import Thinking
from tokenmill.serving.frontend.reasoning import ReasoningSplitter
from tokenmill.serving.frontend.stop_strings import StopStrings
from tokenmill.serving.frontend.tool_parsers import harmony
from tokenmill.serving.frontend.tool_parsers.protocol import (
    CallArguments,
    CallBegins,
    Content,
    Event,
    ToolParser,
    read_tool,
)
from tokenmill.serving.frontend.tool_parsers.select import NOTATIONS, STYLES


class AnswerParser:
    """Splits off reasoning first, then matches stop strings and reads tool calls in the rest.

    Attributes:
        num_reasoning_tokens: tokens of the reasoning so far, with its marks and the whole delta in which it ends.
        stop_string: the stop string that ended the answer; None without one.
    """

    def __init__(
        self,
        splitter: ReasoningSplitter | None = None,
        tools: ToolParser | None = None,
        max_calls: int | None = None,
        keeps_calls: bool = False,
        is_either: bool = False,
    ) -> None:
        """Begin an answer.

        Args:
            max_calls: drop calls after this many.
            keeps_calls: a grammar writes the calls: stop strings end none, and what a limit cuts off is no content.
            is_either: it is calls, or else text in which what looks like a call is none.
        """
        self.stop_string: str | None = None
        self.num_reasoning_tokens = 0
        self._splitter = splitter
        self._tools = tools
        self._max_calls = max_calls
        self._keeps_calls = keeps_calls and tools is not None
        self._num_unsure = 0
        self._num_calls = 0
        self._space: list[str] = []
        # While it is not known whether the answer is calls: its text, and the events in it.
        self._unsure = ""
        self._early: list[Event] | None = [] if is_either and tools is not None else None

    def feed(self, text: str, num_tokens: int, stops: StopStrings | None = None) -> list[AnswerPiece]:
        """Add a delta of `num_tokens` tokens. `stops` matches stop strings; None: they cannot end the answer yet."""
        splitter = self._splitter
        if splitter is None:
            return self._read(text, stops)
        reasoning, text = self._split(splitter, text, num_tokens)
        if splitter.is_done:
            self._splitter = None
        return [*_pieces(PieceKind.REASONING, reasoning), *self._read(text, stops)]

    def finish(self, stops: StopStrings | None = None, is_cut: bool = False) -> list[AnswerPiece]:
        """End the text and return what was held back. `is_cut`: the model did not end it."""
        reasoning, text = ("", "") if self._splitter is None else self._splitter.finish()
        pieces = [*_pieces(PieceKind.REASONING, reasoning), *self._read(text, stops)]
        early, self._early = self._early or [], None
        pieces += self._answer(self._content_until_stop(early, stops) if self._keeps_calls else early)
        if self._keeps_calls and not is_cut:
            pieces += self._answer(self._content_until_stop(self._unread(), stops))
        held = "" if stops is None or self.stop_string is not None else stops.finish()
        if self._keeps_calls:
            pieces += self._answer([Content(held)])
        else:
            pieces += [*self._read(held, None), *self._answer(self._unread())]
        if self._tools is not None and not self._num_calls:
            pieces += _pieces(PieceKind.TEXT, "".join(self._space))
        return joined(pieces)

    def _unread(self) -> list[Event]:
        return [] if self._tools is None else self._tools.finish()

    def _content_until_stop(self, events: list[Event], stops: StopStrings | None) -> list[Event]:
        """Match stop strings in the content of events; return those up to the first match."""
        if stops is None:
            return [] if self.stop_string is not None else events
        kept: list[Event] = []
        for event in events:
            if self.stop_string is not None:
                break
            match event:
                case Content(text):
                    text, self.stop_string = stops.push(text)
                    kept.append(Content(text))
                case CallBegins():
                    kept += [Content(stops.finish()), event]
                case CallArguments():
                    kept.append(event)
        return kept

    def _until_stop(self, text: str, stops: StopStrings | None) -> str:
        if self.stop_string is not None:
            return ""
        if stops is None:
            return text
        text, self.stop_string = stops.push(text)
        return text

    def _split(self, splitter: ReasoningSplitter, text: str, num_tokens: int) -> tuple[str, str]:
        was_thinking, is_over = splitter.is_thinking, splitter.is_answering
        parts = splitter.feed(text)
        if not is_over:
            self._num_unsure += num_tokens
            # Until the first mark is whole or missed, it is not known what the tokens belong to.
            if was_thinking or splitter.has_thought:
                self.num_reasoning_tokens, self._num_unsure = self.num_reasoning_tokens + self._num_unsure, 0
        return parts

    def _read(self, text: str, stops: StopStrings | None) -> list[AnswerPiece]:
        if not self._keeps_calls:
            text = self._until_stop(text, stops)
        if self._tools is None:
            return _pieces(PieceKind.TEXT, text)
        events = self._tools.feed(text) if text else []
        if self._early is not None:
            self._unsure += text
            self._early += events
            if not (first := next((event for event in self._early if not _is_space(event)), None)):
                return []
            if isinstance(first, Content):
                return self._text_alone(stops)
            events, self._early = self._early, None
        pieces = self._answer(self._content_until_stop(events, stops) if self._keeps_calls else events)
        return joined(pieces) if len(pieces) > 1 else pieces

    def _text_alone(self, stops: StopStrings | None) -> list[AnswerPiece]:
        """Return the text so far, and look for no call in what follows."""
        text = self._until_stop(self._unsure, stops) if self._keeps_calls else self._unsure
        self._tools, self._early, self._keeps_calls = None, None, False
        return _pieces(PieceKind.TEXT, text)

    def _answer(self, events: list[Event]) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = []
        for event in events:
            match event:
                case Content(text):
                    pieces += _pieces(PieceKind.TEXT, self._without_space_at_calls(text))
                case CallBegins(name):
                    self._num_calls += 1
                    self._space.clear()
                    if self._is_wanted:
                        pieces.append(AnswerPiece(PieceKind.CALL, "", name))
                case CallArguments(text):
                    if self._is_wanted:
                        pieces += _pieces(PieceKind.CALL, text)
        return pieces

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self._num_calls <= self._max_calls

    def _without_space_at_calls(self, text: str) -> str:
        """Hold back trailing white space: if a call follows, it is not part of the answer."""
        body = text.rstrip()
        if not body:
            self._space.append(text)
            return ""
        shown = "".join(self._space) + body
        self._space = [text[len(body) :]]
        return shown


def answer_parser(message: GenerateText, thinking: Thinking | None) -> AnswerParser | harmony.HarmonyParser | None:
    """Return the parser of the answer to a message, or None for plain text."""
    rules = message.calls
    if thinking is None and rules is None:
        return None
    most = None if rules is None or rules.is_parallel else 1
    keeps_calls = rules is not None and (rules.is_lazy or rules.is_required)
    if message.reasoning == harmony.STYLE_NAME:
        return harmony.HarmonyParser(rules is not None, most, keeps_calls)
    splitter = None if thinking is None else ReasoningSplitter(STYLES[message.reasoning], thinking.has_begun)
    if rules is None:
        return AnswerParser(splitter)
    tools = [read_tool(tool) for tool in message.tools or ()]
    is_either = message.params.structured_outputs is not None
    return AnswerParser(splitter, NOTATIONS[rules.parser].parser(tools), most, keeps_calls, is_either)


def _is_space(event: Event) -> bool:
    return isinstance(event, Content) and not event.text.strip()


def _pieces(kind: PieceKind, text: str) -> list[AnswerPiece]:
    return [AnswerPiece(kind, text)] if text else []
