"""`Drafter`: the door of speculation. It proposes what a request may say next; the step that runs the proposal decides.

At each drafted position the model's own token is drawn as in a plain decode, and drafts count as long as they are equal
to it. So a draft, however wrong, changes no token: it only brings several in one step, or costs a step some work.
"""

from __future__ import annotations

from typing import Protocol

from tokenmill.core.request import Request, TokenArray


class Drafter(Protocol):
    """Asked while a plan is filled, so it must be deterministic: plans are replayed."""

    def propose(self, request: Request, limit: int) -> TokenArray:
        """Up to `limit` draft tokens that may follow the request's `token_ids`, [k] int32; none is an answer too."""
