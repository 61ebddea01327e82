"""`Drafter`: the door of speculation. It proposes what requests may say next; the step that runs the proposals decides.

At each drafted position the model's own token is drawn as in a plain decode, and drafts count as long as they are equal
to it. So a draft, however wrong, changes no token: it only brings several in one step, or costs a step some work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tokenmill.core.request import Request, TokenArray


class Drafter(Protocol):
    """Asked while a plan is filled. Decides by what it is told here alone: the same calls give the same drafts."""

    def propose(self, requests: Sequence[Request], limits: Sequence[int], num_tokens: int) -> Sequence[TokenArray]:
        """Draft tokens that may follow the `token_ids` of requests whose newest token a step runs.

        Args:
            limits: as many of each request at most, one or more.
            num_tokens: that the step runs without drafts.

        Returns:
            [k] int32 of each request; of no tokens where drafts are not worth it.
        """

    def holds(self, request: Request, num_running: int) -> bool:
        """Whether a request for which launched steps sample should wait for them instead of running behind them.

        Then what they bring is known, and drafts may follow it.

        Args:
            num_running: requests that run now.
        """

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """A step that ran `num_drafts` >= 1 draft tokens of a request is committed."""

    def forget(self, request: Request) -> None:
        """A request has ended."""


@dataclass(slots=True)
class DraftCounts:
    """What became of drafts since the start.

    Attributes:
        num_drafts: steps of a request that ran drafts. num_draft_tokens: their tokens.
        accepted_per_position: how often the first token of a draft was right, the first two, and so on.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """A draft of `num_drafts` tokens was run, of which `num_accepted` were right."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        missing = num_drafts - len(self.accepted_per_position)
        if missing > 0:
            self.accepted_per_position.extend([0] * missing)
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1
