"""Mini-SGLang's form of POST /generate: a prompt is continued greedily, and its text comes piece by piece.

    {"prompt": "Once", "max_tokens": 8, "ignore_eos": false}      data: upon a
                                                                  data: time
                                                                  data: [DONE]

Mini-SGLang ends an event with one line end; here it is two, as the standard of event streams has it. A line end within
a piece is a further line of its event.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import TextOutput
from tokenmill.serving.server.generation.call import GenerationCall
from tokenmill.serving.server.generation.fields import Int32
from tokenmill.serving.server.generation.writer import DONE, PING, UsageCounter
from tokenmill.serving.server.http.errors import error_body


def piecewise_call(prompt: str, max_tokens: Int32 | None, ignore_eos: bool | None) -> GenerationCall:
    """Return the call of a body in this form.

    Raises:
        InvalidRequest: `max_tokens` is missing, which Mini-SGLang requires.
    """
    if max_tokens is None:
        raise InvalidRequest("a body with prompt needs max_tokens", "max_tokens")
    params = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": bool(ignore_eos)}
    return GenerationCall(params=params, prompts=[prompt], default_max_tokens=max_tokens, stream=True)


class PieceWriter:
    """A `ReplyWriter` whose events are the text's pieces."""

    ping = PING

    def document(self, outputs: Mapping[int, TextOutput], usage: UsageCounter) -> bytes:
        """Return the whole text; the form always streams, so that no client asks for it."""
        return outputs[0].text.encode()

    def events(self, index: int, output: TextOutput, usage: UsageCounter) -> bytes:
        """Return an event with the new text; nothing without any."""
        if not output.text:
            return b""
        lines = output.text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        return "".join(f"data: {line}\n" for line in lines).encode() + b"\n"

    def last_events(self, usage: UsageCounter) -> bytes:
        """Return `[DONE]`."""
        return DONE

    def failure(self, error: Exception) -> bytes:
        """Return an error event and `[DONE]`."""
        return b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n" + DONE
