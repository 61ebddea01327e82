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

    def died(self, now: float) -> float | None:
        """How long to wait before it is started again, in seconds; None: it should not be."""
        while self._deaths and now - self._deaths[0] > BACK_OFF_MEMORY_SECONDS:
            self._deaths.popleft()
        number = len(self._deaths)
        self._deaths.append(now)
        if sum(now - death <= LIMIT_SECONDS for death in self._deaths) > self._most:
            return None
        return BACK_OFF_SECONDS[min(number, len(BACK_OFF_SECONDS) - 1)]
