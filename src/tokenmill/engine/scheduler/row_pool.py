"""`RowPool`: hand out the rows of the page and token tables."""

from __future__ import annotations

import heapq


class RowPool:
    """Free rows of the page and token tables. The lowest is taken first: used rows stay dense, and choices repeat."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows))

    @property
    def num_free(self) -> int:
        """Number of rows that can be taken now."""
        return len(self._free)

    def take(self) -> int:
        """Take the lowest free row."""
        return heapq.heappop(self._free)

    def give_back(self, row: int) -> None:
        """Free a row whose last launched step is committed."""
        assert row not in self._free, f"row {row} is given back twice"
        heapq.heappush(self._free, row)
