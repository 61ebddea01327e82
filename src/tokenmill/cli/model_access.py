"""Reach a model for `chat` and `complete`: a running server or this process, behind one protocol."""

from __future__ import annotations

import argparse
import os
import unicodedata
from typing import IO, TYPE_CHECKING

from tokenmill.cli.servers import check_model_is_there
from tokenmill.config.parser import Parser
from tokenmill.config.server_settings import DEFAULT_PORT
from tokenmill.llm.model_protocol import ModelAccess

if TYPE_CHECKING:
    from tokenmill.llm.remote import RemoteModel


def add_access_flags(parser: Parser) -> None:
    """Add the flags that choose a server or a model in this process."""
    add_server_flags(parser)
    group = parser.add_argument_group("which model")
    group.add_argument("--model", default=None, help="name of the model at the server (default: the one it serves)")
    group.add_argument(
        "--local",
        nargs="?",
        const="",
        metavar="MODEL",
        help="run a model in this process instead: a folder or hub id (default: the bundled demo model)",
    )


def add_server_flags(parser: Parser) -> None:
    """Add the flags that choose a server."""
    group = parser.add_argument_group("server")
    url = os.environ.get("TOKENMILL_URL", f"http://127.0.0.1:{DEFAULT_PORT}")
    where = "server to talk to, or unix:PATH, also as TOKENMILL_URL (default: %(default)s)"
    group.add_argument("--url", default=url, help=where)
    group.add_argument("--api-key", default=None, help="its key, also as TOKENMILL_API_KEY")
    cacert, trust = os.environ.get("TOKENMILL_CACERT"), "certificates to trust (PEM), also as TOKENMILL_CACERT"
    group.add_argument("--cacert", default=cacert, metavar="FILE", help=trust)


def connect(namespace: argparse.Namespace, model: str | None = None) -> RemoteModel:
    """Connect to the server that the flags of `add_server_flags` choose.

    Raises:
        ServerRefused: the certificates cannot be read.
    """
    from tokenmill.llm.remote import RemoteModel

    # A server takes several keys from the same variable; any of them will do.
    key = namespace.api_key or os.environ.get("TOKENMILL_API_KEY", "").split(",")[0] or None
    return RemoteModel(namespace.url, key, model, namespace.cacert)


def open_access(namespace: argparse.Namespace) -> ModelAccess:
    """Load the local model or connect to the server, as the flags choose.

    Raises:
        TokenMillError: the model cannot be loaded.
    """
    if namespace.local is not None:
        check_model_is_there(namespace.local)
        from tokenmill.llm.local import LocalModel

        return LocalModel(namespace.local)
    return connect(namespace, namespace.model)


def write_delta(stream: IO[str], text: str) -> None:
    """Write a piece of an answer at once; to a terminal without the control characters that could steer it."""
    stream.write(harmless(text) if stream.isatty() else text)
    stream.flush()


def harmless(text: str) -> str:
    """Return the text without the control characters that could steer a terminal."""
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc")
