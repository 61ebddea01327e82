"""Put the handlers of errors and the guards around an application that speaks HTTP."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from tokenmill.config.configs import ServerConfig
from tokenmill.core.errors import TokenMillError
from tokenmill.serving.server.http.browser_guard import BrowserGuard
from tokenmill.serving.server.http.errors import handle_disconnect, handle_error, handle_http_exception
from tokenmill.serving.server.http.middleware import (
    ApiKeyMiddleware,
    BatchMiddleware,
    RequestIdMiddleware,
    SurplusMiddleware,
)


def guard(app: Starlette, config: ServerConfig, on_loopback: bool, also_open: frozenset[str]) -> None:
    """Add the error handlers and the middleware to an application.

    Args:
        on_loopback: only this machine reaches the socket.
        also_open: routes that need no key, besides those by which a server is watched.
    """
    app.add_exception_handler(HTTPException, handle_http_exception)
    app.add_exception_handler(ClientDisconnect, handle_disconnect)
    app.add_exception_handler(Exception, handle_error)
    app.add_exception_handler(TokenMillError, handle_error)
    if config.is_behind:
        app.add_middleware(BatchMiddleware)
    # The last one added is the outermost: CORS preflights carry no key, so CORS surrounds the key check.
    if config.api_key:
        keys: dict[str, Any] = {"api_keys": config.api_key, "root_path": config.root_path, "also_open": also_open}
        app.add_middleware(ApiKeyMiddleware, **keys)
    else:
        app.add_middleware(
            BrowserGuard,
            allowed_origins=config.allowed_origins,
            allowed_hosts=(*config.allowed_hosts, config.host) if on_loopback else config.allowed_hosts,
            on_loopback=on_loopback,
        )
    app.add_middleware(SurplusMiddleware, root_path=config.root_path)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(config.allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(RequestIdMiddleware)
