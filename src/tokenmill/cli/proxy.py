"""`tokenmill proxy`: clients in front, servers that compute prompts and servers that go on behind."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.cli.parser import Parser
from tokenmill.core.errors import InvalidConfig
from tokenmill.ipc.standard_streams import lossy


def run(arguments: Sequence[str]) -> int:
    """Serve until Ctrl-C; returns 0.

    Raises:
        InvalidConfig: a URL that is none.
        SystemExit: with code 2, an unknown flag; with 0 after --help.
    """
    given = make_parser().parse(arguments)
    for url in (*given.prefill, *given.decode):
        if not url.startswith(("http://", "https://")):
            raise InvalidConfig(f"a server is http://HOST:PORT or https://HOST:PORT, not {url!r}")
    from tokenmill.proxy.process import serve

    with lossy("stdout", "stderr"):
        return serve(given.prefill, given.decode, given.host, given.port, given.prefill_timeout)


def make_parser() -> Parser:
    """The parser of `proxy`."""
    parser = Parser("proxy", "Let one server compute prompts and another go on from there; see docs/prefill-decode.md.")
    parser.repeatable = {"--prefill", "--decode"}
    parser.add_argument("--prefill", action="append", required=True, help="server that computes prompts; repeatable")
    parser.add_argument("--decode", action="append", required=True, help="server that goes on; repeatable")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8080, help="port to listen on")
    parser.add_argument(
        "--prefill-timeout",
        type=float,
        default=120.0,
        help="seconds after which a prompt is left to the decode server",
    )
    return parser
