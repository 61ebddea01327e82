"""Read and check the lines of batch files, give each a seed, and write the lines of answers."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.json_text import decode_json
from tokenmill.serving.batches.batch import WITHOUT_SEED, LineFault, new_id

MAX_LINES = 50_000
MAX_LINE_BYTES = 16 << 20
MAX_FAULTS = 100
MAX_ID_LENGTH = 512

Body = TypeVar("Body")


class BatchLine(msgspec.Struct, Generic[Body], kw_only=True, forbid_unknown_fields=True):
    """A line of OpenAI's batch form."""

    custom_id: str
    body: Body
    method: str | None = None
    url: str | None = None


class LinePlace(NamedTuple):
    """The place of a line in its file: number from 1, offset and size in bytes."""

    number: int
    custom_id: str
    offset: int
    size: int


class Outcome(enum.Enum):
    """The end of a line: answered, answered with an error, or not run at all."""

    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class LineEnd(NamedTuple):
    """A line's outcome (None: it was not run), its output line, and the `usage` of its reply."""

    number: int
    custom_id: str
    outcome: Outcome | None
    answer: bytes
    usage: dict[str, Any] | None = None


UNANSWERED = {
    Outcome.EXPIRED: "the batch expired before this request could be run",
    Outcome.CANCELLED: "the batch was cancelled before this request could be run",
}


@dataclass(slots=True)
class InputLines:
    """The lines of a file, or their faults."""

    places: list[LinePlace] = field(default_factory=list)
    faults: list[LineFault] = field(default_factory=list)
    model: str | None = None


def numbered_lines(path: Path, max_bytes: int = -1) -> Iterator[tuple[int, int, bytes]]:
    """Yield number (from 1), offset and bytes of each line that is not blank; longer lines come in parts."""
    with open(path, "rb") as file:
        offset = 0
        number = 1
        while raw := file.readline(max_bytes):
            if raw.strip():
                yield number, offset, raw
            offset += len(raw)
            number += 1


def read_lines(path: Path, endpoint: str) -> InputLines:
    """Check all lines of a batch file for this endpoint: requests with distinct ids, all for one model."""
    lines = InputLines()
    seen: set[str] = set()
    for number, offset, raw in numbered_lines(path, MAX_LINE_BYTES):
        if len(lines.places) == MAX_LINES:
            lines.faults.append(LineFault("too_many_tasks", f"a batch has at most {MAX_LINES} lines"))
        elif len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
            lines.faults.append(LineFault("line_too_long", f"a line has at most {MAX_LINE_BYTES} bytes", number))
        else:
            _take_line(lines, seen, LinePlace(number, "", offset, len(raw)), raw, endpoint)
            if len(lines.faults) < MAX_FAULTS:
                continue
        return lines  # what follows would say no more
    if not lines.places and not lines.faults:
        lines.faults.append(LineFault("empty_file", "the file has no lines"))
    return lines


def _take_line(lines: InputLines, seen: set[str], place: LinePlace, raw: bytes, endpoint: str) -> None:
    try:
        line = decode_json(raw, BatchLine[msgspec.Raw])
        model = _model(line.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        lines.faults.append(LineFault("invalid_json_line", f"not a line of a batch: {error}", place.number))
        return
    if not lines.places:
        lines.model = model
    fault = _fault(line, endpoint, is_known=line.custom_id in seen, is_other=model != lines.model)
    if fault is not None:
        fault.line = place.number
        lines.faults.append(fault)
    seen.add(line.custom_id)
    lines.places.append(place._replace(custom_id=line.custom_id))


def _fault(line: BatchLine[msgspec.Raw], endpoint: str, is_known: bool, is_other: bool) -> LineFault | None:
    if not 0 < len(line.custom_id) <= MAX_ID_LENGTH:
        return LineFault("invalid_custom_id", f"custom_id has 1 to {MAX_ID_LENGTH} characters", param="custom_id")
    if is_known:
        return LineFault("duplicate_custom_id", "another line has this custom_id", param="custom_id")
    if line.method not in (None, "POST"):
        return LineFault("invalid_method", "method must be POST", param="method")
    if line.url != endpoint:
        return LineFault("mismatched_endpoint", f"url must be that of the batch, {endpoint}", param="url")
    if is_other:
        return LineFault("mismatched_model", "all lines of a batch are for one model", param="body.model")
    return None


class _Peek(msgspec.Struct):
    """The fields to check before the route reads a body in full."""

    model: Any = None
    seed: Any = None
    stream: Any = None
    background: Any = None


def _model(body: msgspec.Raw) -> str | None:
    model = decode_json(body, _Peek).model
    return model if isinstance(model, str) else None


def line_seed(batch_id: str, custom_id: str) -> int:
    """Return the seed of a line without one, so that it draws the same tokens whenever it runs."""
    digest = blake2b(f"{batch_id}/{custom_id}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def line_body(raw: bytes, batch_id: str) -> bytes:
    """Return the body to send for a line, with a seed unless it has one or takes none.

    Raises:
        InvalidRequest: the line asks for something that batches do not support.
    """
    line = decode_json(raw, BatchLine[msgspec.Raw])
    body, peek = bytes(line.body), decode_json(line.body, _Peek)
    for name in ("stream", "background"):
        if getattr(peek, name):
            raise InvalidRequest(f"{name} is not supported in a batch", name)
    if peek.seed is None and line.url not in WITHOUT_SEED:
        fields = body.rstrip()[:-1].rstrip()
        comma = b"" if fields.endswith(b"{") else b","
        body = fields + comma + b'"seed":%d}' % line_seed(batch_id, line.custom_id)
    return body


def answered_line(request_id: str, custom_id: str, status: int, body: bytes) -> bytes:
    """Return the output line of a request that was answered, with success or an error."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _output_line(request_id, custom_id, response, None)


def unanswered_line(custom_id: str, outcome: Outcome) -> bytes:
    """Return the output line of a request that was not run."""
    error = {"code": f"batch_{outcome.value}", "message": UNANSWERED[outcome]}
    return _output_line(new_id("batch_req_"), custom_id, None, error)


def _output_line(request_id: str, custom_id: str, response: dict[str, Any] | None, error: Any) -> bytes:
    line = {"id": request_id, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"
