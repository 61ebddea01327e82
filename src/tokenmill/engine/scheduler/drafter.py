"""`Drafter`: the scheduler's interface to speculation. It proposes what requests may say next; running a step decides.

At each drafted position the model's own token is drawn as in a plain decode, and drafts count as long as they are equal
to it. So a draft, however wrong, changes no token: it only brings several in one step, or costs a step some work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tokenmill.core.request import Request, TokenArray


class Drafter(Protocol):
    """Proposes drafts while a plan is filled. Decides by its arguments alone: the same calls give the same drafts."""

    def propose(self, requests: Sequence[Request], limits: Sequence[int], num_tokens: int) -> Sequence[TokenArray]:
        """Return draft tokens that may follow the `token_ids` of requests whose newest token a step runs.

        Args:
            limits: most draft tokens of each request, one or more.
            num_tokens: tokens that the step runs without drafts.

        Returns:
            [k] int32 for each request; empty where drafts are not worth it.
        """

    def holds(self, request: Request, num_running: int) -> bool:
        """Return True if a request that launched steps sample for should wait for them instead of running behind them.

        Then the tokens that they bring are known, and drafts may follow.

        Args:
            num_running: requests that run now.
        """

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Take in the commit of a step that ran `num_drafts` >= 1 draft tokens of a request."""

    def forget_request(self, request: Request) -> None:
        """Forget a request that has ended."""


@dataclass(slots=True)
class DraftCounts:
    """Counts of drafts that steps ran and accepted since the start.

    Attributes:
        num_drafts: steps of a request that ran drafts. num_draft_tokens: their tokens.
        accepted_per_position: how often the first token of a draft was right, the first two, and so on.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Count a draft of `num_drafts` tokens, of which `num_accepted` were right."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        missing = num_drafts - len(self.accepted_per_position)
        if missing > 0:
            self.accepted_per_position.extend([0] * missing)
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1
