"""`Draft`: a drafter's proposal. `TextDrafter`, `StepDrafter`: the interfaces of drafters without a model, and with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tokenmill.core.plan import StepPlan, StepResult
from tokenmill.core.request import Proposal, Request, TokenArray
from tokenmill.model.attention.row_extension import Sent

if TYPE_CHECKING:
    from tokenmill.platform.arrays import Array

Fetch: TypeAlias = "Callable[[Array], Sequence[npt.NDArray[Any]]]"
"""Begins to copy eight-byte numbers to the host; see `Transport.fetch`."""
Propose: TypeAlias = Callable[[StepResult], dict[int, Proposal]]
"""Returns what may follow the tokens that a step has brought, by batch index."""


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


class StepDrafter(Protocol):
    """Drafts behind each step of a model, by weights of its own."""

    def capture(self, report: Callable[[int, int], None], count: int | None = None) -> int:
        """Capture graphs of its passes, or the largest `count`, where it has any; return their number."""

    def follow(self, plan: StepPlan, sent: Sent, fetch: Fetch) -> Propose:
        """Begin to draft behind a step whose work is issued; return a function that proposes once it has ended.

        Args:
            sent: the step's arrays on the device.
        """
