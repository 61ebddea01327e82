"""A Starlette application that can describe itself: each route is added together with its part of /openapi.json.

Knows no route of ours, no bodies and no errors: the description is completed by `openapi.py`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

Handler = Callable[[Request], Awaitable[Response]]

# Where a path says what may stand for a name: `{model:path}`.
_CONVERTER = re.compile(r":\w+\}")
_SLASHES = re.compile("/{2,}")


class Application(Starlette):
    """Routes, the first that fits a path answers it, and the OpenAPI document of those that are described.

    Attributes:
        document: the OpenAPI document; what it lacks may be added until the first request.
    """

    def __init__(self, title: str, version: str, root_path: str = "") -> None:
        """Begin without routes but /openapi.json; `root_path` is a prefix that a proxy in front takes away."""
        super().__init__()
        # A redirect to a path without its last slash would be built from the Host header, which is the client's choice.
        self.router.redirect_slashes = False
        self._root_path = root_path
        self.document: dict[str, Any] = {"openapi": "3.1.0", "info": {"title": title, "version": version}, "paths": {}}
        self.router.routes.append(Route("/openapi.json", self._describe))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "http":
            scope["path"] = plain_path(scope["path"], self._root_path.rstrip("/"))
        if self._root_path:
            scope["root_path"] = self._root_path
        await super().__call__(scope, receive, send)

    def add(self, method: str, path: str, handler: Handler) -> None:
        """Let a handler answer a path, without a word in the description; what answers GET answers HEAD too."""
        self._append(method, path, handler)
        if method == "GET":
            self._append("HEAD", path, _without_body(handler))

    def _append(self, method: str, path: str, handler: Handler) -> None:
        route = Route(path, handler, methods=[method])
        route.methods = {method}  # Starlette adds HEAD to GET
        self.router.routes.append(route)

    def add_described(self, method: str, path: str, handler: Handler, more: Mapping[str, Any] | None = None) -> None:
        """Let a handler answer a path, described by its name and its docstring.

        Args:
            more: further entries of the operation, such as its body.
        """
        self.add(method, path, handler)
        name, shown = handler.__name__, _CONVERTER.sub("}", path)
        self.document["paths"].setdefault(shown, {})[method.lower()] = {
            "summary": name.replace("_", " ").title(),
            "description": inspect.getdoc(handler) or "",
            "operationId": re.sub(r"\W", "_", name + shown) + f"_{method.lower()}",
            **(more or {}),
        }

    async def _describe(self, request: Request) -> Response:
        prefix = request.scope.get("root_path", "").rstrip("/")
        return JSONResponse(self.document | ({"servers": [{"url": prefix}]} if prefix else {}))


def plain_path(path: str, prefix: str = "") -> str:
    """Return a path with single slashes and none at its end, as a base URL ending in one makes it of a route.

    The root, behind a proxy's prefix too, keeps its slash: its page has links that are relative to it.
    """
    path = _SLASHES.sub("/", path)
    return path if path == prefix + "/" else path.rstrip("/")


def _without_body(handler: Handler) -> Handler:
    """Return a handler that answers with the head of another's response; a stream is not begun for it."""

    async def head(request: Request) -> Response:
        response = await handler(request)
        bare = Response(status_code=response.status_code)
        bare.raw_headers = list(response.raw_headers)  # without a length of its own, where a stream has none
        return bare

    return head
