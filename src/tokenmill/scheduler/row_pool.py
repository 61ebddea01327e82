"""The rows of the page and token tables. A running request owns exactly one."""

from __future__ import annotations

import heapq


class RowPool:
    """Free rows; the lowest is taken first, so that the rows in use stay dense and the choice is reproducible."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows))

    @property
    def num_free(self) -> int:
        """Rows that can be taken now."""
        return len(self._free)

    def take(self) -> int:
        """The lowest free row."""
        return heapq.heappop(self._free)

    def give_back(self, row: int) -> None:
        """The row's last launched step is committed."""
        assert row not in self._free, f"row {row} is given back twice"
        heapq.heappush(self._free, row)
