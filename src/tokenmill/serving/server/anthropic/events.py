"""Write the answers of /v1/messages: Anthropic's message and the events of its stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tokenmill.core.answer import PieceKind
from tokenmill.core.json_text import decode_json
from tokenmill.core.messages import TextOutput
from tokenmill.core.request import FinishReason
from tokenmill.serving.server.generation.content_blocks import (
    Block,
    BlockBegins,
    BlockEnds,
    BlockGrows,
    Change,
    ContentBlocks,
)
from tokenmill.serving.server.generation.writer import UsageCounter
from tokenmill.serving.server.http.errors import anthropic_body

_ENCODER = msgspec.json.Encoder()


class MessageUsage(msgspec.Struct):
    """Anthropic's `usage`; input tokens are those that the prefix cache did not have."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    volatile_blocks: list[str] | msgspec.UnsetType = msgspec.UNSET


class MessageWriter:
    """A `ReplyWriter` for one Anthropic message."""

    # An event and no comment: clients count the seconds since the last event.
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, id: str, model: str) -> None:
        self._id = id
        self._model = model
        self._blocks = ContentBlocks()
        self._has_begun = False
        self._last: TextOutput | None = None

    def document(self, outputs: Mapping[int, TextOutput], usage: UsageCounter) -> bytes:
        """Return the whole message as JSON."""
        output = outputs[0]
        self._blocks.add_whole(output)
        content = [_content(block, block.text) for block in self._blocks.blocks]
        return _ENCODER.encode(self._message(content, usage) | self._stop(output))

    def events(self, index: int, output: TextOutput, usage: UsageCounter) -> bytes:
        """Return the events for a delta, with `message_start` before the first."""
        self._last = output
        events = b""
        if not self._has_begun:
            self._has_begun = True
            message = self._message([], usage) | {"stop_reason": None, "stop_sequence": None}
            events = _event("message_start", {"message": message})
        changes = self._blocks.add(output)
        return events + b"".join(_change(change) for change in changes)

    def last_events(self, usage: UsageCounter) -> bytes:
        """Return the events that close the last block and the message."""
        assert self._last is not None, "a stream ends after its last output"
        closing = b"".join(_change(change) for change in self._blocks.finish())
        delta = _event("message_delta", {"delta": self._stop(self._last), "usage": _usage(usage)})
        return closing + delta + _event("message_stop", {})

    def failure(self, error: Exception) -> bytes:
        """Return an `error` event."""
        return b"event: error\ndata: " + _ENCODER.encode(anthropic_body(error)) + b"\n\n"

    def _message(self, content: list[dict[str, Any]], usage: UsageCounter) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return head | {"content": content, "usage": _usage(usage)}

    def _stop(self, output: TextOutput) -> dict[str, str | None]:
        stop_string = output.stop_reason if isinstance(output.stop_reason, str) else None
        if output.finish_reason is FinishReason.LENGTH:
            reason = "max_tokens"
        elif output.finish_reason is FinishReason.ABORT:
            reason = "pause_turn"
        elif stop_string is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._blocks.has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop_string}


def _usage(counter: UsageCounter) -> MessageUsage:
    usage = counter.usage()
    details = usage.prompt_tokens_details
    cached = details.cached_tokens
    own = usage.prompt_tokens - cached
    return MessageUsage(own, usage.completion_tokens, cached, volatile_blocks=details.volatile_blocks)


def _content(block: Block, text: str) -> dict[str, Any]:
    match block.kind:
        case PieceKind.TEXT:
            return {"type": "text", "text": text}
        case PieceKind.REASONING:
            return {"type": "thinking", "thinking": text, "signature": ""}
        case PieceKind.CALL:
            return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": _arguments(text)}


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call, or no arguments where the model left them unfinished."""
    try:
        value = decode_json(text or "{}")
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _change(change: Change) -> bytes:
    match change:
        case BlockBegins(block):
            return _event("content_block_start", {"index": block.index, "content_block": _content(block, "")})
        case BlockGrows(block, delta):
            kind, name = {
                PieceKind.TEXT: ("text_delta", "text"),
                PieceKind.REASONING: ("thinking_delta", "thinking"),
                PieceKind.CALL: ("input_json_delta", "partial_json"),
            }[block.kind]
            return _event("content_block_delta", {"index": block.index, "delta": {"type": kind, name: delta}})
        case BlockEnds(block):
            return _event("content_block_stop", {"index": block.index})


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + _ENCODER.encode({"type": kind} | fields) + b"\n\n"
