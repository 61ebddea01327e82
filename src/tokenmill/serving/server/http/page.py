"""Serve the page and its files over HTTP, with headers that let only its own scripts run.

The files hold no secret and need no key; the data that they show needs one, and the page asks the user for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from tokenmill.serving.server.assets import PAGE, PREFIX, Asset, read_assets

# Where the page itself is: it opens its reference at the second one.
PAGE_ROUTES = ("/", "/docs")
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",  # those that a person adds to a chat
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
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

Route = Callable[[Request], Awaitable[Response]]


def page_routes() -> dict[str, Route]:
    """Return the routes of the page by path."""
    assets = read_assets()
    routes = {"/" + PREFIX + name: _route(asset) for name, asset in assets.items() if name != PAGE}
    return routes | dict.fromkeys(PAGE_ROUTES, _route(assets[PAGE]))


def _route(asset: Asset) -> Route:
    async def answer(request: Request) -> Response:
        headers = _HEADERS | {"ETag": asset.etag, "Content-Type": asset.media_type}
        if asset.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(asset.compressed, headers=headers | {"Content-Encoding": "gzip"})
        return Response(asset.body, headers=headers)

    return answer
