"""`tokenmill ps`: list this user's running servers on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from tokenmill.cli.servers import is_ready, servers_folder
from tokenmill.config.parser import Parser
from tokenmill.core.sizes import size_text
from tokenmill.ipc.server_registry import RunningServer, memory_of, running_servers

HEAD = ("MODEL", "STATE", "ADDRESS", "PID", "MEMORY", "SINCE")


def run(arguments: Sequence[str]) -> int:
    """Print a line for each server; returns 0.

    Raises:
        TokenMillError: the folder of the servers is not this user's alone.
    """
    namespace = make_parser().parse(arguments)
    entries = running_servers(servers_folder())
    if namespace.json:
        shown = [
            msgspec.structs.asdict(one) | {"ready": is_ready(one), "memory": memory_of(one.pid)} for one in entries
        ]
        print(msgspec.json.encode(shown).decode())
    elif not entries:
        print("no server of yours runs on this machine; tokenmill serve or tokenmill run starts one")
    else:
        print(table(entries, time.time()))
    return 0


def make_parser() -> Parser:
    """Return the parser of `ps`."""
    parser = Parser("ps", "List your running servers on this machine: model, address, process, memory, since when.")
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    return parser


def table(entries: Sequence[RunningServer], now: float) -> str:
    """Return the servers as a table with columns as wide as they need."""
    rows = [HEAD, *(_row(entry, now) for entry in entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(entry: RunningServer, now: float) -> tuple[str, ...]:
    memory = memory_of(entry.pid)
    return (
        ", ".join(entry.models),
        "ready" if is_ready(entry) else "starting",
        entry.url,
        str(entry.pid),
        size_text(memory) if memory else "-",
        ago(now - entry.since),
    )


def ago(seconds: float) -> str:
    """Return a time that has passed: `12 s`, `5 min`, `3 h`, `2 days`."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
