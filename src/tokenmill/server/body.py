"""Reading and checking a request's JSON body, once, at the edge."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from starlette.requests import Request

from tokenmill.errors import InvalidRequest
from tokenmill.server.errors import BodyTooLarge

MAX_BODY_BYTES = 16 * 2**20

_AT = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<path>.*)`$")
_UNKNOWN = re.compile(r"unknown field `(?P<name>.*?)`")
_MISSING = re.compile(r"missing required field `(?P<name>.*?)`")

T = TypeVar("T")


async def read_body(request: Request, kind: type[T], max_bytes: int = MAX_BODY_BYTES) -> T:
    """Read a body of at most `max_bytes` as a struct with strict types.

    Raises:
        BodyTooLarge: before more than `max_bytes` are held.
        InvalidRequest: not JSON, an unknown field, or a value of the wrong type; `param` names the field.
        ClientDisconnect: nobody waits for the answer any more.
    """
    raw = await _read(request, max_bytes)
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deep") from error


def read_query(request: Request, kind: type[T]) -> T:
    """Read the query string as a struct.

    Raises:
        InvalidRequest: an unknown name, or a value that is not what it should be.
    """
    try:
        return msgspec.convert(dict(request.query_params), kind, strict=False)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from error


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = BodyTooLarge(f"the body is larger than {max_bytes} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > max_bytes:
            raise too_large
    return bytes(raw)


def _explain(message: str) -> InvalidRequest:
    """Put a validation message of msgspec in a client's terms."""
    message = message.replace(" | null`", "`")
    unknown = _UNKNOWN.search(message)
    at = _AT.match(message)
    what, path = (at["what"], at["path"]) if at else (message, "")
    if unknown:
        name = f"{path}.{unknown['name']}" if path else unknown["name"]
        return InvalidRequest(f"{name}: unknown or unsupported field", _top(name))
    if missing := _MISSING.search(message):
        name = f"{path}.{missing['name']}" if path else missing["name"]
        return InvalidRequest(f"{name} is missing", _top(name))
    if not path:
        return InvalidRequest(f"the body is not as expected: {what}")
    return InvalidRequest(f"{path}: {what[:1].lower()}{what[1:]}", _top(path))


def _top(path: str) -> str:
    """The body's own field in a path like `messages[0].role`."""
    return re.split(r"[.\[]", path)[0]
