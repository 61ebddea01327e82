"""Open the socket that the server listens on, before anything expensive starts."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import ssl
import stat
from pathlib import Path

from tokenmill.config.configs import ServerConfig
from tokenmill.core.errors import InvalidConfig


def bind(config: ServerConfig) -> socket.socket:
    """Bind, but do not listen yet: until the server is ready, connections are refused instead of left hanging.

    Raises:
        InvalidConfig: the address cannot be taken; one sentence says why and what to change.
    """
    if config.uds is not None:
        return _bind_unix(config.uds)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host or None, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise InvalidConfig(f"--host {config.host}: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise explain(error, config) from error
    return listener


def check_tls(config: ServerConfig) -> None:
    """Read the certificate and its key, if there are any, before anything expensive starts.

    Raises:
        InvalidConfig: they cannot be read or do not fit.
    """
    if config.ssl_certfile is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as error:  # ssl.SSLError is one
        reason = error.strerror or error
        raise InvalidConfig(
            f"--ssl-certfile {config.ssl_certfile}, --ssl-keyfile {config.ssl_keyfile}: {reason}"
        ) from error


def explain(error: OSError, config: ServerConfig) -> InvalidConfig:
    """Return an error that says why an address could not be taken."""
    where = config.uds or f"{config.host}:{config.port}"
    if error.errno == errno.EADDRINUSE:
        other = "" if config.uds else "; stop what uses it or choose another port with --port"
        return InvalidConfig(f"{where} is already in use{other}")
    return InvalidConfig(f"cannot listen on {where}: {error.strerror}")


def is_loopback(name: str) -> bool:
    """Return True if a name or an address stands for the loopback of this machine."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_on_loopback(listener: socket.socket) -> bool:
    """Return True if only this machine can reach the socket over IP."""
    return listener.family in (socket.AF_INET, socket.AF_INET6) and is_loopback(listener.getsockname()[0])


def url(config: ServerConfig, listener: socket.socket) -> str:
    """Return the URL at which clients find the server."""
    scheme = "https" if config.ssl_certfile else "http"
    if config.uds is not None:
        return f"{scheme}+unix://{config.uds}"
    port = listener.getsockname()[1]
    host = "127.0.0.1" if config.host in ("", "0.0.0.0", "::") else config.host
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _bind_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_abandoned_socket(path):
            Path(path).unlink()
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise InvalidConfig(f"--uds {path}: {error.strerror or error}") from error
    return listener


def _is_abandoned_socket(path: str) -> bool:
    """Return True for a socket file whose server is gone; any other file must stay."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED
