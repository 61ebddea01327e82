"""`tokenmill stop MODEL`: end running servers of this user on this machine, as Ctrl-C would."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence

from tokenmill.cli.servers import find_entry, servers_folder
from tokenmill.config.parser import Parser, positive
from tokenmill.core.errors import InvalidConfig
from tokenmill.ipc.server_registry import RunningServer, is_running, running_servers

LOOK_SECONDS = 0.05


def run(arguments: Sequence[str]) -> int:
    """End the servers and wait for them; returns 0, or 1 if one has not ended in time.

    Raises:
        InvalidConfig: no server is meant.
    """
    namespace = make_parser().parse(arguments)
    entries = running_servers(servers_folder())
    wanted = entries if namespace.all else [_meant(entries, name) for name in namespace.servers]
    if not wanted and not namespace.all:
        raise InvalidConfig("name a model or a process id as `tokenmill ps` shows them, or give --all")
    for entry in wanted:
        with contextlib.suppress(ProcessLookupError):
            os.kill(entry.pid, signal.SIGTERM)
    end = time.monotonic() + namespace.timeout
    while (left := [entry for entry in wanted if is_running(entry)]) and time.monotonic() < end:
        time.sleep(LOOK_SECONDS)
    for entry in wanted:
        state = "still ends its streams" if entry in left else "stopped"
        print(f"{', '.join(entry.models)} ({entry.pid}): {state}")
    return int(bool(left))


def make_parser() -> Parser:
    """Return the parser of `stop`."""
    parser = Parser(
        "stop", "End running servers of yours on this machine; open streams end first.", "MODEL ... | --all"
    )
    parser.add_argument("servers", nargs="*", metavar="MODEL", help="model, folder, hub id, or the process id")
    parser.add_argument("--all", action="store_true", help="end all of them")
    parser.add_argument("--timeout", type=positive, default=30.0, metavar="S", help="seconds to wait (default: 30)")
    return parser


def _meant(entries: Sequence[RunningServer], name: str) -> RunningServer:
    """Return the server of a name.

    Raises:
        InvalidConfig: there is none.
    """
    by_pid = [entry for entry in entries if str(entry.pid) == name]
    found = by_pid[0] if by_pid else find_entry(entries, name)
    if found is None:
        running = ", ".join(entry.models[0] for entry in entries) or "none"
        raise InvalidConfig(f"no server of {name} runs here; running: {running}")
    return found
