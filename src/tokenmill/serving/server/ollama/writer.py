"""Write answers as Ollama does: lines of JSON, of which the last says how it ended and how long it took."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from tokenmill.core.answer import PieceKind
from tokenmill.core.json_text import decode_json
from tokenmill.core.messages import TextOutput
from tokenmill.core.plan import Logprob
from tokenmill.core.request import FinishReason
from tokenmill.serving.server.generation.content_blocks import Block, BlockEnds, BlockGrows, ContentBlocks
from tokenmill.serving.server.generation.timings import StreamTimer
from tokenmill.serving.server.generation.writer import UsageCounter, finite, positions, token_bytes
from tokenmill.serving.server.http.errors import ollama_body

_NANOSECONDS = 1_000_000  # of a millisecond


class LineWriter:
    """A `ReplyWriter` for /api/chat and /api/generate, whose replies differ in where the text stands."""

    def __init__(self, model: str, is_chat: bool) -> None:
        self._model = model
        self._is_chat = is_chat
        self._blocks = ContentBlocks()
        self._timer = StreamTimer()
        self._last: TextOutput | None = None
        # Clients read every line as JSON: a sign of life is one without text.
        self.ping = _line(self._head(False) | self._part("", "", []))

    def document(self, outputs: Mapping[int, TextOutput], usage: UsageCounter) -> bytes:
        """Return the whole answer as one object."""
        output = outputs[0]
        self._timer.note(output)
        self._blocks.add_whole(output)
        texts = {kind: "".join(b.text for b in self._blocks.blocks if b.kind is kind) for kind in PieceKind}
        calls = [call for i, block in enumerate(self._calls()) if (call := _call(block, i)) is not None]
        part = self._part(texts[PieceKind.TEXT], texts[PieceKind.REASONING], calls)
        return msgspec.json.encode(self._head(True) | part | _logprobs(output) | self._end(output, usage))

    def events(self, index: int, output: TextOutput, usage: UsageCounter) -> bytes:
        """Return the lines of a delta: text as it grows, a call when it is whole."""
        self._timer.note(output)
        self._last = output
        lines = [self._change(change) for change in self._blocks.add(output)]
        found = [line for line in lines if line is not None]
        if found and output.logprobs:
            found[0] |= _logprobs(output)
        return b"".join(map(_line, found))

    def last_events(self, usage: UsageCounter) -> bytes:
        """Return the last call, if it is open, and the line that ends the answer."""
        assert self._last is not None, "a stream ends after its last output"
        lines = [self._change(change) for change in self._blocks.finish()]
        found = [line for line in lines if line is not None]
        end = self._head(True) | self._part("", "", []) | self._end(self._last, usage)
        return b"".join(map(_line, [*found, end]))

    def failure(self, error: Exception) -> bytes:
        """Return a line with the error."""
        return _line(ollama_body(error))

    def _change(self, change: object) -> dict[str, Any] | None:
        """Return the line for a change; None: it has none."""
        match change:
            case BlockGrows(block, delta) if block.kind is PieceKind.TEXT:
                return self._head(False) | self._part(delta, "", [])
            case BlockGrows(block, delta) if block.kind is PieceKind.REASONING:
                return self._head(False) | self._part("", delta, [])
            case BlockEnds(block) if block.kind is PieceKind.CALL:
                call = _call(block, self._calls().index(block))
                return None if call is None else self._head(False) | self._part("", "", [call])
        return None

    def _calls(self) -> list[Block]:
        return [block for block in self._blocks.blocks if block.kind is PieceKind.CALL]

    def _head(self, done: bool) -> dict[str, Any]:
        return {"model": self._model, "created_at": now(), "done": done}

    def _part(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        own: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if calls:
            own["tool_calls"] = calls
        if self._is_chat:
            return {"message": {"role": "assistant", "content": text} | own}
        return {"response": text} | own

    def _end(self, output: TextOutput, usage: UsageCounter) -> dict[str, Any]:
        counted, timings = usage.usage(), self._timer.timings(usage)
        prompt, output_time = (round(ms * _NANOSECONDS) for ms in (timings.prompt_ms, timings.predicted_ms))
        return {
            "done_reason": "length" if output.finish_reason is FinishReason.LENGTH else "stop",
            "total_duration": prompt + output_time,
            "load_duration": 0,
            "prompt_eval_count": counted.prompt_tokens,
            "prompt_eval_duration": prompt,
            "eval_count": counted.completion_tokens,
            "eval_duration": output_time,
        }


def now() -> str:
    """Return the time in Ollama's form."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _call(block: Block, index: int) -> dict[str, Any] | None:
    """Return a call with its arguments as an object; None where the answer was cut within them."""
    try:
        arguments = decode_json(block.text or "{}")
    except msgspec.DecodeError:
        return None
    if not isinstance(arguments, dict):
        return None
    return {"id": f"call_{block.id}", "function": {"index": index, "name": block.name, "arguments": arguments}}


def _logprobs(output: TextOutput) -> dict[str, Any]:
    """Return the log probabilities of an output, if they were asked for."""
    found = [
        _shown(output, position.sampled) | {"top_logprobs": [_shown(output, one) for one in position.top]}
        for position in positions(output)
    ]
    return {"logprobs": found} if found else {}


def _shown(output: TextOutput, entry: Logprob) -> dict[str, Any]:
    raw = token_bytes(output, entry.token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": finite(entry.logprob), "bytes": list(raw)}


def _line(content: object) -> bytes:
    return msgspec.json.encode(content) + b"\n"
