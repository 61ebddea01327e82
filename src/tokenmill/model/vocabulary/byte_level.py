"""GPT-2's spelling of bytes by printable characters, as byte-level vocabularies have it."""

from __future__ import annotations

import functools
from collections.abc import Mapping


@functools.cache
def byte_of_character() -> Mapping[str, int]:
    """Return GPT-2's table: printable Latin-1 characters map to themselves, U+0100 and up to the other bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


@functools.lru_cache(maxsize=1 << 15)
def byte_level_bytes(piece: str) -> bytes:
    """Return the bytes of a byte-level token; for characters outside the table, the token's own UTF-8."""
    try:
        return bytes([byte_of_character()[character] for character in piece])
    except KeyError:
        return piece.encode("utf-8")
