"""How often a part of the server may be started again, and after what pause."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

BACK_OFF_SECONDS = (0.0, 1.0, 2.0, 4.0)
# Deaths further apart than these have nothing to do with each other: of the limit, and of the pauses.
LIMIT_SECONDS = 60.0
BACK_OFF_MEMORY_SECONDS = 300.0


@dataclass(slots=True)
class PartCounts:
    """What has happened to the parts of a server, by the label of each.

    Attributes:
        dropped: messages that its inbox could not read since its process started.
        restarts: how often it was started again.
        lost_lines: lines of the log that its process could not write.
    """

    dropped: dict[str, int] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    lost_lines: dict[str, int] = field(default_factory=dict)


class Restarts:
    """The deaths of one part. Time is handed in, in seconds of any clock that never goes back."""

    def __init__(self, most: int) -> None:
        """`most`: restarts within a minute; 0: the first death is the last."""
        self._most = most
        self._deaths: deque[float] = deque()

    def died(self, now: float, is_explained: bool = False) -> float | None:
        """How long to wait before it is started again, in seconds; None: it should not be.

        `is_explained`: a request has been convicted, which is not tried again: neither this death counts nor the last.
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
        """A line for the log of a server that ends since this part has died too often; empty after a single death."""
        deaths = self._most + 1
        return f"\n{deaths} deaths in a minute are too many; the log says of what" if deaths > 1 else ""
