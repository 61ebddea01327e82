"""Make a JSON response from a msgspec struct."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response


def json_response(content: Any, status: int = 200) -> Response:
    """Encode `content` as the body."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")
