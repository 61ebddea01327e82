"""Read data: URLs in base64, the form in which clients send images and sound."""

from __future__ import annotations

import base64
import binascii
import re

from tokenmill.core.errors import InvalidRequest

# Bytes of a file; a PNG of the most pixels that are decoded is rarely larger.
MOST_BYTES = 32 << 20
# Characters of a URL in which its head is looked for.
_LONGEST_HEAD = 200
_DATA_URL = re.compile(r"data:[\w.+-]*/?[\w.+-]*(;[\w.+=-]+)*?;base64,", re.ASCII)


def data_of(url: str, noun: str = "an image") -> bytes:
    """Return the bytes of a data: URL.

    Args:
        noun: what should be in it, for errors.

    Raises:
        InvalidRequest: it is no data: URL, not base64, or too large.
    """
    head = _DATA_URL.match(url[:_LONGEST_HEAD])
    if head is None:
        raise InvalidRequest(f"{noun} must be a data: URL in base64; nothing is fetched", "messages")
    if 3 * (len(url) - head.end()) // 4 > MOST_BYTES:
        raise InvalidRequest(f"{noun} of more than {MOST_BYTES >> 20} MiB", "messages")
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"the data: URL of {noun} is not base64", "messages") from None


def data_url(data: bytes, kind: str = "application/octet-stream") -> str:
    """Return bytes as a data: URL; readers go by the content, not by its kind."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
