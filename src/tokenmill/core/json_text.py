"""Decode JSON from clients and models: an escape may name half of a character, which a text cannot hold.

Clients cut texts between the two halves of an emoji, and models may write any escape. RFC 8259 leaves the meaning of
such an escape open; here it is U+FFFD, as in most languages' decoders, so that the rest of the message is not lost.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")

_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HALF = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_ESCAPE = rb"\u"
_REPLACEMENT = rb"\ufffd"


@overload
def decode_json(raw: bytes | bytearray | str | msgspec.Raw) -> Any: ...


@overload
def decode_json(raw: bytes | bytearray | str | msgspec.Raw, kind: type[T]) -> T: ...


def decode_json(raw: bytes | bytearray | str | msgspec.Raw, kind: Any = Any) -> Any:
    """Decode JSON as a type, with U+FFFD in place of each half of a character.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: not JSON.
        msgspec.ValidationError: not of that type.
    """
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        data = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else bytes(raw)
        mended = _without_halves(data)
        if mended == data:
            raise
        return msgspec.json.decode(mended, type=kind)


def whole_characters(text: str) -> str:
    """Return a text whose escapes named halves of characters: pairs joined, single halves replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _without_halves(data: bytes) -> bytes:
    """Replace single halves; other threads can run between two escapes, however long the text is."""
    parts, done = [], 0
    start = data.find(_ESCAPE)
    while start >= 0:
        end = start + len(_ESCAPE)
        if not _is_escaped(data, start):
            if pair := _PAIR.match(data, start):
                end = pair.end()
            elif half := _HALF.match(data, start):
                parts += [data[done:start], _REPLACEMENT]
                done = end = half.end()
        start = data.find(_ESCAPE, end)
    return b"".join([*parts, data[done:]])


def _is_escaped(data: bytes, place: int) -> bool:
    """Return True if the backslash at `place` is the second one of a pair."""
    first = place
    while first and data[first - 1] == ord("\\"):
        first -= 1
    return (place - first) % 2 == 1
