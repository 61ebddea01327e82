"""Parse the body of an upload while it comes: the bytes of its file are passed on at once, short fields are kept."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header
from starlette.requests import Request

from tokenmill.core.errors import InvalidRequest
from tokenmill.serving.server.http.body import convert_texts
from tokenmill.serving.server.http.browser_guard import MULTIPART
from tokenmill.serving.server.http.errors import UnsupportedMediaType

MAX_PARTS = 16
MAX_FIELD_BYTES = 1024

T = TypeVar("T", bound=msgspec.Struct)
_LIST = "[]"
_PART_OF = re.compile(r"(?P<field>[^\[\]]+)\[(?P<part>[^\[\]]+)\]")


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    """The time for which a file is kept."""

    seconds: Annotated[int, Meta(ge=3600, le=30 * 24 * 3600)]
    anchor: Literal["created_at"] | None = None


class UploadForm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of an upload; of the file, its name. `expires_after[seconds]` and the like are parts of their own."""

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class Upload(Generic[T]):
    """One upload; the parser and the function that writes the file run in another thread than the event loop's."""

    def __init__(self, write: Callable[[bytes], object], form: type[T]) -> None:
        """Parse an upload with the fields of `form`; `write` takes the bytes of its file.

        A field whose name ends with `[]` may be sent several times.
        """
        self._write = write
        self._form = form
        self._texts: dict[str, bytes] = {}
        self._lists: dict[str, list[bytes]] = {}
        self._num_parts = 0
        self._header = [b"", b""]
        self._disposition: dict[bytes, bytes] = {}
        self._part = ""

    async def read(self, request: Request) -> T:
        """Read the whole body as it comes.

        Raises:
            UnsupportedMediaType: the body is not multipart/form-data.
            InvalidRequest: the body is broken, ends too early, or has other parts than an upload.
            ClientDisconnect: the client has left.
        """
        parser = self._parser(request)
        with _explained():
            async for chunk in request.stream():
                await asyncio.to_thread(parser.write, chunk)
        return self._whole(parser)

    def parse(self, request: Request, data: bytes | bytearray) -> T:
        """Parse a body that has come; raise as `read` does."""
        parser = self._parser(request)
        with _explained():
            parser.write(bytes(data))
        return self._whole(parser)

    def _parser(self, request: Request) -> MultipartParser:
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        if kind != MULTIPART.encode() or not options.get(b"boundary"):
            raise UnsupportedMediaType(f"the body must be {MULTIPART}, with a boundary")
        return MultipartParser(
            options[b"boundary"],
            {
                "on_header_field": partial(self._add_to_header, 0),
                "on_header_value": partial(self._add_to_header, 1),
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_part,
                "on_part_data": self._add,
            },
        )

    def _whole(self, parser: MultipartParser) -> T:
        if parser.state is not MultipartState.END:
            raise InvalidRequest("the body ends before its last part does")
        return convert_texts(self._given(), self._form)

    def _given(self) -> dict[str, Any]:
        """Return the fields; `a[b]` is field b of a, which then has no text of its own.

        Raises:
            InvalidRequest: a field is given both as a text and in parts.
        """
        wholes: dict[str, Any] = {}
        parts: dict[str, dict[str, str]] = {}
        for name, text in self._texts.items():
            value = text.decode("utf-8", "replace")
            if (found := _PART_OF.fullmatch(name)) is None:
                wholes[name] = value
            else:
                parts.setdefault(found["field"], {})[found["part"]] = value
        for name in wholes.keys() & parts.keys():
            raise InvalidRequest(f"{name[:64]} was sent as a whole and in parts: send only one of them", name[:64])
        lists = {name: [text.decode("utf-8", "replace") for text in texts] for name, texts in self._lists.items()}
        return wholes | parts | lists

    # --- called by the parser ---------------------------------------------------------------------------------------

    def _add_to_header(self, side: int, data: bytes, start: int, end: int) -> None:
        self._header[side] += data[start:end]

    def _end_header(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            _, self._disposition = parse_options_header(value)
        self._header = [b"", b""]

    def _begin_part(self) -> None:
        name = self._part = self._disposition.get(b"name", b"").decode("utf-8", "replace")
        self._num_parts += 1
        if name in self._texts or self._num_parts > MAX_PARTS:
            raise InvalidRequest(f"{name[:64]} was sent twice, or there are too many fields", name[:64])
        if name.endswith(_LIST):
            self._lists.setdefault(name, []).append(b"")
            self._disposition = {}
            return
        self._texts[name] = self._disposition.get(b"filename", b"file.jsonl") if name == "file" else b""
        self._disposition = {}

    def _add(self, data: bytes, start: int, end: int) -> None:
        if self._part == "file":
            self._write(data[start:end])
            return
        texts: Any = self._texts if self._part in self._texts else self._lists[self._part]
        place = self._part if self._part in self._texts else -1
        texts[place] += data[start:end]
        if len(texts[place]) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"{self._part[:64]} is too long", self._part[:64])


@contextmanager
def _explained() -> Iterator[None]:
    """Say in a client's terms why a body cannot be parsed."""
    try:
        yield
    except FormParserError as error:
        raise InvalidRequest(f"the body is not valid {MULTIPART}") from error
