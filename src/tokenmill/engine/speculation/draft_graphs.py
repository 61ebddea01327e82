"""`DraftGraphs`: all passes behind a step's rows as one graph, captured for a ladder of sizes.

A step's rows run in the smallest size that holds them and the most tokens that one of them brings. Surplus rows have a
token of the spare row, and surplus tokens belong to no row:

|row 0: token, token, token|row 1: token|padding: a token each| ... |spare tokens|

Knows nothing of models: the work is a function of a tensor of tokens, and of where each row begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tokenmill.core.plan import IntArray
from tokenmill.engine.speculation.draft_rows import MOST_ROWS, LongArray
from tokenmill.platform.capturing import Report, capture_all
from tokenmill.platform.protocol import Graph, Platform

if TYPE_CHECKING:
    from tokenmill.platform.arrays import AnyArray

Work = Callable[["AnyArray", "AnyArray"], tuple["AnyArray"]]
"""Tokens [n, fields] int64 and where rows begin, [rows + 1] int32 -> drafts [rows, k] int64."""
Shape = tuple[int, int]
"""Rows of a graph, and the most tokens of each."""


def shapes(max_rows: int, num_tokens: int, longest: int) -> list[Shape]:
    """Return all shapes to capture, by tokens, rising.

    Args:
        num_tokens: most drafts of a row. longest: most tokens of a row that is alone in its step.
    """
    most = min(max_rows, MOST_ROWS)
    ladder = [*(size for size in (1, 2, 4, 8, 16) if size < most), most]
    every = {(rows, width) for width in (1, 1 + num_tokens) for rows in ladder}
    return sorted({*every, (1, max(longest, 1 + num_tokens))}, key=lambda shape: (math.prod(shape), shape))


class DraftGraphs:
    """Graphs of one piece of work; without them it is issued as it comes.

    Args:
        platform: what captures; None: nothing is captured.
        padding: [1, fields] int64, the token of the spare row.
    """

    def __init__(
        self, platform: Platform | None, work: Work, padding: npt.NDArray[np.int64], every: list[Shape]
    ) -> None:
        self._platform = platform
        self._work: Work | None = work
        self._padding = padding
        self._every = every
        self._graphs: dict[Shape, Graph] = {}
        if platform is not None:
            self._stream = platform.stream()
            most, most_rows = math.prod(every[-1]), max(rows for rows, _ in every)
            with self._stream:
                self._tokens = platform.arrays.zeros((most, padding.shape[1]), "int64")
                self._tokens[:] = platform.arrays.from_host(padding)
                self._starts = platform.arrays.arange(max(most, most_rows) + 1, "int32")

    def capture(self, report: Report, count: int | None = None) -> int:
        """Capture all sizes, or the largest `count`; return the number of graphs.

        Raises:
            InvalidConfig: no memory is left for them.
        """
        if self._platform is None:
            return 0
        some = self._every[::-1][:count]
        works = [(math.prod(shape), partial(self._captured, *shape)) for shape in some]
        self._graphs |= zip(some, capture_all(self._platform, self._stream, works, report), strict=True)
        return len(self._graphs)

    def _captured(self, rows: int, width: int) -> tuple[AnyArray]:
        assert self._work is not None, "captured before it is closed"
        return self._work(self._tokens[: rows * width], self._starts[: rows + 1])

    def padded(self, tokens: npt.NDArray[np.int64], lens: LongArray) -> tuple[npt.NDArray[np.int64], IntArray]:
        """Pad the tokens of some rows to a captured size, or to a size of their own; return where rows begin, too.

        Args:
            tokens: [n, fields]. lens: [m], tokens of each row.
        """
        n, count, longest = len(tokens), len(lens), int(lens.max())
        fitting = [shape for shape in self._graphs if shape[0] >= count and shape[1] >= longest]
        rows, width = min(fitting, key=math.prod, default=(count, longest))
        starts = np.arange(rows + 1, dtype=np.int32) + (n - count)
        starts[: count + 1] = np.cumsum([0, *lens])
        return np.concatenate([tokens, np.repeat(self._padding, rows * width - n, axis=0)]), starts

    def run(self, tokens: AnyArray, starts: AnyArray) -> AnyArray:
        """Issue the work for what `padded` gave, on the device; the next replay overwrites the drafts."""
        rows, size = len(starts) - 1, len(tokens)
        graph = self._graphs.get((rows, size // rows))
        if graph is None:
            assert self._work is not None, "run before it is closed"
            return self._work(tokens, starts)[0]
        self._tokens[:size] = tokens
        self._starts[: rows + 1] = starts
        graph.replay()
        return graph.outputs[0]

    def close(self) -> None:
        """Release the graphs, and the work, whose owner owns them."""
        self._graphs.clear()
        self._work = None
