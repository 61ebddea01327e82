"""Serve the page and its files over HTTP, with headers that let only its own scripts run.

The files hold no secret and need no key; the data that they show needs one, and the page asks the user for it.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Awaitable, Callable
from functools import cached_property
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

# Where the page itself is: it opens its reference at the second one.
PAGE_ROUTES = ("/", "/docs")
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "font-src 'self'",
        "img-src 'self' data:",  # those that a person adds to a chat, and drawn diagrams
        "frame-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types pdf",  # which names the worker that reads PDFs, and nothing else
    )
)
# Of the frame that draws diagrams: it belongs to no origin, and its scripts can load and send nothing.
FRAME_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'unsafe-inline'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'self'",
        "sandbox allow-scripts",
    )
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Kept, and asked for again each time: a server that was updated brings no half of an old page.
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}

# A document without an origin loads its scripts as a stranger.
_FOR_FRAME = {"Cross-Origin-Resource-Policy": "cross-origin"}
_OWN_HEADERS = {
    "diagram.html": {"Content-Security-Policy": FRAME_POLICY, "X-Frame-Options": "SAMEORIGIN"},
    "diagram_frame.js": _FOR_FRAME,
    "vendor/mermaid.min.js": _FOR_FRAME,
}

Route = Callable[[Request], Awaitable[Response]]

FOLDER = Path(__file__).parents[2] / "web" / "static"
PAGE = "index.html"
# Below this path, seen from the page, lie all files but the page itself.
PREFIX = "web/"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}


def page_routes() -> dict[str, Route]:
    """Return the routes of the page by path."""
    assets = read_assets()
    routes = {"/" + PREFIX + name: _route(asset) for name, asset in assets.items() if name != PAGE}
    return routes | dict.fromkeys(PAGE_ROUTES, _route(assets[PAGE]))


def _route(asset: Asset) -> Route:
    async def answer(request: Request) -> Response:
        headers = _HEADERS | _OWN_HEADERS.get(asset.name, {}) | {"ETag": asset.etag, "Content-Type": asset.media_type}
        if asset.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(asset.compressed, headers=headers | {"Content-Encoding": "gzip"})
        return Response(asset.body, headers=headers)

    return answer


class Asset:
    """One file of the page: read once, compressed once, named by its content.

    Attributes:
        name: its path below the folder, with slashes.
        body: its bytes.
        etag: a name of its content, in quotes as HTTP wants it.
    """

    def __init__(self, name: str, body: bytes) -> None:
        self.name = name
        self.body = body
        self.media_type = _MEDIA_TYPES[Path(name).suffix]
        self.etag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'

    @cached_property
    def compressed(self) -> bytes:
        """Its bytes compressed with gzip, the same in every process."""
        return gzip.compress(self.body, 9, mtime=0)


def read_assets() -> dict[str, Asset]:
    """Return the files that browsers may have, by name, without the notes and licences beside them."""
    paths = sorted(path for path in FOLDER.rglob("*") if path.suffix in _MEDIA_TYPES)
    names = [path.relative_to(FOLDER).as_posix() for path in paths]
    return {name: Asset(name, path.read_bytes()) for name, path in zip(names, paths, strict=True)}
