"""Capture graphs one after the other, undisturbed by Python's garbage collection. Knows nothing of their work."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

from tokenmill.core.errors import InvalidConfig
from tokenmill.platform.protocol import Graph, Platform, Stream, Tensors

Report = Callable[[int, int], None]
"""Called with (graphs done, graphs in all)."""


def capture_all(
    platform: Platform, stream: Stream, works: Iterable[tuple[int, Callable[[], Tensors]]], report: Report
) -> list[Graph]:
    """Capture some work as graphs, in its order: the largest first, so that the others fit into its memory.

    Args:
        works: rows of each graph, and its work.

    Raises:
        InvalidConfig: the memory is too small; says what to change.
    """
    # A collection that frees the graphs or the pinned memory of an engine before would break a capture that runs.
    gc.collect()
    was_enabled, todo, graphs = gc.isenabled(), list(works), list[Graph]()
    gc.disable()
    try:
        for _, work in todo:
            report(len(graphs), len(todo))
            graphs.append(platform.capture(work, stream))
    except Exception as error:
        if not platform.is_out_of_memory(error):
            raise
        raise InvalidConfig(
            f"no memory is left for a CUDA graph of {todo[len(graphs)][0]} rows: lower --gpu-memory-utilization or "
            "--max-num-seqs, or pass --enforce-eager"
        ) from error
    finally:
        if was_enabled:
            gc.enable()
    report(len(todo), len(todo))
    return graphs
