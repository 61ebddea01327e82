"""Build the choices of /v1/chat/completions from the outputs of the text worker."""

from __future__ import annotations

import secrets
import string

import msgspec
from msgspec import UNSET, UnsetType

from tokenmill.core.answer import AnswerPiece, PieceKind
from tokenmill.core.messages import TextOutput
from tokenmill.core.plan import Logprob
from tokenmill.core.request import FinishReason
from tokenmill.serving.server.generation.writer import finite, positions, token_bytes
from tokenmill.serving.server.openai.chunks import finish_reason_text

CHAT = "chat.completion"
CHAT_CHUNK = "chat.completion.chunk"
ROLE = "assistant"
_CALL_ID_CHARACTERS = string.ascii_letters + string.digits


class ChatLogprob(msgspec.Struct):
    """The log probability of one token; `bytes` are given even if the token is a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprobs(ChatLogprob):
    """The log probability of one token and of the most likely tokens at its position."""

    top_logprobs: list[ChatLogprob]


class ChatLogprobs(msgspec.Struct):
    """The field `logprobs` of a choice."""

    content: list[ChatTokenLogprobs]
    refusal: None = None


class FunctionCall(msgspec.Struct):
    """A function with arguments, which are JSON unless the model made a mistake."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    """A tool call in a message."""

    id: str
    function: FunctionCall
    type: str = "function"


class FunctionDelta(msgspec.Struct):
    """A part of a function call; its name comes first."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(msgspec.Struct):
    """A part of tool call number `index`."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(msgspec.Struct):
    """The assistant's message; `reasoning` appears under vLLM's older name as well."""

    role: str
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    """A part of the assistant's message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """A choice of a whole document."""

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


class ChatChoices:
    """A `ChoiceEncoder` for the choices of one chat call."""

    def __init__(self, notation: str = "", return_token_ids: bool = False, shows_reasoning: bool = True) -> None:
        """Encode choices; `notation`: the form in which the model writes calls."""
        self._shows_reasoning = shows_reasoning
        self._notation = notation
        self._return_token_ids = return_token_ids
        self._num_calls: dict[int, int] = {}

    def chunk_choices(self, index: int, output: TextOutput) -> list[ChatChunkChoice]:
        """Return the choice for a delta, if it is worth sending; the first chunk of a choice has its role."""
        output = self._shown(output)
        is_first = index not in self._num_calls
        if is_first:
            self._num_calls[index] = 0
        ends = output.finish_reason is not None
        if not (is_first or ends or output.text or output.answer or output.logprobs or self._return_token_ids):
            return []
        return [
            ChatChunkChoice(
                index=index,
                delta=self._delta(index, output, is_first),
                logprobs=_logprobs(output),
                finish_reason=_finish_reason(output, self._num_calls[index]),
                stop_reason=output.stop_reason if ends else UNSET,
                token_ids=output.token_ids if self._return_token_ids else UNSET,
            )
        ]

    def choice(self, index: int, output: TextOutput) -> ChatChoice:
        """Return a whole choice with its text, reasoning and tool calls."""
        output = self._shown(output)
        content, reasoning, pieces = _parts(output)
        calls = [ToolCall(self._call_id(), FunctionCall(piece.name or "", piece.text)) for piece in pieces]
        if not content and (calls or reasoning):
            content = None
        return ChatChoice(
            index=index,
            message=ChatMessage(ROLE, content, None, reasoning or UNSET, reasoning or UNSET, calls or UNSET),
            logprobs=_logprobs(output),
            finish_reason=_finish_reason(output, len(calls)),
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._return_token_ids else UNSET,
        )

    def _shown(self, output: TextOutput) -> TextOutput:
        if self._shows_reasoning or not output.answer:
            return output
        answer = [piece for piece in output.answer if piece.kind is not PieceKind.REASONING]
        return msgspec.structs.replace(output, answer=answer)

    def _delta(self, index: int, output: TextOutput, is_first: bool) -> ChatDelta:
        content, reasoning, pieces = _parts(output)
        calls = [self._call_delta(index, piece) for piece in pieces]
        role, empty = (ROLE, "") if is_first else (UNSET, UNSET)
        return ChatDelta(role, content or empty, reasoning or UNSET, reasoning or UNSET, calls or UNSET)

    def _call_delta(self, index: int, piece: AnswerPiece) -> ToolCallDelta:
        if piece.name is None:
            return ToolCallDelta(self._num_calls[index] - 1, FunctionDelta(arguments=piece.text))
        self._num_calls[index] += 1
        function = FunctionDelta(piece.name, piece.text)
        return ToolCallDelta(self._num_calls[index] - 1, function, self._call_id(), "function")

    def _call_id(self) -> str:
        """Return a new id for a call; Mistral's templates want exactly nine letters and digits."""
        if self._notation == "mistral":
            return "".join(secrets.choice(_CALL_ID_CHARACTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def _parts(output: TextOutput) -> tuple[str | None, str, list[AnswerPiece]]:
    """Return the text, the reasoning and the pieces of calls that an output brings."""
    if output.answer is None:
        return output.text, "", []
    content = reasoning = ""
    calls = []
    for piece in output.answer:
        match piece.kind:
            case PieceKind.TEXT:
                content += piece.text
            case PieceKind.REASONING:
                reasoning += piece.text
            case PieceKind.CALL:
                calls.append(piece)
    return content, reasoning, calls


def _finish_reason(output: TextOutput, num_calls: int) -> str | None:
    if output.finish_reason is FinishReason.STOP and num_calls:
        return "tool_calls"
    return finish_reason_text(output.finish_reason)


def token_logprobs(output: TextOutput) -> list[ChatTokenLogprobs]:
    """Return the log probabilities of an output's tokens; empty if they were not asked for."""
    content = []
    for position in positions(output):
        token = _token(output, position.sampled)
        top = [_token(output, entry) for entry in position.top]
        content.append(ChatTokenLogprobs(token.token, token.logprob, token.bytes, top))
    return content


def _logprobs(output: TextOutput) -> ChatLogprobs | None:
    return None if output.logprobs is None else ChatLogprobs(token_logprobs(output))


def _token(output: TextOutput, entry: Logprob) -> ChatLogprob:
    raw = token_bytes(output, entry.token_id)
    return ChatLogprob(raw.decode("utf-8", "replace"), finite(entry.logprob), list(raw))
