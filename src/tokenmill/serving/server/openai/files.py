"""Serve /v1/files, the inputs and outputs of batches. A client's name of a file is only shown, never used as a path."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from tokenmill.core.errors import NotFound, TooLarge
from tokenmill.serving.batches.batch import File
from tokenmill.serving.batches.service import MAX_FILE_BYTES, BatchService
from tokenmill.serving.batches.store import Page
from tokenmill.serving.server.http.body import read_query
from tokenmill.serving.server.http.json_response import json_response
from tokenmill.serving.server.http.middleware import owner_of
from tokenmill.serving.server.openai.upload import Upload, UploadForm

# What stands around the file in its body.
_ENVELOPE_BYTES = 64 << 10


class FilesQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The query of GET /v1/files."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


class FilesRoutes:
    """The handlers of /v1/files; without a service, they refuse all."""

    def __init__(self, batches: BatchService | None) -> None:
        self._batches = batches

    async def create(self, request: Request) -> Response:
        """Upload a file: multipart/form-data with `file`, `purpose` and optionally `expires_after`."""
        service = kept(self._batches)
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > MAX_FILE_BYTES + _ENVELOPE_BYTES:
            raise TooLarge(f"a file has at most {MAX_FILE_BYTES} bytes", "file")
        incoming = await service.begin_file()
        try:
            form = await Upload(partial(service.write_file, incoming), UploadForm).read(request)
            seconds = None if form.expires_after is None else form.expires_after.seconds
            file = await service.keep_file(owner_of(request.scope), incoming, form.file, seconds)
        finally:
            await service.drop_file(incoming)
        return json_response(file)

    async def list(self, request: Request) -> Response:
        """List the files of the caller."""
        query = read_query(request, FilesQuery)
        page = Page(query.after, query.limit, query.order == "asc")
        found = await kept(self._batches).files(owner_of(request.scope), page, query.purpose)
        return json_response(listed(*found))

    async def get(self, request: Request) -> Response:
        """Show the details of a file."""
        return json_response(await self._file(request))

    async def content(self, request: Request) -> Response:
        """Send the bytes of a file."""
        body = kept(self._batches).body(await self._file(request))
        return FileResponse(body, media_type="application/octet-stream")

    async def delete(self, request: Request) -> Response:
        """Delete a file."""
        file_id = request.path_params["file_id"]
        await kept(self._batches).delete_file(owner_of(request.scope), file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def _file(self, request: Request) -> File:
        return await kept(self._batches).file(owner_of(request.scope), request.path_params["file_id"])


def kept(batches: BatchService | None) -> BatchService:
    """Return the service that keeps files and batches.

    Raises:
        NotFound: this server has no such service.
    """
    if batches is None:
        raise NotFound("this server keeps no files and batches: start it with --batch-dir FOLDER")
    return batches


def listed(objects: list[Any], has_more: bool) -> dict[str, Any]:
    """Return OpenAI's list object."""
    ids = [one.id for one in objects] or [None]
    return {"object": "list", "data": objects, "first_id": ids[0], "last_id": ids[-1], "has_more": has_more}
