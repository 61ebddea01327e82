"""Convert the lines of `tokenmill embed`: an input line to a text, its vector to an output line."""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.cli.batch_io import digest, error_line
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.request import FinishReason
from tokenmill.llm.outputs import RequestOutput
from tokenmill.serving.batches.lines import BatchLine

Text = str | list[int]


class _Body(msgspec.Struct, kw_only=True):
    """The fields of a batch line's body; others, such as `model`, ask for nothing here."""

    input: Text


class _Line(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A plain line: one of three names for the text."""

    id: str | int | None = None
    text: Text | None = None
    input: Text | None = None
    prompt: Text | None = None


class _Form(msgspec.Struct):
    body: msgspec.Raw = msgspec.Raw()


class TextLine(msgspec.Struct, frozen=True):
    """An input line; its fields are those of `Job`."""

    line: int
    digest: str
    label: str | int | None
    is_batch: bool
    text: Text


def read_text(line: int, raw: bytes) -> TextLine:
    """Read the text of an input line.

    Raises:
        InvalidRequest: not JSON, no text, or a field that is not known; names it.
    """
    try:
        if bytes(msgspec.json.decode(raw, type=_Form).body):
            batch = msgspec.json.decode(raw, type=BatchLine[_Body])
            return TextLine(line, digest(raw), batch.custom_id, True, batch.body.input)
        plain = msgspec.json.decode(raw, type=_Line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(str(error)) from None
    texts = [text for text in (plain.text, plain.input, plain.prompt) if text is not None]
    if len(texts) != 1:
        raise InvalidRequest("a line needs one text: text, input or prompt", "text")
    return TextLine(line, digest(raw), plain.id, False, texts[0])


def answer(line: TextLine, finished: RequestOutput, model: str) -> dict[str, Any]:
    """Return the output line with a text's vector; `model` is named in batch answers."""
    (result,) = finished.outputs
    if result.finish_reason is FinishReason.ERROR:
        return error_line(line.line, line.digest, line.label, line.is_batch, result.error or "failed")
    head: dict[str, Any] = {"line": line.line, "input": line.digest}
    if line.label is not None:
        head["custom_id" if line.is_batch else "id"] = line.label
    vector, count = finished.vector().embedding, finished.num_prompt_tokens
    usage = {"prompt_tokens": count, "total_tokens": count}
    if not line.is_batch:
        return {**head, "embedding": vector, "usage": usage}
    data = [{"object": "embedding", "index": 0, "embedding": vector}]
    body = {"object": "list", "data": data, "model": model, "usage": usage}
    return {**head, "response": {"status_code": 200, "body": body}, "error": None}
