"""How /v1/chat/completions spells its choices."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from tokenmill.frontend.answer import AnswerParser, AnswerPart, CallPart
from tokenmill.messages import Logprob, TextOutput
from tokenmill.request import FinishReason
from tokenmill.server.reply_format import finish_reason_text, finite, positions, spell
from tokenmill.server.tool_fields import AnswerStyle

CHAT = "chat.completion"
CHAT_CHUNK = "chat.completion.chunk"


class ChatLogprob(msgspec.Struct):
    """One token's log probability; `bytes` also where the token is a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprobs(ChatLogprob):
    """The same with the most likely tokens at its position."""

    top_logprobs: list[ChatLogprob]


class ChatLogprobs(msgspec.Struct):
    """`logprobs` of a choice."""

    content: list[ChatTokenLogprobs]
    refusal: None = None


class FunctionCall(msgspec.Struct):
    """A function with arguments, which are JSON if the model has it right."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    """A call in a message."""

    id: str
    function: FunctionCall
    type: str = "function"


class FunctionDelta(msgspec.Struct):
    """A part of a call; its name comes first."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(msgspec.Struct):
    """A part of call number `index`."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(msgspec.Struct):
    """The assistant's message. `reasoning` comes under vLLM's older name as well."""

    role: str
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    """A part of the assistant's message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """A choice of a document."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """A choice of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatFormat:
    """Spells the choices of one call."""

    def __init__(self, style: AnswerStyle, role: str = "assistant", return_token_ids: bool = False) -> None:
        self._style = style
        self._role = role
        self._return_token_ids = return_token_ids
        self._parsers: dict[int, AnswerParser] = {}

    def chunk_choices(self, index: int, output: TextOutput) -> list[ChatChunkChoice]:
        """See `ReplyFormat`. The first chunk of a choice brings its role."""
        is_first = index not in self._parsers
        if is_first:
            self._parsers[index] = self._style.parser(output.is_thinking)
        parser = self._parsers[index]
        part = parser.feed(output.text)
        ends = output.finish_reason is not None
        if ends:
            part.add(parser.finish())
        if not (is_first or ends or part or output.logprobs or self._return_token_ids):
            return []
        return [
            ChatChunkChoice(
                index=index,
                delta=self._delta(part, is_first),
                logprobs=_logprobs(output),
                finish_reason=_finish_reason(output, parser),
                stop_reason=output.stop_reason if ends else UNSET,
                token_ids=output.token_ids if self._return_token_ids else UNSET,
            )
        ]

    def choice(self, index: int, output: TextOutput) -> ChatChoice:
        """See `ReplyFormat`."""
        parser = self._style.parser(output.is_thinking)
        part = parser.feed(output.text)
        part.add(parser.finish())
        return ChatChoice(
            index=index,
            message=self._message(part),
            logprobs=_logprobs(output),
            finish_reason=_finish_reason(output, parser),
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._return_token_ids else UNSET,
        )

    def _message(self, part: AnswerPart) -> ChatMessage:
        calls = [ToolCall(self._style.call_id(), FunctionCall(c.name or "", c.arguments)) for c in part.calls]
        reasoning = part.reasoning or UNSET
        content = part.content or (None if calls or part.reasoning else "")
        return ChatMessage(self._role, content, None, reasoning, reasoning, calls or UNSET)

    def _delta(self, part: AnswerPart, is_first: bool) -> ChatDelta:
        calls = [self._call_delta(call) for call in part.calls]
        reasoning = part.reasoning or UNSET
        role, empty = (self._role, "") if is_first else (UNSET, UNSET)
        return ChatDelta(role, part.content or empty, reasoning, reasoning, calls or UNSET)

    def _call_delta(self, call: CallPart) -> ToolCallDelta:
        if call.name is None:
            return ToolCallDelta(call.index, FunctionDelta(arguments=call.arguments))
        function = FunctionDelta(call.name, call.arguments)
        return ToolCallDelta(call.index, function, self._style.call_id(), "function")


def _finish_reason(output: TextOutput, parser: AnswerParser) -> str | None:
    if output.finish_reason is FinishReason.STOP and parser.num_calls:
        return "tool_calls"
    return finish_reason_text(output.finish_reason)


def _logprobs(output: TextOutput) -> ChatLogprobs | None:
    if output.logprobs is None:
        return None
    content = []
    for position in positions(output):
        token = _spelled(output, position.sampled)
        top = [_spelled(output, entry) for entry in position.top]
        content.append(ChatTokenLogprobs(token.token, token.logprob, token.bytes, top))
    return ChatLogprobs(content)


def _spelled(output: TextOutput, entry: Logprob) -> ChatLogprob:
    raw = spell(output, entry.token_id)
    return ChatLogprob(raw.decode("utf-8", "replace"), finite(entry.logprob), list(raw))
