"""Check the id that a client gives its request in the header X-Request-Id or in a field of the body.

It is short visible ASCII. It comes back in replies, logs and operators' routes. An empty one counts as not given.
"""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

# The end is written so that it is the same in every dialect: a `$` of Python also stands before a last line feed.
PATTERN = r"^[!-~]{0,128}(?![\s\S])"
MEANING = "at most 128 visible ASCII characters, without spaces"
RequestId = Annotated[str, Meta(pattern=PATTERN)]

_REQUEST_ID = re.compile(PATTERN)


def is_request_id(text: str) -> bool:
    """Return True if a client may use this text as the id of a request."""
    return text != "" and _REQUEST_ID.match(text) is not None
