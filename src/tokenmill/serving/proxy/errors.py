"""What the proxy itself tells clients; all else that they read of errors is the servers'."""

from __future__ import annotations

from tokenmill.core.errors import TokenMillError


class NoServer(TokenMillError):
    """No server can be reached that could answer."""

    status = 503
    type = "proxy_error"


class ServerFailed(TokenMillError):
    """A server has failed with the request."""

    status = 502
    type = "proxy_error"
