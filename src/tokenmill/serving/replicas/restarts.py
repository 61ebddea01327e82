"""Limit how often a part of the server is started again, and set the pauses before."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

BACK_OFF_SECONDS = (0.0, 1.0, 2.0, 4.0)
# Deaths further apart than these have nothing to do with each other: of the limit, and of the pauses.
LIMIT_SECONDS = 60.0
BACK_OFF_MEMORY_SECONDS = 300.0


@dataclass(slots=True)
class PartCounts:
    """Counts of events of a server's parts, by the label of each part.

    Attributes:
        dropped: messages that its inbox could not read since its process started.
        restarts: number of restarts.
        lost_lines: lines of the log that its process could not write.
    """

    dropped: dict[str, int] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    lost_lines: dict[str, int] = field(default_factory=dict)


class Restarts:
    """The deaths of one part. The caller passes the time, in seconds of any clock that never goes back."""

    def __init__(self, most: int) -> None:
        """`most`: most restarts within a minute; 0: none."""
        self._most = most
        self._deaths: deque[float] = deque()

    def died(self, now: float, is_explained: bool = False) -> float | None:
        """Record a death; return the seconds until the restart, or None if there must be none.

        `is_explained`: a request was convicted and will not run again, so neither this death counts nor the last.
        """
        while self._deaths and now - self._deaths[0] > BACK_OFF_MEMORY_SECONDS:
            self._deaths.popleft()
        number = len(self._deaths)
        if is_explained and number:
            self._deaths.pop()
            return BACK_OFF_SECONDS[0]
        self._deaths.append(now)
        if sum(now - death <= LIMIT_SECONDS for death in self._deaths) > self._most:
            return None
        return BACK_OFF_SECONDS[min(number, len(BACK_OFF_SECONDS) - 1)]

    @property
    def complaint(self) -> str:
        """A log line for a server that ends because this part died too often; empty after a single death."""
        deaths = self._most + 1
        return f"\n{deaths} deaths in a minute are too many; the log says of what" if deaths > 1 else ""
