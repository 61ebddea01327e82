"""Read and check the JSON body of a request, once, where it comes in."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from tokenmill.core.errors import InvalidRequest, TooLarge
from tokenmill.core.json_text import decode_json
from tokenmill.serving.server.http import request_id
from tokenmill.serving.server.http.body_budget import BodyBudget
from tokenmill.serving.server.http.body_structure import check_structure
from tokenmill.serving.server.http.body_threads import INLINE_BYTES
from tokenmill.serving.server.http.middleware import IGNORED
from tokenmill.serving.server.http.unknown_fields import Taken, UnknownFields, header_of

MAX_BODY_BYTES = 16 * 2**20

_AT = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<path>.*)`$")
_UNKNOWN = re.compile(r"unknown field `(?P<name>.*?)`")
_MISSING = re.compile(r"missing required field `(?P<name>.*?)`")

T = TypeVar("T")
R = TypeVar("R")


class UnknownField(InvalidRequest):
    """A body has a field that the route does not know."""


async def read_as(
    request: Request, kind: type[T], budget: BodyBudget, make: Callable[[T], R], *, is_strict: bool = False
) -> R:
    """Read the body of a call and convert it with `make`, off the event loop if it is long.

    Raises as `read_call` and `make` do.
    """
    body, num_bytes = await read_call(request, kind, budget, is_strict=is_strict)
    return await budget.threads.run(num_bytes, lambda: make(body))


async def read_call(request: Request, kind: type[T], budget: BodyBudget, *, is_strict: bool = False) -> tuple[T, int]:
    """Read the body of a call, of which unknown fields are left out, and return it and how many bytes it had.

    Raises as `read_body` does, for an unknown field only under the rule of `budget.unknown`, or if `is_strict`.
    """
    unknown = UnknownFields(is_strict=True) if is_strict else budget.unknown
    taken, num_bytes = await _read(request, budget, lambda raw: _take(raw, kind, unknown))
    if taken.ignored:
        budget.unknown.note(taken.ignored)
        request.scope.setdefault("state", {})[IGNORED] = header_of(taken.ignored)
    return taken.body, num_bytes


def note_left_out(request: Request, budget: BodyBudget, names: list[str]) -> None:
    """Name parts of a body that the answer cannot heed, such as `tools[1]:web_search`, where unknown fields are named.

    Raises:
        UnknownField: the server leaves out nothing.
    """
    if not names:
        return
    if budget.unknown.is_strict:
        raise UnknownField(f"{names[0]} is not supported by this server", _top(names[0].split(":")[0]))
    budget.unknown.note(tuple(names))
    state = request.scope.setdefault("state", {})
    state[IGNORED] = ", ".join(filter(None, (state.get(IGNORED, ""), header_of(tuple(names)))))[:1000]


async def read_body(request: Request, kind: type[T], budget: BodyBudget) -> T:
    """Read a body of at most `MAX_BODY_BYTES` as a struct with strict types.

    Raises:
        TooLarge: it has too many bytes, or too much structure; raised before the server holds more than it may.
        InvalidRequest: not JSON, an unknown field, or a value of the wrong type; `param` names the field.
        ServerBusy: too many bytes of bodies are on their way already.
        ClientDisconnect: the client has left.
    """
    return (await _read(request, budget, lambda raw: decode_body(raw, kind)))[0]


async def read_raw(request: Request, budget: BodyBudget, decode: Callable[[bytearray], R]) -> tuple[R, bytes]:
    """Read a body that is passed on; return what `decode` makes of it, and its bytes.

    Raises as `read_body` does; a body that is no JSON only if `decode` reads it as such.
    """

    def take(raw: bytearray) -> tuple[R, bytes]:
        return decode(raw), bytes(raw)

    return (await _read(request, budget, take))[0]


async def _read(request: Request, budget: BodyBudget, decode: Callable[[bytearray], R]) -> tuple[R, int]:
    """Read a body; return what `decode` makes of it, and how many bytes it had. Raises as `read_body` does."""
    max_bytes = min(MAX_BODY_BYTES, budget.max_bytes)
    too_large = TooLarge(f"the body is larger than {max_bytes} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    async with budget.open() as body:
        async for part in request.stream():
            if len(body.data) + len(part) > max_bytes:
                raise too_large
            body.add(part)
        num_bytes = len(body.data)
        return await budget.threads.run(num_bytes, lambda: decode(body.data)), num_bytes


def read_query(request: Request, kind: type[T]) -> T:
    """Read the query string as a struct.

    Raises:
        InvalidRequest: an unknown name, or a value of the wrong type.
    """
    return convert_texts(dict(request.query_params), kind)


def convert_texts(given: dict[str, Any], kind: type[T]) -> T:
    """Convert fields whose values came as texts into a struct; raise as `read_query` does."""
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from error


def _take(raw: bytearray, kind: type[T], unknown: UnknownFields) -> Taken[T]:
    """Decode a body; a second time, without what is unknown, if it has fields that `kind` does not have."""
    try:
        return Taken(decode_body(raw, kind))
    except UnknownField:
        if unknown.is_strict:
            raise
    # The first time may have ended before what else is wrong.
    with explained():
        return unknown.convert(decode_json(raw), kind)


def decode_body(raw: bytearray, kind: type[T]) -> T:
    """Decode a body as JSON of this kind; raise as `read_body` does."""
    if len(raw) > INLINE_BYTES:
        check_structure(raw)
    with explained():
        return decode_json(raw, kind)


@contextmanager
def explained(within: str = "") -> Iterator[None]:
    """Say in a client's terms why a body, or what lies `within` a field of it, cannot be decoded."""
    try:
        yield
    except msgspec.ValidationError as error:
        raise _explain(str(error), within) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deep") from error


def _explain(message: str, within: str = "") -> InvalidRequest:
    """Say a validation error of msgspec in a client's terms."""
    message = message.replace(" | null`", "`")
    unknown = _UNKNOWN.search(message)
    at = _AT.match(message)
    what, path = (at["what"], at["path"]) if at else (message, "")
    path = ".".join(filter(None, (within, path)))
    if unknown:
        name = f"{path}.{unknown['name']}" if path else unknown["name"]
        return UnknownField(f"{name}: unknown or unsupported field", _top(name))
    if missing := _MISSING.search(message):
        name = f"{path}.{missing['name']}" if path else missing["name"]
        return InvalidRequest(f"{name} is missing", _top(name))
    if not path:
        return InvalidRequest(f"the body is not as expected: {what}")
    if what.endswith(repr(request_id.PATTERN)):
        return InvalidRequest(f"{path} must be {request_id.MEANING}", _top(path))
    return InvalidRequest(f"{path}: {what[:1].lower()}{what[1:]}", _top(path))


def _top(path: str) -> str:
    """Return the body's own field in a path like `messages[0].role`."""
    return re.split(r"[.\[]", path)[0]
