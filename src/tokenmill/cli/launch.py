"""`tokenmill launch CLIENT`: start a coding agent that talks to a running server, or to one that is started for it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.cli.coding_agents import AGENTS, KEY_VARIABLE, CodingAgent, Setting, Target
from tokenmill.cli.model_access import add_server_flags, connect
from tokenmill.config.parser import Parser
from tokenmill.core.errors import InvalidConfig, TokenMillError
from tokenmill.core.whole_file import whole_file
from tokenmill.ipc.python_child import run_program, start_python

if TYPE_CHECKING:
    from tokenmill.llm.remote import RemoteModel

STOP_SECONDS = 15.0
_EMPTY_KEY = "none"


class ServerEnded(TokenMillError):
    """The server that was started for a client ended before it was ready."""


def run(arguments: Sequence[str]) -> int:
    """Start the client and return its exit code.

    Raises:
        TokenMillError: the client is not installed, or no server answers.
    """
    own, client_arguments = split(arguments)
    namespace = make_parser().parse(own)
    agent = AGENTS[namespace.client]
    program = shutil.which(namespace.program or agent.program)
    if program is None:
        name = namespace.program or agent.program
        raise InvalidConfig(f"{name} is not on the PATH: {agent.install}, or name it with --program")
    folder = Path(namespace.folder or f"~/.cache/tokenmill/launch/{namespace.client}").expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with serving(namespace, folder):
        setting = write_setting(agent, target_of(namespace, folder))
        return run_program([program, *setting.arguments, *client_arguments], setting.environment)


def make_parser() -> Parser:
    """Return the parser of `launch`."""
    parser = Parser(
        "launch",
        "Start a coding agent against a running server. All that it keeps stays in a folder of its own. What stands "
        "behind -- are the client's own arguments.",
        "CLIENT [-- ARGUMENTS]",
    )
    parser.add_argument("client", choices=tuple(AGENTS), metavar="CLIENT", help=f"one of {', '.join(AGENTS)}")
    add_server_flags(parser)
    parser.add_argument("--model", help="name of the model at the server (default: the first that it serves)")
    parser.add_argument(
        "--serve", metavar="MODEL", help="start a server with this model for the client, and stop it afterwards"
    )
    parser.add_argument("--folder", help="folder of the client (default: ~/.cache/tokenmill/launch/CLIENT)")
    parser.add_argument("--program", metavar="PATH", help="the client's program, if it is not on the PATH")
    return parser


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return our own arguments, and those of the client, which stand behind the first `--`."""
    given = list(arguments)
    place = given.index("--") if "--" in given else len(given)
    return given[:place], given[place + 1 :]


def target_of(namespace: argparse.Namespace, folder: Path) -> Target:
    """Return the server that the flags choose, and its model.

    Raises:
        TokenMillError: no server answers, or it has no such model.
    """
    if namespace.url.startswith("unix:"):
        raise InvalidConfig("clients need an address: --url http://..., not a socket in the file system")
    url = namespace.url.rstrip("/").removesuffix("/v1")
    model = model_of(connect(namespace), namespace.model)
    key = namespace.api_key or os.environ.get(KEY_VARIABLE, "").split(",")[0] or _EMPTY_KEY
    return Target(url, str(model["id"]), int(str(model.get("max_model_len") or 32768)), key, folder)


def model_of(server: RemoteModel, name: str | None) -> Mapping[str, object]:
    """Return what the server says of a model: of this name, or the first.

    Raises:
        TokenMillError: no server answers, or it has no such model.
    """
    models: list[dict[str, object]] = json.loads(server.read("/v1/models"))["data"]
    found = [model for model in models if name in (None, model["id"])]
    if not found:
        raise InvalidConfig(f"--model {name}: the server has {', '.join(str(model['id']) for model in models)}")
    return found[0]


def write_setting(agent: CodingAgent, target: Target) -> Setting:
    """Write the client's files into its folder, and return how it is started."""
    setting = agent.setting(target)
    for name, text in setting.files.items():
        with whole_file(target.folder / name, 0o600) as file:
            file.write(text.encode())
    return setting


@contextlib.contextmanager
def serving(namespace: argparse.Namespace, folder: Path) -> Iterator[None]:
    """Run a server while the client runs, if `--serve` asks for it, and point `namespace.url` to it.

    Raises:
        ServerEnded: it ended before it was ready; its log says why.
    """
    if namespace.serve is None:
        yield
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    namespace.url = f"http://127.0.0.1:{port}"
    log = folder / "server.log"
    print(f"starting a server with {namespace.serve}; its log: {log}", file=sys.stderr)
    if namespace.api_key:
        os.environ[KEY_VARIABLE] = namespace.api_key
    with log.open("wb") as output:
        # Ctrl-C is the client's.
        command = ["-m", "tokenmill", "serve", namespace.serve, "--port", str(port)]
        server = start_python(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        _wait_for(server, port, log)
        yield
    finally:
        server.terminate()
        try:
            server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_for(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait until the server takes connections, however long its model takes to load."""
    while server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.2)
    raise ServerEnded(f"the server ended with code {server.returncode}; see {log}")
