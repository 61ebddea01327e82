"""What can be refused before any process starts: each would otherwise come to light after the weights are read, or as a
traceback from where nobody expects it."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from tokenmill.config import ServerConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.frontend.chat_template import load_chat_template
from tokenmill.ipc.channels import socket_path
from tokenmill.replicas.topology import Topology

# `sun_path` of an address has 108 bytes, the last of which is 0.
LONGEST_SOCKET_PATH = 107
# Measured: 29 of the process that serves HTTP and 6 for each process beside it, with nobody connected.
FEWEST_DESCRIPTORS = 56
DESCRIPTORS_PER_PROCESS = 8


def check_start(server: ServerConfig, topology: Topology) -> None:
    """Check what is needed before the start.

    Raises:
        InvalidConfig, InvalidCheckpoint: the chat template cannot be read or does not compile, or this process may
            open too few files.
    """
    if server.chat_template is not None:
        load_chat_template(Path(), {}, server.chat_template)
    needed = FEWEST_DESCRIPTORS + DESCRIPTORS_PER_PROCESS * topology.num_processes
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise InvalidConfig(
            f"this process may open {limit} files and needs {needed} at least: raise the limit, e.g. ulimit -n 4096"
        )


def check_sockets(folder: Path, topology: Topology) -> None:
    """See that the sockets of all processes can lie in a folder.

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
