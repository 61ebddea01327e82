"""Check what can be checked before any process starts, so that errors come early and as one sentence."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from tokenmill.config.configs import ServerConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.ipc.channels import socket_path
from tokenmill.ipc.topology import Topology

# `sun_path` of an address has 108 bytes, the last of which is 0.
LONGEST_SOCKET_PATH = 107
# Measured: 29 of the process that serves HTTP and 6 for each process beside it, without clients.
FEWEST_DESCRIPTORS = 56
DESCRIPTORS_PER_PROCESS = 8


def check_start(server: ServerConfig, topology: Topology) -> None:
    """Check templates, folders and limits before the start.

    Raises:
        InvalidConfig, InvalidCheckpoint: the chat template cannot be read or does not compile, the folder of adapters
            cannot be, or this process may open too few files.
    """
    if server.lora_dir is not None:
        _check_folder("--lora-dir", server.lora_dir)
    if server.chat_template is not None:
        from tokenmill.serving.frontend.chat_template import load_chat_template  # brings jinja2

        load_chat_template(Path(), {}, server.chat_template)
    needed = FEWEST_DESCRIPTORS + DESCRIPTORS_PER_PROCESS * topology.num_processes
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise InvalidConfig(
            f"this process may open {limit} files and needs {needed} at least: raise the limit, e.g. ulimit -n 4096"
        )


def _check_folder(flag: str, name: str) -> None:
    """Check the folder of adapters; else each adapter would be refused as if its own path were wrong."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise InvalidConfig(f"{flag} {name}: there is no such folder; make it, or name another one")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise InvalidConfig(f"{flag} {name}: this folder may not be read by the user that the server runs as")


def check_sockets(folder: Path, topology: Topology) -> None:
    """Check that the sockets of all processes fit into a folder.

    Raises:
        InvalidConfig: a path is too long for a socket.
    """
    longest = max((socket_path(folder, name) for name in topology.parts), key=lambda path: len(os.fsencode(path)))
    length = len(os.fsencode(longest))
    if length > LONGEST_SOCKET_PATH:
        raise InvalidConfig(
            f"{longest} has {length} bytes, a socket's path at most {LONGEST_SOCKET_PATH}: set TMPDIR to a shorter "
            "folder, e.g. /tmp"
        )
