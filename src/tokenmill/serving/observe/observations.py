"""Gather what the clients of a sibling API process experience, for the first process to show."""

from __future__ import annotations

from tokenmill.core.api_messages import FinishedRequest, Observed
from tokenmill.core.histogram import Histogram
from tokenmill.ipc.standard_streams import num_lost_lines
from tokenmill.serving.observe.metrics import SECONDS


class Observations:
    """A `RequestObserver` that gathers observations until they are taken; `index`: of the API process."""

    def __init__(self, index: int) -> None:
        self._gathered = Observed(index=index)

    def first_token(self, seconds: float) -> None:
        """Keep the time from a request to its first token."""
        self._gathered.first_tokens.append(seconds)

    def next_tokens(self, num_tokens: int, seconds: float) -> None:
        """Keep the time per token of further tokens."""
        if self._gathered.between_tokens is None:
            self._gathered.between_tokens = Histogram.of(SECONDS)
        self._gathered.between_tokens.add(seconds / num_tokens)

    def finished(self, request: FinishedRequest) -> None:
        """Keep a finished request."""
        self._gathered.finished.append(request)

    def take(self, num_open: int) -> Observed:
        """Return the observations since the last call as a message; `num_open`: requests that the process has now."""
        gathered, self._gathered = self._gathered, Observed(index=self._gathered.index)
        gathered.num_open, gathered.num_lost_lines = num_open, num_lost_lines()
        return gathered
