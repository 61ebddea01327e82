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


class PiecewiseFields(msgspec.Struct, kw_only=True):
    """The fields of a body in this form. With `prompt` it has no others."""

    prompt: str | None = None
    max_tokens: Int32 | None = None
    ignore_eos: bool | None = None


def piecewise_call(body: PiecewiseFields, prompt: str) -> GenerationCall:
    """Return the call of a body that has a prompt.

    Raises:
        InvalidRequest: `max_tokens` is missing, which Mini-SGLang requires, or a field of the other form is there.
    """
    own = PiecewiseFields.__struct_fields__
    for name in body.__struct_fields__:
        if name not in own and getattr(body, name) is not None:
            raise InvalidRequest(f"a body with prompt has {' and '.join(own[1:])}, and no {name}", name)
    if body.max_tokens is None:
        raise InvalidRequest("a body with prompt needs max_tokens", "max_tokens")
    params = {"temperature": 0.0, "max_tokens": body.max_tokens, "ignore_eos": bool(body.ignore_eos)}
    return GenerationCall(params=params, prompts=[prompt], default_max_tokens=body.max_tokens, stream=True)


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
