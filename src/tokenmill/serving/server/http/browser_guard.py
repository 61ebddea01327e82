"""Keep web pages from using a server without a key through the browser of a person who can reach it.

A page may send requests anywhere, but cannot read the answer; so a request that changes something must come from a page
of the server or of an allowed origin, or from no page at all, and bodies must be of a type that a page cannot send
without asking first; what comes from no browser may say that it is a form, as curl does, or nothing. A page can also
let its own name point to this machine and read replies as from its own server (DNS rebinding); so clients of a server
on the loopback must call it by a name that only this machine or network gives.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenmill.core.errors import TokenMillError
from tokenmill.serving.server.http.errors import Forbidden, UnsupportedMediaType, error_response
from tokenmill.serving.server.http.listener import is_loopback

# These change nothing.
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
ANY = "*"
JSON = "application/json"
# A page of another origin may send this without asking first: taken where it is needed, and with its Origin checked.
MULTIPART = "multipart/form-data"
FILES_ROUTE = "/v1/files"
UPLOAD_ROUTES = (FILES_ROUTE, "/v1/audio/transcriptions", "/v1/audio/translations")

# `curl -d` says that its body is a form, and other programs say nothing.
_CURL_TYPES: tuple[list[str], ...] = ([], [""], ["application/x-www-form-urlencoded"])
# One of them comes with all that a page makes a browser post: Origin since 2020, the others where settings or old age
# leave it out.
_BROWSER_HEADERS = ("origin", "referer", "cookie", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest")
_BROWSER = "mozilla/"

# Names of this machine that no public name server gives out: of containers' hosts, and of mDNS (RFC 6762) in a network
# at home; a page of the internet cannot have one.
LOCAL_NAMES = frozenset({"host.docker.internal", "gateway.docker.internal", "host.containers.internal"})
LOCAL_DOMAINS = (".local", ".localhost")

_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+|\*))(?::\d*)?")


class BrowserGuard:
    """Middleware for servers without a key; where there is a key, foreign pages do not have it."""

    def __init__(
        self, app: ASGIApp, allowed_origins: Sequence[str], allowed_hosts: Sequence[str], on_loopback: bool
    ) -> None:
        """Check the Host header if the server is `on_loopback` or `allowed_hosts` lists names."""
        self._app = app
        self._origins = frozenset(allowed_origins)
        self._hosts = frozenset(host_name(host) for host in allowed_hosts) - {""}
        self._checks_hosts = (on_loopback or bool(allowed_hosts)) and ANY not in self._hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        error = self._refusal(scope) if scope["type"] == "http" else None
        if error is None:
            return await self._app(scope, receive, send)
        return await error_response(error, scope["path"])(scope, receive, send)

    def _refusal(self, scope: Scope) -> TokenMillError | None:
        headers, method = Headers(scope=scope), scope["method"]
        host = headers.get("host", "")
        kind = MULTIPART if scope["path"].endswith(UPLOAD_ROUTES) else JSON
        if self._checks_hosts and not self._is_known(host_name(host)):
            return Forbidden("the Host header names another machine; --allowed-hosts says which names this server has")
        if method in SAFE_METHODS:
            return None
        if not all(self._is_welcome(origin, host) for origin in headers.getlist("origin")):
            return Forbidden("a web page of another origin may not do this; --allowed-origins says which ones may")
        types = [_media_type(value) for value in headers.getlist("content-type")]
        is_like_curls = kind == JSON and types in _CURL_TYPES and not _is_of_a_browser(headers)
        if _has_body(headers) and types != [kind] and not is_like_curls:
            return UnsupportedMediaType(f"the body must be {kind}, and say so in the header Content-Type")
        return None

    def _is_known(self, name: str) -> bool:
        return is_loopback(name) or name in self._hosts or name in LOCAL_NAMES or name.endswith(LOCAL_DOMAINS)

    def _is_welcome(self, origin: str, host: str) -> bool:
        is_own = origin.partition("://")[2].lower() == host.lower() != ""
        return is_own or origin in self._origins or ANY in self._origins


def host_name(host: str) -> str:
    """Return the name or address in a Host header without the port and IPv6 brackets; empty: the header has no name."""
    found = _HOST.fullmatch(host.strip().lower())
    return (found["address"] or found["name"]) if found else ""


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _is_of_a_browser(headers: Headers) -> bool:
    is_named_so = headers.get("user-agent", "").lower().startswith(_BROWSER)
    return is_named_so or any(name in headers for name in _BROWSER_HEADERS)


def _media_type(value: str) -> str:
    return value.partition(";")[0].strip().lower()
