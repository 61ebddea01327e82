"""Measure the structure of a JSON body before it is decoded, since no other request can interrupt the decoder.

Decoding is one call into C that keeps the interpreter to itself. What it costs is bounded by what it makes: values,
objects and lists, keys, and the characters of strings that are not copied as they are. Bodies are read in pieces, so
that other requests can run between two pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.core.errors import TooLarge

# 30 nanoseconds each on a laptop: a number or a short string is one, see `_WEIGHTS`.
MAX_STRUCTURE = 1 << 19
# Bytes that are not ASCII take four nanoseconds each on their way to a text worker, escapes up to six times as much.
MAX_SPELLED_BYTES = 3 << 20
ESCAPE_BYTES = 6

# A list or an object is a thing to make and to collect; a key is a string that is hashed besides.
_WEIGHTS = {b",": 1, b"[": 2, b"{": 2, b":": 6}
_PIECE_BYTES = 64 << 10
_NO_STRUCTURE = bytes(byte for byte in range(256) if bytes([byte]) not in _WEIGHTS)
_ASCII = bytes(range(128))


def check_structure(body: bytes | bytearray) -> None:
    """Refuse a body that takes too long to decode.

    Raises:
        TooLarge: it has more structure, or more characters to be spelled out, than any request needs.
    """
    _check_spelling(body)
    # What texts say in commas and brackets counts too; only where that is too much they are told apart.
    weight = 0
    for start in range(0, len(body), _PIECE_BYTES):
        weight += _weight(body[start : start + _PIECE_BYTES])
        if weight > MAX_STRUCTURE:
            break
    else:
        return
    outside = _Outside()
    weight = 0
    for start in range(0, len(body), _PIECE_BYTES):
        weight += _weight(outside.part_of(bytes(body[start : start + _PIECE_BYTES])))
        if weight > MAX_STRUCTURE:
            raise TooLarge(
                f"the body has too many parts: at most {MAX_STRUCTURE} values are read, where a list or an object "
                f"counts as {_WEIGHTS[b'{']} and a key as {_WEIGHTS[b':']}; send less at once"
            )


def _check_spelling(body: bytes | bytearray) -> None:
    num_bytes = 0
    for start in range(0, len(body), _PIECE_BYTES):
        piece = body[start : start + _PIECE_BYTES]
        num_bytes += ESCAPE_BYTES * piece.count(b"\\")
        if not piece.isascii():
            num_bytes += len(piece.translate(None, _ASCII))
        if num_bytes > MAX_SPELLED_BYTES:
            raise TooLarge(
                f"the body has more than {MAX_SPELLED_BYTES >> 20} MiB of characters that are not ASCII, where a "
                f"backslash counts as {ESCAPE_BYTES} bytes; send a shorter text"
            )


def _weight(piece: bytes | bytearray) -> int:
    marks = piece.translate(None, _NO_STRUCTURE)
    return sum(weight * marks.count(mark) for mark, weight in _WEIGHTS.items())


@dataclass(slots=True)
class _Outside:
    """Removes the strings from a body that comes piece by piece.

    Attributes:
        in_string: the last piece ended within a string.
        is_escaped: its last byte was a backslash that has a meaning for the next.
    """

    in_string: bool = False
    is_escaped: bool = False

    def part_of(self, piece: bytes) -> bytes:
        """Return the part of a piece that lies outside of strings."""
        if self.is_escaped:
            piece = piece[1:]
        num_last = len(piece) - len(piece.rstrip(b"\\"))
        self.is_escaped = num_last % 2 == 1
        quoted = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = quoted[self.in_string :: 2]
        self.in_string ^= len(quoted) % 2 == 0
        return b"".join(outside)
