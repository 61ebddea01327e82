"""The input of an encoder's first layer: embeddings of tokens, positions and types, and the norm of their sum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tokenmill.core.plan import StepPlan
from tokenmill.model.architecture.input_spec import InputSpec, PositionSpec
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.row_extension import Arrays, RowExtension, Sent
from tokenmill.model.kernels.protocol import Kernels, WeightRole
from tokenmill.model.models.norm import make_norm
from tokenmill.model.models.targets import Target, TargetScope

if TYPE_CHECKING:
    import torch

    from tokenmill.platform.arrays import AnyArray


class TextInputs:
    """The tables of positions and types, and the norm.

    Attributes:
        positions, types: [rows, hidden_size]; None: absent.
    """

    __slots__ = ("norm", "positions", "spec", "types")

    def __init__(self, spec: InputSpec, hidden_size: int, kernels: Kernels) -> None:
        self.spec = spec
        rows = 0 if spec.positions is None else spec.positions.num_rows
        role = WeightRole.EMBEDDING
        self.positions = kernels.linear_weight(rows, hidden_size, role) if rows else None
        self.types = kernels.linear_weight(spec.token_types, hidden_size, role) if spec.token_types else None
        self.norm = None if spec.norm is None else make_norm(hidden_size, spec.norm, kernels)

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Return what the first layer takes, [T, hidden_size], of the embeddings of tokens, which are overwritten."""
        if self.types is not None:
            hidden += self.types.lookup(batch.positions[:1] * 0 if batch.types is None else batch.types)
        if self.positions is not None and self.spec.positions is not None:
            hidden += self.positions.lookup(position_rows(self.spec.positions, batch))
        return hidden if self.norm is None else self.norm.forward(hidden)

    def targets(self, scope: TargetScope) -> Iterator[Target]:
        """Yield the checkpoint tensors that fill this part."""
        for role, table in {"positions": self.positions, "token_types": self.types}.items():
            if table is not None:
                yield scope.matrix(role, table)
        if self.norm is not None:
            yield from self.norm.targets(scope, "embedding_norm")


def position_rows(spec: PositionSpec, batch: ForwardBatch) -> AnyArray:
    """Return the row of the table of positions for each token of a step whose requests are whole, [T] int64."""
    if spec.pad_id is None:
        return batch.positions
    is_own = batch.token_ids != spec.pad_id
    totals = is_own.cumsum(0)
    # The place of the first token of its request, for each token.
    starts = (batch.positions * 0 + 1).cumsum(0) - 1 - batch.positions
    return (totals - (totals - is_own * 1)[starts]) * is_own + spec.pad_id


class WholeTexts(RowExtension):
    """The pages of texts that are whole in a step, and the types of their tokens.

    A text has its pages for the step alone, each behind the one before:

    |reserved|text 0: ceil(tokens / page_size) pages|text 1| ...
    """

    def __init__(self, num_rows: int, page_size: int, first_page: int, *, has_types: bool) -> None:
        """
        Args:
            first_page: behind the reserved ones. has_types: tokens of the second text of a pair are of another type.
        """
        # The place in each row's request where the second text begins; 0: there is none.
        self._seconds = np.zeros(num_rows, np.int64)
        self._page_size, self._first_page, self._has_types = page_size, first_page, has_types

    def enter(self, plan: StepPlan) -> Arrays:
        """Lay out a step's pages, and its types if any of its requests is a pair."""
        for new in plan.new_rows:
            self._seconds[new.row] = 0 if new.pooling is None else new.pooling.second
        lens, page_size = plan.num_scheduled, self._page_size
        counts, starts = -(-lens // page_size), np.cumsum(lens) - lens
        firsts, numbers = self._first_page + np.cumsum(counts) - counts, np.arange(counts.max())
        tokens = np.arange(lens.sum())
        arrays: Arrays = {
            "page_table": np.where(numbers < counts[:, None], firsts[:, None] + numbers, 0).astype(np.int32),
            "slots": np.repeat(firsts * page_size - starts, lens).astype(np.int64) + tokens,
        }
        seconds = self._seconds[plan.rows]
        if self._has_types and seconds.any():
            begins = np.where(seconds, seconds, lens) + starts
            arrays["types"] = (tokens >= np.repeat(begins, lens)).astype(np.int64)
        return arrays

    def extend(self, batch: ForwardBatch, plan: StepPlan, first: int, arrays: Arrays, sent: Sent) -> ForwardBatch:
        """Put a step's texts on their pages."""
        pages = {"slots": sent["slots"], "page_table": sent["page_table"]}
        return msgspec.structs.replace(batch, **pages, types=sent.get("types"))
