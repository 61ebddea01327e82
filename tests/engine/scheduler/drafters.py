"""Drafters that know what will come, to drive the scheduler with."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from tokenmill.core.request import Request, TokenArray


class KnowingDrafter:
    """Drafts for each request by itself, and holds none."""

    @abstractmethod
    def draft(self, request: Request, limit: int) -> TokenArray:
        """Up to `limit` tokens for one request."""

    def propose(self, requests: Sequence[Request], limits: Sequence[int], num_tokens: int) -> list[TokenArray]:
        return [self.draft(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def holds(self, request: Request, num_running: int) -> bool:
        return False

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafts

    def forget(self, request: Request) -> None:
        pass
