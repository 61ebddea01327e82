"""`Rows`: the rows of the page and token tables; a request owns one as long as it holds anything."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from tokenmill.core.plan import StepPlan
from tokenmill.core.request import Request
from tokenmill.engine.kv.radix_tree import PrefixMatch
from tokenmill.engine.scheduler.resources.resource import Resource


class Rows(Resource):
    """Free rows. The lowest is taken first: used rows stay dense, and choices repeat."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows))

    @property
    def num_free(self) -> int:
        """Number of rows that can be taken now."""
        return len(self._free)

    @property
    def shortage(self) -> str:
        """Return why a request must wait while no row is free."""
        return f"needs a row, all {self.num_rows} are in use"

    def acquire(self, request: Request, match: PrefixMatch, num_tokens: int, step: int) -> str:
        """Give a request the lowest free row."""
        if not self._free:
            return self.shortage
        request.row = heapq.heappop(self._free)
        return ""

    def release(self, request: Request, step: int) -> None:
        """Free the row of a request whose last launched step is committed."""
        row, request.row = request.row, None
        assert row is not None and row not in self._free, f"row {row} is given back twice"
        heapq.heappush(self._free, row)

    def check_invariants(self, owners: Sequence[Request], plans: Sequence[StepPlan]) -> None:
        """Raise AssertionError if a row is lost or has two owners."""
        rows = [request.row for request in owners]
        assert len(set(rows)) == len(rows) and None not in rows, "two requests own one row, or one owns none"
        assert len(rows) + self.num_free == self.num_rows, "a row is lost"
