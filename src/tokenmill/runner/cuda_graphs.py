"""Decode steps as graphs: captured once for a ladder of sizes, then issued with one call each.

A step of n requests runs in the smallest size that holds it; the rows that are too many are a row that belongs to
nobody and whose pages are all page 0. What graphs give back stands in one memory, that of the largest. Knows nothing of
models: the work is a function of one tensor of inputs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.core.errors import InvalidConfig
from tokenmill.platform.protocol import Graph, Platform, Stream, Tensors

LARGEST = 512

Work = Callable[[torch.Tensor], Tensors]
"""[n, fields] int64 -> tensors of n rows."""
Report = Callable[[int, int], None]


def ladder(most: int) -> list[int]:
    """Batch sizes to capture, rising: dense where a padded row costs most, and `most` (up to `LARGEST`) itself."""
    most = min(most, LARGEST)
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, LARGEST + 1, 64)]
    return [*(size for size in steps if size < most), most]


class DecodeGraphs:
    """Graphs of one piece of work over a shared tensor of inputs.

    Args:
        padding: [1, fields] int64, the inputs of a row that belongs to nobody.
    """

    def __init__(
        self, platform: Platform, stream: Stream, work: Work, padding: npt.NDArray[np.int64], max_rows: int
    ) -> None:
        self._platform = platform
        self._stream = stream
        self._work = work
        self._padding = padding
        self._sizes = ladder(max_rows)
        self._inputs = torch.from_numpy(padding).to(platform.device).repeat(self._sizes[-1], 1)
        self._outputs: Tensors | None = None
        self._graphs: dict[int, Graph] = {}

    def capture(self, report: Report = lambda done, total: None, count: int | None = None) -> None:
        """Capture all sizes, or `count` of them, the largest first: the smaller ones fit into its memory.

        Raises:
            InvalidConfig: the memory is too small; says what to change.
        """
        # A collection that frees the graphs or the pinned memory of an engine before would break a capture that runs.
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            for done, size in enumerate(self._sizes[::-1][:count]):
                report(done, len(self._sizes))
                self._graphs[size] = self._platform.capture(partial(self._write, size), self._stream)
        except Exception as error:
            if not self._platform.is_out_of_memory(error):
                raise
            raise InvalidConfig(
                f"no memory is left for a CUDA graph of {size} rows: lower --gpu-memory-utilization or "
                "--max-num-seqs, or pass --enforce-eager"
            ) from error
        finally:
            if was_enabled:
                gc.enable()
        report(len(self._sizes), len(self._sizes))

    def _write(self, size: int) -> Tensors:
        """The work of one size; what it gives, in the memory that all sizes share."""
        values = self._work(self._inputs[:size])
        if self._outputs is None:
            self._outputs = tuple(torch.empty_like(value) for value in values)
        return tuple(shared[:size].copy_(value) for shared, value in zip(self._outputs, values, strict=True))

    @property
    def num_graphs(self) -> int:
        """How many are captured."""
        return len(self._graphs)

    def close(self) -> None:
        """Let go of the graphs and of the work in them: its owner owns these graphs, and memory waits for neither."""
        self._graphs.clear()
        self._outputs = None
        del self._work

    def padded(self, inputs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """Inputs [n, fields] with rows of padding up to a captured size; None if no graph is that large."""
        n = len(inputs)
        size = next((size for size in self._sizes if size >= n and size in self._graphs), None)
        if size is None:
            return None
        return np.concatenate([inputs, np.repeat(self._padding, size - n, axis=0)])

    def run(self, inputs: torch.Tensor) -> Tensors:
        """On the stream of the graphs: issue the graph for these inputs [size, fields], padded, on the device.

        Returns:
            What the work gave back for the whole size; the next replay, of any size, overwrites it.
        """
        size = len(inputs)
        self._inputs[:size].copy_(inputs)
        self._graphs[size].replay()
        return self._graphs[size].outputs
