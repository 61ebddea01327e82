"""Write the answers of /v1/responses: OpenAI's response object and the events of its stream."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from tokenmill.core.answer import PieceKind
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
from tokenmill.serving.server.generation.writer import PING, UsageCounter
from tokenmill.serving.server.http.errors import error_body
from tokenmill.serving.server.openai.chat_choices import ChatTokenLogprobs
from tokenmill.serving.server.openai.response_logprobs import TextLogprobs
from tokenmill.serving.server.openai.response_tools import ToolName

_ENCODER = msgspec.json.Encoder()
_TEXT_EVENTS = {PieceKind.TEXT: "output_text", PieceKind.REASONING: "reasoning_text"}


class ResponseWriter:
    """A `ReplyWriter` for one response.

    Args:
        head: the fields that are known before the answer.
        keep: called with the response object when it is complete or has failed.
        names: how the client calls tools, by the names that the model knows; those that differ.
        encrypts: thinking comes in a form for the client to send back, too.
    """

    ping = PING

    def __init__(
        self,
        head: dict[str, Any],
        keep: Callable[[dict[str, Any]], None],
        names: Mapping[str, ToolName] = MappingProxyType({}),
        encrypts: bool = False,
    ) -> None:
        self._head = head
        self._keep = keep
        self._names = names
        self._encrypts = encrypts
        self._blocks = ContentBlocks()
        self._tokens = TextLogprobs()
        # By the index of a text block.
        self._logprobs: dict[int, list[ChatTokenLogprobs]] = {}
        self._num_events = 0
        self._last: TextOutput | None = None

    def document(self, outputs: Mapping[int, TextOutput], usage: UsageCounter) -> bytes:
        """Return the complete response object as JSON."""
        output = outputs[0]
        # Before its pieces are put in order; all text becomes one block.
        taken = [token for tokens in self._tokens.of(output) for token in tokens]
        self._blocks.add_whole(output)
        self._logprobs = {block.index: taken for block in self._blocks.blocks if block.kind is PieceKind.TEXT}
        return _ENCODER.encode(self._complete(output, usage))

    def events(self, index: int, output: TextOutput, usage: UsageCounter) -> bytes:
        """Return the events for a delta, with those of the beginning before the first."""
        self._last = output
        tokens = iter(self._tokens.of(output))
        events = [*self._begin(), *self._changes(self._blocks.add(output), tokens)]
        return b"".join(events)

    def last_events(self, usage: UsageCounter) -> bytes:
        """Return the events that close the last item and the response."""
        assert self._last is not None, "a stream ends after its last output"
        events = list(self._changes(self._blocks.finish(), iter(()), _status_at_end(self._last)))
        response = self._complete(self._last, usage)
        kind = "response.completed" if response["status"] == "completed" else "response.incomplete"
        return b"".join([*events, self._event(kind, {"response": response})])

    def failure(self, error: Exception) -> bytes:
        """Return the event `response.failed`."""
        response = failed(self._head, error)
        self._keep(response)
        return self._event("response.failed", {"response": response})

    def _begin(self) -> Iterator[bytes]:
        if not self._num_events:
            response = self._head | {"status": "in_progress", "output": []}
            yield self._event("response.created", {"response": response})
            yield self._event("response.in_progress", {"response": response})

    def _complete(self, output: TextOutput, usage: UsageCounter) -> dict[str, Any]:
        status, details = "completed", None
        if output.finish_reason is FinishReason.LENGTH:
            status, details = "incomplete", {"reason": "max_output_tokens"}
        elif output.finish_reason is FinishReason.ABORT:
            status = "cancelled"
        response = self._head | {
            "status": status,
            "incomplete_details": details,
            "completed_at": time.time() if status == "completed" else None,
            "output": self._items(_status_at_end(output)),
            "usage": _usage(usage),
        }
        self._keep(response)
        return response

    def _items(self, status: str) -> list[dict[str, Any]]:
        """Return all items; `status` is that of the last one, which is incomplete in an answer that is cut off."""
        *whole, last = self._blocks.blocks
        return [*(self._item(block, "completed") for block in whole), self._item(last, status)]

    def _changes(
        self, changes: Iterator[Change], tokens: Iterator[list[ChatTokenLogprobs]], status: str = "completed"
    ) -> Iterator[bytes]:
        """Yield the events of changes; `tokens`: those of each growth."""
        for change in changes:
            match change:
                case BlockBegins(block):
                    fields = _place(block) | {"item": self._item(block, "in_progress")}
                    yield self._event("response.output_item.added", fields)
                    if block.kind is PieceKind.TEXT:
                        fields = _content_place(block) | {"part": _text_part("", [])}
                        yield self._event("response.content_part.added", fields)
                case BlockGrows(block, delta):
                    own = next(tokens)
                    self._logprobs.setdefault(block.index, []).extend(own)
                    # A text inside JSON is known when the JSON is whole.
                    if not self._is_custom(block):
                        yield self._event(*_growth(block, delta, own))
                case BlockEnds(block):
                    yield from self._end(block, status)

    def _end(self, block: Block, status: str) -> Iterator[bytes]:
        item = self._item(block, status)
        if self._is_custom(block):
            place, text = _place(block) | {"item_id": item["id"]}, item["input"]
            yield self._event("response.custom_tool_call_input.delta", place | {"delta": text})
            yield self._event("response.custom_tool_call_input.done", place | {"input": text})
        elif block.kind is PieceKind.CALL:
            fields = _place(block) | {"item_id": item["id"], "arguments": block.text, "name": item["name"]}
            yield self._event("response.function_call_arguments.done", fields)
        else:
            done = f"response.{_TEXT_EVENTS[block.kind]}.done"
            yield self._event(done, _content_place(block) | {"text": block.text, "logprobs": self._tokens_of(block)})
        if block.kind is PieceKind.TEXT:
            fields = _content_place(block) | {"part": _text_part(block.text, self._tokens_of(block))}
            yield self._event("response.content_part.done", fields)
        yield self._event("response.output_item.done", _place(block) | {"item": item})

    def _tokens_of(self, block: Block) -> list[ChatTokenLogprobs]:
        return self._logprobs.get(block.index, [])

    def _is_custom(self, block: Block) -> bool:
        return block.name in self._names and self._names[block.name].is_custom

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": _item_id(block), "status": status}
        match block.kind:
            case PieceKind.CALL:
                name = self._names.get(block.name) or ToolName(block.name)
                if name.is_custom:
                    item["id"] = f"ctc_{block.id}"
                return item | {"call_id": f"call_{block.id}"} | name.item(block.text)
            case PieceKind.REASONING:
                content = [{"type": "reasoning_text", "text": block.text}] if block.text else []
                sent_back = {"encrypted_content": opaque(block.text)} if self._encrypts and block.text else {}
                return item | {"type": "reasoning", "summary": [], "content": content} | sent_back
            case PieceKind.TEXT:
                content = [_text_part(block.text, self._tokens_of(block))] if status != "in_progress" else []
                return item | {"type": "message", "role": "assistant", "content": content}

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        data = {"type": kind, "sequence_number": self._num_events} | fields
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + _ENCODER.encode(data) + b"\n\n"


def failed(head: dict[str, Any], error: Exception) -> dict[str, Any]:
    """Return the response object of an answer that failed."""
    told = error_body(error).error
    # By the code, agents tell what can be tried again from what cannot.
    return head | {
        "status": "failed",
        "output": [],
        "error": {"code": told.code or "server_error", "message": told.message},
    }


def _status_at_end(output: TextOutput) -> str:
    """Return the status of an answer's last item."""
    return "completed" if output.finish_reason is FinishReason.STOP else "incomplete"


def _growth(block: Block, delta: str, tokens: list[ChatTokenLogprobs]) -> tuple[str, dict[str, Any]]:
    if block.kind is PieceKind.CALL:
        return "response.function_call_arguments.delta", _place(block) | {"item_id": _item_id(block), "delta": delta}
    return f"response.{_TEXT_EVENTS[block.kind]}.delta", _content_place(block) | {"delta": delta, "logprobs": tokens}


def _place(block: Block) -> dict[str, Any]:
    return {"output_index": block.index}


def _content_place(block: Block) -> dict[str, Any]:
    return _place(block) | {"item_id": _item_id(block), "content_index": 0}


def _item_id(block: Block) -> str:
    return {PieceKind.TEXT: "msg_", PieceKind.REASONING: "rs_", PieceKind.CALL: "fc_"}[block.kind] + block.id


def opaque(thinking: str) -> str:
    """Return thinking as a client without a store sends it back; it is no secret, since it was shown as well."""
    return base64.urlsafe_b64encode(thinking.encode("utf-8", "replace")).decode()


def _text_part(text: str, tokens: list[ChatTokenLogprobs]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": tokens}


def _usage(counter: UsageCounter) -> dict[str, Any]:
    usage = counter.usage()
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": usage.prompt_tokens_details,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
