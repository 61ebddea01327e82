"""harmony, the format of gpt-oss: an answer is messages, whose headers have a channel and perhaps a recipient.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>

Messages in the channel `analysis` are thinking, messages to `functions` are calls, and all others are text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum, auto

from tokenmill.core.answer import AnswerPiece, PieceKind, joined
from tokenmill.core.errors import InvalidRequest
from tokenmill.serving.frontend.free_text import FreeText
from tokenmill.serving.frontend.grammar_builder import GrammarBuilder, literal
from tokenmill.serving.frontend.reasoning import ReasoningStyle
from tokenmill.serving.frontend.stop_strings import StopStrings
from tokenmill.serving.frontend.tool_parsers.protocol import Tool, ToolParser
from tokenmill.serving.frontend.tool_parsers.scanners import MAX_GAP, MarkerFinder, ValueScanner

STYLE_NAME, NOTATION_NAME = "openai_gptoss", "openai"
_START, _CHANNEL, _MESSAGE, _END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
_CONSTRAIN = "<|constrain|>"
_MARKS = (_START, _CHANNEL, _MESSAGE, _END, _CONSTRAIN)
_TO = "to=functions."
_ENDS = (_END, "<|call|>", "<|return|>", _START)
# What the header of a message may begin with; anything else is an answer without one.
_HEADS = (_CHANNEL, _START, _CONSTRAIN, "assistant", "to=")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")

STYLE = ReasoningStyle(
    f"{_CHANNEL}analysis{_MESSAGE}",
    f"{_END}{_START}assistant",
    opening=f"{_CHANNEL}final{_MESSAGE}",
    needs_special_tokens=True,
)


class HarmonyNotation:
    """gpt-oss's notation of calls; answers are read by `HarmonyParser`."""

    needs_special_tokens = True
    writes_objects = True

    def parser(self, tools: Sequence[Tool] = ()) -> ToolParser:
        """Raise AssertionError: `HarmonyParser` reads the whole answer."""
        raise AssertionError("an answer in harmony is read as a whole")

    def rule(self, builder: GrammarBuilder, tools: Sequence[Tool], is_parallel: bool) -> str:
        """Return the rule of one call, since the end of a call ends the answer."""
        calls = " | ".join(
            f"{literal(tool.name)} {json_head} {builder.arguments(tool.parameters, tool.is_strict)}"
            for tool in tools
            for json_head in [builder.marker(" <|constrain|>json<|message|>")]
        )
        return f"({builder.marker(f'{_CHANNEL}commentary to=functions.')} ({calls}))"

    def lazy(self, text: FreeText, tools: Sequence[Tool]) -> str:
        """Return the rule of messages, those to functions with arguments; what stands before a message is its header.

        A header ends with a message mark, and what follows is free until the next start mark.

        Raises:
            InvalidRequest: the vocabulary has no marks, so calls could not be kept to their schemas.
        """
        builder, marker = text.builder, text.builder.marker
        if len(text.ids(_MARKS)) < len(_MARKS):
            raise InvalidRequest(
                "tools: this model's vocabulary lacks the marks of harmony, in which --tool-call-parser openai reads "
                "calls; choose another parser, or --tool-grammar off",
                "tools",
            )
        text.listen_for(_TO)
        to = text.lazily(f"TEXT {literal(_TO)}")
        channel = f"/[ ]?/ {marker(_CHANNEL)} /commentary|analysis/"
        kind = f'{marker(_CONSTRAIN)} "json" | " json" | " "'
        after = f"({channel})? (/[ ]?/ {kind})? {marker(_MESSAGE)}"
        calls = " | ".join(
            f"{literal(tool.name)} ({after}) {builder.arguments(tool.parameters, tool.is_strict)}" for tool in tools
        )
        called = text.rule(f"{text.before((_MESSAGE,))} {to} ({calls})")
        ends = f"<[{','.join(map(str, text.ids((_END, '<|call|>', '<|return|>'))))}]>"
        header, body = text.until((_MESSAGE,)), text.until((_START,))
        last = text.noise((_START,))
        on = f"{header} {body} | {called} ({ends} {body} | {marker(_START)})"
        return f"({text.rule(on)})* ({header} {last} | {called} ({ends} {last})? | {text.noise((_MESSAGE,))})"


class _State(Enum):
    HEADER = auto()
    BODY = auto()
    BETWEEN = auto()


class HarmonyParser:
    """Splits one chat answer while it streams, like `AnswerParser`, with the same attributes.

    Args:
        shows_calls: return calls as calls, otherwise as text.
        max_calls: drop calls after this many.
        keeps_calls: stop strings end no call.
    """

    def __init__(self, shows_calls: bool, max_calls: int | None = None, keeps_calls: bool = False) -> None:
        self.num_reasoning_tokens = 0
        self.stop_string: str | None = None
        self._stops: StopStrings | None = None
        self._shows_calls = shows_calls
        self._max_calls = max_calls
        self._unstopped = {PieceKind.REASONING, PieceKind.CALL} if keeps_calls else {PieceKind.REASONING}
        self._num_calls = 0
        self._state = _State.HEADER  # the prompt ends with the start of a message
        self._finder = MarkerFinder(_MESSAGE)
        self._head = ""
        self._kind: PieceKind | None = PieceKind.TEXT
        self._keeps_calls = keeps_calls
        self._arguments: ValueScanner | None = None
        self._has_begun = False
        self._shown: set[PieceKind] = set()
        self._num_unsure = 0

    def feed(self, text: str, num_tokens: int, stops: StopStrings | None = None) -> list[AnswerPiece]:
        """Add a delta of `num_tokens` tokens; `stops` matches stop strings outside the thinking."""
        self._stops = stops
        was_thinking = self._is_thinking
        pieces: list[AnswerPiece] = []
        while text and self.stop_string is None:
            text = self._read(text, pieces)
        is_thinking = was_thinking or self._is_thinking or any(one.kind is PieceKind.REASONING for one in pieces)
        self._num_unsure += num_tokens
        if is_thinking:
            self.num_reasoning_tokens += self._num_unsure
        if is_thinking or self._state is not _State.HEADER:
            self._num_unsure = 0
        return joined(pieces)

    def finish(self, stops: StopStrings | None = None, is_cut: bool = False) -> list[AnswerPiece]:
        """End the text; return what was held back, except an unfinished header. `is_cut`: the model did not end it."""
        self._stops = stops
        if self.stop_string is not None:
            return []
        held, pieces = self._finder.finish(), list[AnswerPiece]()
        if self._state is _State.BODY:
            self._show(held, pieces)
            if not is_cut:
                self._end_body(pieces)
        elif self._state is _State.HEADER and _CHANNEL not in self._head:
            self._show(self._head + held, pieces)
        if stops is not None and self.stop_string is None:
            self._put(stops.finish(), pieces)
        return joined(pieces)

    @property
    def _is_thinking(self) -> bool:
        return self._state is _State.BODY and self._kind is PieceKind.REASONING

    def _read(self, text: str, pieces: list[AnswerPiece]) -> str:
        """Read up to the next mark, or the end of a call's arguments; return the text after it."""
        if self._arguments is not None:
            end = self._arguments.push(text, 0)
            self._show(text[:end], pieces)
            if self._arguments.is_done:
                # What follows belongs to the end of the message: a mark, perhaps cut off.
                self._arguments, self._kind = None, None
            return text[end:]
        before, marker, rest = self._finder.push(text)
        if self._state is _State.HEADER:
            self._head += before
            if marker:
                self._begin_body(pieces)
            elif self._is_no_header():
                rest, self._head = self._head + self._finder.finish(), ""
                self._kind, self._has_begun = PieceKind.TEXT, False
                self._enter(_State.BODY)
            return rest
        if self._state is _State.BODY:
            self._show(before, pieces)
        if marker:
            if self._state is _State.BODY:
                self._end_body(pieces)
            self._enter(_State.HEADER if marker == _START else _State.BETWEEN)
        return rest

    def _enter(self, state: _State) -> None:
        self._state, self._head = state, ""
        marks = {_State.HEADER: (_MESSAGE,), _State.BODY: _ENDS, _State.BETWEEN: (_START,)}
        self._finder = MarkerFinder(*marks[state])

    def _is_no_header(self) -> bool:
        head = self._head.lstrip()
        if not head:
            return len(self._head) > MAX_GAP
        return not any(head.startswith(one) or one.startswith(head) for one in _HEADS)

    def _begin_body(self, pieces: list[AnswerPiece]) -> None:
        recipient, head = _RECIPIENT.search(self._head), self._head
        self._enter(_State.BODY)
        self._has_begun = False
        if recipient is not None and self._shows_calls:
            self._num_calls += 1
            # Strings of JSON may spell marks.
            self._arguments = ValueScanner() if self._keeps_calls else None
            is_wanted = self._max_calls is None or self._num_calls <= self._max_calls
            self._kind = PieceKind.CALL if is_wanted else None
            if is_wanted:
                pieces.append(AnswerPiece(PieceKind.CALL, "", recipient[1]))
            return
        self._kind = PieceKind.REASONING if _ANALYSIS.search(head) else PieceKind.TEXT

    def _show(self, text: str, pieces: list[AnswerPiece]) -> None:
        """Show a part of a message up to a stop string, which does not end thinking."""
        if self._stops is not None and self._kind not in self._unstopped:
            text, self.stop_string = self._stops.push(text)
        self._put(text, pieces)

    def _put(self, text: str, pieces: list[AnswerPiece]) -> None:
        """Add text to the pieces; start a further message of the same kind on a new line."""
        if not self._has_begun:
            text = text.lstrip()
        if not text or self._kind is None:
            return
        if not self._has_begun and self._kind in self._shown and self._kind is not PieceKind.CALL:
            text = "\n" + text
        self._has_begun = True
        self._shown.add(self._kind)
        pieces.append(AnswerPiece(self._kind, text))

    def _end_body(self, pieces: list[AnswerPiece]) -> None:
        if self._stops is not None and self.stop_string is None:
            self._put(self._stops.finish(), pieces)
        if self._kind is PieceKind.CALL and not self._has_begun:
            pieces.append(AnswerPiece(PieceKind.CALL, "{}"))
