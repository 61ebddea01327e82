"""`Samples`: the tokens that a step samples, and the outputs to draw them from. Derived from a plan once."""

from __future__ import annotations

from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.plan import StepPlan

IntArray = npt.NDArray[np.int64]


class Samples(msgspec.Struct, frozen=True):
    """The tokens that a step samples, S of them, in batch order: `num_samples` of each request.

    The output of the token at one position gives the token at the next one.

        |computed|         scheduled          |
        |        |known ... last| draft, draft|
                                |<- sampled ---->|

    Attributes:
        query_starts: [B + 1] int32, where each request begins among the tokens of the step.
        indices: [S] int64, the request of each sample, by its place in the batch.
        rows: [S] int64.
        positions: [S] int64, the index that the sampled token has in its sequence.
        outputs: [S] int64, the token of the step from whose output it is drawn.
        drafts: [S] int32, the draft token for its position, -1 behind the last draft; None: the step has no drafts.
    """

    query_starts: npt.NDArray[np.int32]
    indices: IntArray
    rows: IntArray
    positions: IntArray
    outputs: IntArray
    drafts: npt.NDArray[np.int32] | None

    @classmethod
    def from_plan(cls, plan: StepPlan) -> Self:
        """Derive the samples of a plan."""
        query_starts = np.zeros(len(plan.rows) + 1, dtype=np.int32)
        np.cumsum(plan.num_scheduled, out=query_starts[1:])
        indices = np.repeat(np.arange(len(plan.rows)), plan.num_samples)
        # How many samples of the same request come after each: as many as it has drafts from there on.
        num_after = np.cumsum(plan.num_samples)[indices] - np.arange(1, len(indices) + 1)
        drafts = None
        if plan.draft_ids is not None:
            drafts = np.full(len(indices), -1, dtype=np.int32)
            drafts[num_after > 0] = plan.draft_ids
        return cls(
            query_starts,
            indices,
            plan.rows[indices].astype(np.int64),
            (plan.num_computed + plan.num_scheduled)[indices] - num_after,
            query_starts[1:][indices] - 1 - num_after,
            drafts,
        )

    def __len__(self) -> int:
        return len(self.indices)

    def are_due(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Return [S] bool: True if the tokens sampled before this one, for the same request, all equal the drafts.

        Then a step without drafts would sample the same token: with the same token before it, the same key of its draw.
        """
        if self.drafts is None:
            return np.ones(len(token_ids), dtype=np.bool_)
        misses = token_ids != self.drafts
        num_before = np.cumsum(misses) - misses
        first = np.searchsorted(self.indices, self.indices)
        return np.equal(num_before, num_before[first])

    def is_first(self, number: int) -> bool:
        """Return True if a sample is the first of its request."""
        return number == 0 or bool(self.indices[number - 1] != self.indices[number])
