"""`Histogram`: cheap to add to and to send. The engine counts in its loop; other processes only show the counts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
TOKENS = tuple(float(2**i) for i in range(15))


class Histogram(msgspec.Struct):
    """Counts of values by size.

    Attributes:
        bounds: upper limits of all buckets but the last, which has none; ascending.
        counts: values in each bucket, one more than bounds.
        total: the sum of all values.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @classmethod
    def with_bounds(cls, bounds: Sequence[float]) -> Histogram:
        """Return an empty histogram."""
        return cls(tuple(bounds), [0] * (len(bounds) + 1))

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def merge(self, other: Histogram) -> None:
        """Add the counts of another histogram with the same bounds."""
        self.counts = [own + its for own, its in zip(self.counts, other.counts, strict=True)]
        self.total += other.total
