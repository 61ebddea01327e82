"""What a client may call its request, in the header X-Request-Id or in a field of the body: visible ASCII, not much.

It comes back in replies, and is shown in logs and by operators' routes. An empty one is none.
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
    """Whether a client may call a request so."""
    return text != "" and _REQUEST_ID.match(text) is not None
