"""Define the proxy's own errors; all other errors that clients see are the servers'."""

from __future__ import annotations

from tokenmill.core.errors import TokenMillError


class NoServer(TokenMillError):
    """No server that could answer can be reached."""

    status = 503
    type = "proxy_error"


class ServerFailed(TokenMillError):
    """A server failed with the request."""

    status = 502
    type = "proxy_error"
