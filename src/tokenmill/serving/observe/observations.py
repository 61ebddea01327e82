"""What the clients of a sibling API process experience, gathered for the first one, which shows it."""

from __future__ import annotations

from tokenmill.core.api_messages import FinishedRequest, Observed
from tokenmill.core.histogram import Histogram
from tokenmill.ipc.standard_streams import num_lost_lines
from tokenmill.serving.observe.metrics import SECONDS


class Observations:
    """A `RequestObserver` that keeps what it is told until it is taken. `index`: of the API process."""

    def __init__(self, index: int) -> None:
        self._gathered = Observed(index=index)

    def first_token(self, seconds: float) -> None:
        """See `RequestObserver`."""
        self._gathered.first_tokens.append(seconds)

    def next_tokens(self, num_tokens: int, seconds: float) -> None:
        """See `RequestObserver`."""
        if self._gathered.between_tokens is None:
            self._gathered.between_tokens = Histogram.of(SECONDS)
        self._gathered.between_tokens.add(seconds / num_tokens)

    def finished(self, request: FinishedRequest) -> None:
        """See `RequestObserver`."""
        self._gathered.finished.append(request)

    def take(self, num_open: int) -> Observed:
        """What there is since the last time, as a message. `num_open`: requests that the process has now."""
        gathered, self._gathered = self._gathered, Observed(index=self._gathered.index)
        gathered.num_open, gathered.num_lost_lines = num_open, num_lost_lines()
        return gathered
