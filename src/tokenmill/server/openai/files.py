"""/v1/files: the inputs and outputs of batches. A client's name of a file is only shown, never a path."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from tokenmill.batches.batch import INPUT, File
from tokenmill.batches.files import IncomingFile
from tokenmill.batches.service import MAX_FILE_BYTES, BatchService
from tokenmill.batches.store import Page
from tokenmill.core.errors import InvalidRequest
from tokenmill.server.context import ServerContext
from tokenmill.server.http.body import read_query
from tokenmill.server.http.errors import BodyTooLarge, RequestNotFound
from tokenmill.server.http.json_response import json_response
from tokenmill.server.http.middleware import owner_of
from tokenmill.server.http.multipart import PartData, read_multipart

MAX_FIELD_BYTES = 1024
MAX_NAME_LENGTH = 256
# What stands around the file in its body.
_ENVELOPE_BYTES = 64 << 10
Seconds = Annotated[int, Meta(ge=3600, le=30 * 24 * 3600)]


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    """How long a file is kept."""

    seconds: Seconds
    anchor: Literal["created_at"] = "created_at"


class UploadForm(msgspec.Struct, kw_only=True):
    """The parts of an upload, for the description of the route; `expires_after[anchor]` and `[seconds]` are two."""

    file: bytes
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class FilesQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which files are listed."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


class FilesRoutes:
    """Answers them."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def create(self, request: Request) -> Response:
        """Upload a file: multipart/form-data with `file`, `purpose` and perhaps `expires_after`."""
        service = batches_of(self._context)
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > MAX_FILE_BYTES + _ENVELOPE_BYTES:
            raise BodyTooLarge(f"a file has at most {MAX_FILE_BYTES} bytes", "file")
        incoming = await service.begin_file()
        try:
            form = _UploadFields(service, incoming)
            async for part in read_multipart(request):
                await form.add(part)
            file = await service.keep_file(owner_of(request.scope), incoming, form.checked_name(), form.seconds())
        finally:
            await service.drop_file(incoming)
        return json_response(file)

    async def list(self, request: Request) -> Response:
        """The files of the caller."""
        query = read_query(request, FilesQuery)
        page = Page(query.after, query.limit, query.order == "asc")
        found = await batches_of(self._context).files(owner_of(request.scope), page, query.purpose)
        return json_response(listed(*found))

    async def get(self, request: Request) -> Response:
        """What is known of a file."""
        return json_response(await self._file(request))

    async def content(self, request: Request) -> Response:
        """The bytes of a file."""
        file = await self._file(request)
        body = batches_of(self._context).body(file)
        return FileResponse(body, media_type="application/octet-stream")

    async def delete(self, request: Request) -> Response:
        """Forget a file."""
        file_id = request.path_params["file_id"]
        await batches_of(self._context).delete_file(owner_of(request.scope), file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def _file(self, request: Request) -> File:
        return await batches_of(self._context).file(owner_of(request.scope), request.path_params["file_id"])


class _UploadFields:
    """The fields of an upload; the bytes of the file go on as they come."""

    def __init__(self, service: BatchService, incoming: IncomingFile) -> None:
        self._service = service
        self._incoming = incoming
        self._fields: dict[str, bytes] = {}
        self._filename: str | None = None
        self._closed: set[str] = set()

    async def add(self, part: PartData) -> None:
        """Take in a piece of a part."""
        name = part.name
        if name not in ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]"):
            raise InvalidRequest(f"{name[:64]}: unknown or unsupported field", name[:64])
        if name in self._closed:
            raise InvalidRequest(f"{name} is there twice", name)
        if part.is_last:
            self._closed.add(name)
        if name == "file":
            self._filename = part.filename or "file.jsonl"
            await self._service.write_file(self._incoming, part.data)
            return
        self._fields[name] = self._fields.get(name, b"") + part.data
        if len(self._fields[name]) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"{name} is too long", name)

    def checked_name(self) -> str:
        """The name of the file, once everything else is right."""
        if self._filename is None:
            raise InvalidRequest("file is missing", "file")
        purpose = self._fields.get("purpose", b"").decode("utf-8", "replace")
        if purpose != INPUT:
            raise InvalidRequest(f"purpose {purpose[:64]!r} is not supported by this server, only {INPUT!r}", "purpose")
        return self._filename[:MAX_NAME_LENGTH]

    def seconds(self) -> int | None:
        """How long the file is to be kept; None: the client does not say."""
        given = {name[14:-1]: value.decode("utf-8", "replace") for name, value in self._fields.items() if "[" in name}
        if not given:
            return None
        try:
            return msgspec.convert(given, ExpiresAfter, strict=False).seconds
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"expires_after: {error}", "expires_after") from error


def batches_of(context: ServerContext) -> BatchService:
    """What keeps files and batches.

    Raises:
        RequestNotFound: this server does not.
    """
    if context.batches is None:
        raise RequestNotFound("this server keeps no files and batches: start it with --batch-dir FOLDER")
    return context.batches


def listed(objects: list[Any], has_more: bool) -> dict[str, Any]:
    """OpenAI's list object."""
    first, last = (objects[0].id, objects[-1].id) if objects else (None, None)
    return {"object": "list", "data": objects, "first_id": first, "last_id": last, "has_more": has_more}
