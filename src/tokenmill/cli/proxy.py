"""`tokenmill proxy`: stand between clients and two groups of servers: one computes prompts, the other goes on."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tokenmill.config.configs import ServerConfig
from tokenmill.config.flags import Given, add_flags, build
from tokenmill.config.parser import Parser, positive
from tokenmill.core.errors import InvalidConfig
from tokenmill.ipc.standard_streams import lossy

# What a server of any kind has.
SHARED = (
    "host",
    "api_key",
    "allowed_origins",
    "allowed_hosts",
    "ssl_keyfile",
    "ssl_certfile",
    "max_body_bytes_in_flight",
    "head_timeout",
    "body_timeout",
    "keep_alive_timeout",
    "shutdown_timeout",
)


def run(arguments: Sequence[str]) -> int:
    """Serve until Ctrl-C; returns 0.

    Raises:
        InvalidConfig: an invalid URL, an impossible limit, or an address that cannot be taken.
        SystemExit: with code 2, an unknown flag; with 0 after --help.
    """
    namespace = make_parser().parse(arguments)
    for url in (*namespace.prefill, *namespace.decode):
        if not url.startswith(("http://", "https://")):
            raise InvalidConfig(f"a server is http://HOST:PORT or https://HOST:PORT, not {url!r}")
    config = build(ServerConfig, Given(vars(namespace), os.environ)).resolve()
    from tokenmill.serving.proxy.process import serve
    from tokenmill.serving.proxy.servers import Servers

    with lossy("stdout", "stderr"):
        return serve(Servers(namespace.prefill), Servers(namespace.decode), config, namespace.prefill_timeout)


def make_parser() -> Parser:
    """Return the parser of `proxy`."""
    parser = Parser("proxy", "Let one server compute prompts and another go on from there; see docs/prefill-decode.md.")
    parser.repeatable = {"--prefill", "--decode"}
    parser.add_argument("--prefill", action="append", required=True, help="server that computes prompts; repeatable")
    parser.add_argument("--decode", action="append", required=True, help="server that goes on; repeatable")
    parser.add_argument("--port", type=int, default=8080, help="port to listen on")
    parser.add_argument(
        "--prefill-timeout",
        type=positive,
        default=120.0,
        help="seconds after which a prompt is left to the decode server",
    )
    add_flags(parser, ServerConfig, "limits and guards, as for serve", SHARED)
    return parser
