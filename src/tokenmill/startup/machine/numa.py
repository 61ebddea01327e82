"""Find the cores nearest to each part of memory, and keep each engine on its own nodes."""

from __future__ import annotations

import os
from pathlib import Path


def numa_nodes(root: Path = Path("/")) -> list[set[int]]:
    """Return the cores of each NUMA node that this process may use, without empty nodes; at least one node."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    lists = [folder / "cpulist" for folder in sorted(folders, key=lambda folder: int(folder.name[4:]))]
    nodes = [_cores(path.read_text()) & allowed for path in lists if path.exists()]
    return [node for node in nodes if node] or [allowed]


def nodes_of(index: int, count: int, nodes: list[set[int]]) -> set[int]:
    """Return the cores of the nodes that one of `count` engines keeps to: whole nodes, shared by as many engines each.

    If that does not divide evenly, and on a machine of one node, return all cores: they are shared in number only.
    """
    if len(nodes) % count and count % len(nodes):
        return set().union(*nodes)
    first = index * len(nodes) // count
    return set().union(*nodes[first : first + max(1, len(nodes) // count)])


def keep_to_nodes(index: int, count: int) -> bool:
    """Let the threads that this process starts from now on run on its own nodes only; False if these are all nodes."""
    nodes = numa_nodes()
    own = nodes_of(index, count, nodes)
    if len(own) == sum(map(len, nodes)):
        return False
    os.sched_setaffinity(0, own)
    return True


def _cores(text: str) -> set[int]:
    """Parse a list of cores as the kernel writes it, `0-3,8-11`."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found
