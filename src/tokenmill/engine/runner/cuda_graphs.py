"""Decode steps as graphs: captured once for a ladder of sizes, then issued with one call each.

A step of n requests runs in the smallest size that holds it; surplus rows stand for one spare row that no request
owns and whose pages are all page 0. Where requests have drafts, there are sizes for several tokens of each:

|request 0: token, draft, draft|request 1: token|padding: a token each| ... |spare tokens|

The outputs of all graphs share one memory, that of the largest. Knows nothing of models: the work is a function of a
tensor of inputs, and of where each request begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.platform.capturing import Report, capture_all
from tokenmill.platform.protocol import Graph, Platform, Stream, Tensors

LARGEST = 512
# Drafts of a request; a size holds those of all its requests.
DRAFTS = (2, 4, 8)
# Tokens of a size with drafts, for each that a step has: beyond that each token is better off as a row of its own,
# though the row's keys are read as often.
MOST_PADDING = 2

Work = Callable[[torch.Tensor, torch.Tensor], Tensors]
"""Inputs [n, fields] int64 and where requests begin, [rows + 1] int32 -> tensors of n rows."""
Shape = tuple[int, int]
"""Requests of a graph, and the most tokens of each."""


def ladder(most: int) -> list[int]:
    """Return the batch sizes to capture, rising: dense where padding costs most, up to `most` or `LARGEST`."""
    most = min(most, LARGEST)
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, LARGEST + 1, 64)]
    return [*(size for size in steps if size < most), most]


def shapes(max_rows: int, num_drafts: int) -> list[Shape]:
    """Return all shapes to capture, by tokens, rising; with drafts none has more tokens than the largest without."""
    lens = sorted({1 + min(count, num_drafts) for count in (0, *DRAFTS)})
    every = [(rows, tokens) for tokens in lens for rows in ladder(max(1, min(max_rows, LARGEST) // tokens))]
    return sorted(every, key=lambda shape: (shape[0] * shape[1], shape[1]))


class DecodeGraphs:
    """Graphs of one piece of work over a shared tensor of inputs.

    Args:
        padding: [1, fields] int64, the inputs of the spare row.
        num_drafts: most drafts of a request; 0: each has one token.
    """

    def __init__(
        self,
        platform: Platform,
        stream: Stream,
        work: Work,
        padding: npt.NDArray[np.int64],
        max_rows: int,
        num_drafts: int = 0,
    ) -> None:
        self._platform = platform
        self._stream = stream
        self._work = work
        self._padding = padding
        self._shapes = shapes(max_rows, num_drafts)
        most = math.prod(self._shapes[-1])
        with stream:  # which reads and overwrites them
            self._inputs = torch.from_numpy(padding).to(platform.device).repeat(most, 1)
            # Of requests with a token each, and of the others.
            self._every = torch.arange(most + 1, dtype=torch.int32, device=platform.device)
            self._starts = self._every.clone()
        self._outputs: Tensors | None = None
        self._graphs: dict[Shape, Graph] = {}

    def capture(self, report: Report = lambda done, total: None, count: int | None = None) -> None:
        """Capture all sizes, or `count` of them, the largest first: the smaller ones fit into its memory.

        Raises:
            InvalidConfig: the memory is too small; says what to change.
        """
        shapes = self._shapes[::-1][:count]
        works = [(math.prod(shape), partial(self._write, *shape)) for shape in shapes]
        graphs = capture_all(self._platform, self._stream, works, report)
        self._graphs |= zip(shapes, graphs, strict=True)

    def _write(self, rows: int, tokens: int) -> Tensors:
        """Do the work of one shape, and return its outputs in the memory that all shapes share."""
        size = rows * tokens
        values = self._work(self._inputs[:size], (self._every if tokens == 1 else self._starts)[: rows + 1])
        if self._outputs is None:
            self._outputs = tuple(torch.empty_like(value) for value in values)
        return tuple(shared[:size].copy_(value) for shared, value in zip(self._outputs, values, strict=True))

    @property
    def num_graphs(self) -> int:
        """Number of captured graphs."""
        return len(self._graphs)

    def close(self) -> None:
        """Release the graphs and the work in them at once, since the work's owner owns these graphs."""
        self._graphs.clear()
        self._outputs = None
        del self._work

    def padded(
        self, inputs: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32] | None] | None:
        """Pad inputs to a captured shape; return them and where requests begin, None if each has one token.

        Args:
            inputs: [n, fields]. num_tokens: [B], tokens of each request among the n.

        Returns:
            None if no graph is that large.
        """
        n, count = len(inputs), len(num_tokens)
        rows, tokens = self._shape_for(n, count, int(num_tokens.max()))
        if not rows:
            return None
        padded = np.concatenate([inputs, np.repeat(self._padding, rows * tokens - n, axis=0)])
        if tokens == 1:
            return padded, None
        starts = np.arange(rows + 1, dtype=np.int32) + (n - count)
        starts[: count + 1] = np.cumsum([0, *num_tokens])
        return padded, starts

    def _shape_for(self, n: int, count: int, longest: int) -> Shape:
        """Return the smallest shape for `count` requests of up to `longest` tokens, or for one token a request."""
        captured = [shape for shape in self._shapes if shape in self._graphs]
        wide = (one for one in captured if one[0] >= count and one[1] >= longest and math.prod(one) <= MOST_PADDING * n)
        single = (one for one in captured if one[0] >= n and one[1] == 1)
        return next(chain(wide if longest > 1 else (), single), (0, 0))

    def run(self, inputs: torch.Tensor, starts: torch.Tensor | None = None) -> Tensors:
        """Issue, on the stream of the graphs, the graph for what `padded` gave, on the device.

        Returns:
            The outputs of the work for the whole size; the next replay, of any size, overwrites them.
        """
        shape = len(inputs), 1
        if starts is not None:
            shape = len(starts) - 1, len(inputs) // (len(starts) - 1)
            self._starts[: len(starts)].copy_(starts)
        self._inputs[: len(inputs)].copy_(inputs)
        self._graphs[shape].replay()
        return self._graphs[shape].outputs
