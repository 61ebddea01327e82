"""The engine's side of routing: report its cache and its load to the text workers that ask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from tokenmill.core.messages import AddRequest, ToReporter
from tokenmill.core.part_messages import EngineReport, LeaveWorker, WatchEngine
from tokenmill.core.request import Request

# How often they are told of the load while nothing else is to be told, in seconds.
REPORT_INTERVAL = 0.1


class Reporter:
    """Sends `EngineReport`s. It does nothing while no text worker watches."""

    def __init__(self, send: Callable[[str, EngineReport], None], names: Callable[[], list[int]]) -> None:
        """
        Args:
            send: takes the inbox of a text worker and the report for it, and adds the engine that reports.
            names: returns the names of all cached pages.
        """
        self._send = send
        self._names = names
        self._num_taken: dict[str, int] = {}
        self._taken: dict[str, tuple[str, int]] = {}  # text worker and missing tokens of each request
        self._last = 0.0

    def heed(self, message: ToReporter) -> None:
        """Take note of a message to the engine."""
        if isinstance(message, WatchEngine):
            self._num_taken[message.worker] = 0
            self._send(message.worker, EngineReport(changes=[(True, self._names())], is_first=True))
        elif isinstance(message, LeaveWorker):
            self._num_taken.pop(message.worker, None)
        elif isinstance(message, AddRequest) and message.worker in self._num_taken:
            self._num_taken[message.worker] += 1
            self._taken[message.id] = message.worker, message.num_missing_tokens

    def report(self, changes: list[tuple[bool, list[int]]], requests: Mapping[str, Request], now: float) -> None:
        """Report `changes` of the cache at once, and the `requests` in flight once in a while."""
        is_due = now - self._last >= REPORT_INTERVAL and (requests or self._taken)
        if not self._num_taken or not (changes or is_due):
            return
        self._last = now
        self._taken = {one: taken for one, taken in self._taken.items() if one in requests}
        of_worker = Counter(worker for worker, _ in self._taken.values())
        num_queued_tokens = sum(self._num_queued_tokens(request) for request in requests.values())
        for worker, num_taken in self._num_taken.items():
            report = EngineReport(
                changes=changes,
                num_taken=num_taken,
                num_others=len(requests) - of_worker[worker],
                num_queued_tokens=num_queued_tokens,
            )
            self._send(worker, report)

    def _num_queued_tokens(self, request: Request) -> int:
        """Return a request's tokens to compute; before it begins, its text worker's estimate of missing tokens."""
        if request.num_computed_tokens == 0 and request.id in self._taken:
            return self._taken[request.id][1]
        return max(0, request.num_tokens - request.num_computed_tokens)
