"""What a text worker knows of one engine's load: what the engine has reported, and what it has been sent since."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tokenmill.core.part_messages import EngineReport


class Sent(NamedTuple):
    """A request whose first token has not come yet: the `number`-th that the engine has been sent from here."""

    number: int
    num_missing_tokens: int


@dataclass(slots=True)
class EngineBooks:
    """Counts a request from the moment that it is sent, so that a burst does not all go to the engine that was idle.

    Attributes:
        num_open: requests from here that have not ended.
        num_others: those of other text workers, as last reported.
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
        """In flight, as far as is known."""
        return self.num_open + self.num_others

    @property
    def num_queued_tokens(self) -> int:
        """Tokens of prompts that are still to be computed, as far as is known."""
        return self._reported_tokens + self._unreported_tokens

    def expect(self, request_id: str, num_missing_tokens: int) -> None:
        """The engine is sent a request."""
        self._num_sent += 1
        self._early[request_id] = Sent(self._num_sent, num_missing_tokens)
        self._unreported_tokens += num_missing_tokens

    def settle(self, request_id: str) -> None:
        """Its first token has come, or never will."""
        sent = self._early.pop(request_id)
        if sent.number > self._num_taken:
            self._unreported_tokens -= sent.num_missing_tokens

    def take(self, report: EngineReport) -> None:
        """The engine tells how it is; what it has not counted yet is added to that."""
        self._num_taken = report.num_taken
        self.num_others, self._reported_tokens = report.num_others, report.num_queued_tokens
        unreported = (sent for sent in self._early.values() if sent.number > report.num_taken)
        self._unreported_tokens = sum(sent.num_missing_tokens for sent in unreported)
