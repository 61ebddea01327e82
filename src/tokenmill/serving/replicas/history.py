"""Numbers of an engine over the last five minutes, kept as it sends them: whoever looks later sees them too.

The engine sends none while it is idle, so that a pause costs nothing and takes no place.
"""

from __future__ import annotations

from collections import deque

from tokenmill.core.engine_messages import EngineStats

SECONDS_KEPT = 300.0
# An engine sends them four times a second.
_MOST = 1200
# Longer silence is a pause, in which nothing changed.
_SILENCE = 1.0
FIELDS = (
    "num_running",
    "num_waiting",
    "num_pages",
    "num_pages_pinned",
    "num_pages_evictable",
    "prefix_queries",
    "prefix_hits",
    "prompt_tokens",
    "generation_tokens",
)
# Seconds, then the values of FIELDS.
Sample = tuple[float, ...]


class History:
    """The samples of one engine, oldest first."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=_MOST)

    def add(self, at: float, stats: EngineStats) -> None:
        """Add the numbers that came at `at`, in seconds of the machine's monotonic clock.

        After a pause the numbers before it are added once more, as they were until now: else what was counted in a
        moment would look like the slow work of the whole pause.
        """
        last = self._samples[-1] if self._samples else None
        if last is not None and at - last[0] > _SILENCE:
            self._samples.append((at - _SILENCE / 4, *last[1:]))
        self._samples.append((at, *(float(getattr(stats, name)) for name in FIELDS)))
        while self._samples[0][0] < at - SECONDS_KEPT:
            self._samples.popleft()

    def since(self, at: float) -> list[Sample]:
        """Return the samples that came after `at`."""
        found: list[Sample] = []
        for sample in reversed(self._samples):
            if sample[0] <= at:
                break
            found.append(sample)
        return found[::-1]
