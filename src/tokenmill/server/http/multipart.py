"""Reading a body of multipart/form-data part by part, as it comes: none of it is kept here but short fields."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from tokenmill.core.errors import InvalidRequest
from tokenmill.server.http.browser_guard import MULTIPART
from tokenmill.server.http.errors import UnsupportedMediaType

MAX_PARTS = 16


class PartData(NamedTuple):
    """Some bytes of a part: of the field `name`, or of the file `filename` in it. The last ones are empty."""

    name: str
    filename: str | None
    data: bytes
    is_last: bool = False


async def read_multipart(request: Request) -> AsyncIterator[PartData]:
    """The parts of a body in order.

    Raises:
        UnsupportedMediaType: it is another kind of body.
        InvalidRequest: it is broken or ends too early, or has too many parts.
        ClientDisconnect: nobody waits for the answer any more.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != MULTIPART.encode() or not options.get(b"boundary"):
        raise UnsupportedMediaType(f"the body must be {MULTIPART}, with a boundary")
    form = _Form()
    parser = MultipartParser(
        options[b"boundary"],
        {
            "on_part_begin": form.begin_part,
            "on_header_field": form.add_name,
            "on_header_value": form.add_value,
            "on_header_end": form.end_header,
            "on_headers_finished": form.end_headers,
            "on_part_data": form.add_data,
            "on_part_end": form.end_part,
            "on_end": form.end,
        },
    )
    try:
        async for chunk in request.stream():
            parser.write(chunk)
            for part in form.take():
                yield part
    except FormParserError as error:
        raise InvalidRequest(f"the body is not valid {MULTIPART}") from error
    if not form.is_complete:
        raise InvalidRequest("the body ends before its last part does")


class _Form:
    """What the parser calls; it must not be stopped in the middle, so what it finds is collected and taken."""

    def __init__(self) -> None:
        self.is_complete = False
        self._found: list[PartData] = []
        self._num_parts = 0
        self._name = b""
        self._value = b""
        self._part = PartData("", None, b"")

    def begin_part(self) -> None:
        self._num_parts += 1
        self._part = PartData("", None, b"")

    def add_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def end_header(self) -> None:
        if self._name.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            filename = options.get(b"filename")
            shown = None if filename is None else filename.decode("utf-8", "replace")
            self._part = PartData(options.get(b"name", b"").decode("utf-8", "replace"), shown, b"")
        self._name = self._value = b""

    def end_headers(self) -> None:
        if not self._part.name or self._num_parts > MAX_PARTS:
            raise InvalidRequest(f"each of at most {MAX_PARTS} parts of the body has a name")

    def add_data(self, data: bytes, start: int, end: int) -> None:
        self._found.append(self._part._replace(data=data[start:end]))

    def end_part(self) -> None:
        self._found.append(self._part._replace(is_last=True))

    def end(self) -> None:
        self.is_complete = True

    def take(self) -> list[PartData]:
        found, self._found = self._found, []
        return found
