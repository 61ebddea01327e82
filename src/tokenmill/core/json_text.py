"""Decode JSON from clients and models: an escape may name half of a character, which a text cannot hold.

Clients cut texts between the two halves of an emoji, and models may write any escape. RFC 8259 leaves the meaning of
such an escape open; here it is U+FFFD, as in most languages' decoders, so that the rest of the message is not lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")

# Escapes of halves that follow each other. The first may itself be text: its backslash may be escaped.
_HALVES = re.compile(rb"(?:\\u[dD][89a-fA-F][0-9a-fA-F]{2})+")
_HALF = 6
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
    parts, done = [], 0
    for run in _runs_of_halves(data):
        start = run.start()
        start += _HALF * _is_escaped(data, start)
        parts += [data[done:start], _joined(data[start : run.end()])]
        done = run.end()
    return b"".join([*parts, data[done:]])


def _runs_of_halves(data: bytes) -> Iterator[re.Match[bytes]]:
    """Yield the runs in order; other threads can run between two escapes, which are found a hundred times as fast."""
    start = data.find(_ESCAPE)
    while start >= 0:
        run = _HALVES.match(data, start)
        if run:
            yield run
        start = data.find(_ESCAPE, run.end() if run else start + len(_ESCAPE))


def _is_escaped(data: bytes, place: int) -> bool:
    """Return True if the backslash at `place` is the second one of a pair."""
    first = place
    while first and data[first - 1] == ord("\\"):
        first -= 1
    return (place - first) % 2 == 1


def _joined(run: bytes) -> bytes:
    """Return a run of halves, with each half that makes no character with its neighbour replaced."""
    halves = [run[i : i + _HALF] for i in range(0, len(run), _HALF)]
    parts, i = [], 0
    while i < len(halves):
        is_pair = i + 1 < len(halves) and _is_high(halves[i]) and not _is_high(halves[i + 1])
        parts.append(halves[i] + halves[i + 1] if is_pair else _REPLACEMENT)
        i += 1 + is_pair
    return b"".join(parts)


def _is_high(half: bytes) -> bool:
    return half[3:4].lower() in b"89ab"
