"""How /v1/chat/completions spells its choices."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from tokenmill.messages import Logprob, TextOutput
from tokenmill.server.reply_format import finish_reason_text, finite, positions, spell

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


class ChatMessage(msgspec.Struct):
    """The assistant's message."""

    role: str
    content: str
    refusal: None = None


class ChatDelta(msgspec.Struct):
    """A part of the assistant's message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


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

    def __init__(self, role: str = "assistant", return_token_ids: bool = False) -> None:
        self._role = role
        self._return_token_ids = return_token_ids
        self._begun: set[int] = set()

    def chunk_choices(self, index: int, output: TextOutput) -> list[ChatChunkChoice]:
        """See `ReplyFormat`. The first chunk of a choice brings its role."""
        first = index not in self._begun
        self._begun.add(index)
        ends = output.finish_reason is not None
        if not (first or ends or output.text or output.logprobs or self._return_token_ids):
            return []
        return [
            ChatChunkChoice(
                index=index,
                delta=ChatDelta(role=self._role, content=output.text) if first else _delta(output),
                logprobs=_logprobs(output),
                finish_reason=finish_reason_text(output.finish_reason),
                stop_reason=output.stop_reason if ends else UNSET,
                token_ids=output.token_ids if self._return_token_ids else UNSET,
            )
        ]

    def choice(self, index: int, output: TextOutput) -> ChatChoice:
        """See `ReplyFormat`."""
        return ChatChoice(
            index=index,
            message=ChatMessage(self._role, output.text),
            logprobs=_logprobs(output),
            finish_reason=finish_reason_text(output.finish_reason),
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._return_token_ids else UNSET,
        )


def _delta(output: TextOutput) -> ChatDelta:
    return ChatDelta(content=output.text) if output.text else ChatDelta()


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
