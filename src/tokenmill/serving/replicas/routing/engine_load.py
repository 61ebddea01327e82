"""A text worker's count of one engine's load: the engine's latest report, and the requests sent to it since."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tokenmill.core.part_messages import EngineReport


class Sent(NamedTuple):
    """A request without a first token yet: the `number`-th that this text worker has sent to the engine."""

    number: int
    num_missing_tokens: int


@dataclass(slots=True)
class EngineLoad:
    """Counts each request from its sending on, so that a burst does not all go to the engine that was idle.

    Attributes:
        num_open: open requests of this text worker.
        num_others: open requests of other text workers, as last reported.
    """

    num_open: int = 0
    num_others: int = 0
    _early: dict[str, Sent] = field(default_factory=dict)
    _num_sent: int = 0
    _num_taken: int = 0
    _reported_tokens: int = 0
    _unreported_tokens: int = 0

    @property
    def num_requests(self) -> int:
        """Number of requests in flight, as far as is known."""
        return self.num_open + self.num_others

    @property
    def num_queued_tokens(self) -> int:
        """Number of prompt tokens that are still to be computed, as far as is known."""
        return self._reported_tokens + self._unreported_tokens

    def expect(self, request_id: str, num_missing_tokens: int) -> None:
        """Count a request that is being sent to the engine."""
        self._num_sent += 1
        self._early[request_id] = Sent(self._num_sent, num_missing_tokens)
        self._unreported_tokens += num_missing_tokens

    def settle(self, request_id: str) -> None:
        """Stop counting a request whose first token has come or will never come."""
        sent = self._early.pop(request_id)
        if sent.number > self._num_taken:
            self._unreported_tokens -= sent.num_missing_tokens

    def apply_report(self, report: EngineReport) -> None:
        """Take in the engine's report, and add the requests that it has not counted yet."""
        self._num_taken = report.num_taken
        self.num_others, self._reported_tokens = report.num_others, report.num_queued_tokens
        unreported = (sent for sent in self._early.values() if sent.number > report.num_taken)
        self._unreported_tokens = sum(sent.num_missing_tokens for sent in unreported)
