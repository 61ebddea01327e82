"""Parse the body of an upload while it comes: the bytes of its file are passed on at once, short fields are kept."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header
from starlette.requests import Request

from tokenmill.core.errors import InvalidRequest
from tokenmill.serving.server.http.body import convert_texts
from tokenmill.serving.server.http.browser_guard import MULTIPART
from tokenmill.serving.server.http.errors import UnsupportedMediaType

MAX_PARTS = 8
MAX_FIELD_BYTES = 1024

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


class Upload:
    """One upload; the parser and the function that writes the file run in another thread than the event loop's."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        """Parse an upload; `write` takes the bytes of its file."""
        self._write = write
        self._texts: dict[str, bytes] = {}
        self._header = [b"", b""]
        self._disposition: dict[bytes, bytes] = {}
        self._part = ""

    async def read(self, request: Request) -> UploadForm:
        """Read the whole body.

        Raises:
            UnsupportedMediaType: the body is not multipart/form-data.
            InvalidRequest: the body is broken, ends too early, or has other parts than an upload.
            ClientDisconnect: the client has left.
        """
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        if kind != MULTIPART.encode() or not options.get(b"boundary"):
            raise UnsupportedMediaType(f"the body must be {MULTIPART}, with a boundary")
        parser = MultipartParser(
            options[b"boundary"],
            {
                "on_header_field": partial(self._add_to_header, 0),
                "on_header_value": partial(self._add_to_header, 1),
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_part,
                "on_part_data": self._add,
            },
        )
        try:
            async for chunk in request.stream():
                await asyncio.to_thread(parser.write, chunk)
        except FormParserError as error:
            raise InvalidRequest(f"the body is not valid {MULTIPART}") from error
        if parser.state is not MultipartState.END:
            raise InvalidRequest("the body ends before its last part does")
        return convert_texts(self._given(), UploadForm)

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
        return wholes | parts

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
        if name in self._texts or len(self._texts) == MAX_PARTS:
            raise InvalidRequest(f"{name[:64]} was sent twice, or there are too many fields", name[:64])
        self._texts[name] = self._disposition.get(b"filename", b"file.jsonl") if name == "file" else b""
        self._disposition = {}

    def _add(self, data: bytes, start: int, end: int) -> None:
        if self._part == "file":
            self._write(data[start:end])
        elif len(self._texts[self._part]) + end - start > MAX_FIELD_BYTES:
            raise InvalidRequest(f"{self._part[:64]} is too long", self._part[:64])
        else:
            self._texts[self._part] += data[start:end]
