"""`Draft` and `TextDrafter`: a drafter's proposal, and the interface of drafters that need no model."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tokenmill.core.request import Request, TokenArray


class Draft(NamedTuple):
    """Tokens that may follow those of a request.

    Attributes:
        token_ids: [k] int32.
        probabilities: [k] float32, the drafter's own estimate that each is right, given that those before it are.
    """

    token_ids: TokenArray
    probabilities: npt.NDArray[np.float32]


NO_DRAFT = Draft(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32))


class TextDrafter(Protocol):
    """Drafts from text alone. Proposals depend only on earlier calls, so plans can be replayed.

    A request's state is made at its first `propose` and kept under its id until `forget_request`.
    """

    def propose(self, request: Request, limit: int) -> Draft:
        """Return at most `limit` tokens that may follow `request.token_ids`; perhaps none."""

    def forget_request(self, request: Request) -> None:
        """Forget a request that has ended."""
