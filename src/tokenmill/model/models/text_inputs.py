"""The input of an encoder's first layer: embeddings of tokens, positions and types, and the norm of their sum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.plan import StepPlan
from tokenmill.model.architecture.input_spec import InputSpec, PositionSpec
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.row_extension import Arrays, RowExtension, Sent
from tokenmill.model.kernels.operands import as_like
from tokenmill.model.kernels.protocol import Kernels, WeightRole
from tokenmill.model.models.norm import make_norm
from tokenmill.model.models.targets import Target, TargetScope
from tokenmill.platform.host_arrays import host_array

if TYPE_CHECKING:
    import torch


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
        self.norm = make_norm(hidden_size, spec.norm, kernels)

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Return what the first layer takes, [T, hidden_size], of the embeddings of tokens, which are overwritten."""
        if self.types is not None:
            types = as_like(hidden, np.zeros(1, np.int64)) if batch.types is None else batch.types
            hidden += self.types.lookup(types)
        if self.positions is not None and self.spec.positions is not None:
            hidden += self.positions.lookup(as_like(hidden, position_rows(self.spec.positions, batch)))
        return self.norm.forward(hidden)

    def targets(self, scope: TargetScope) -> Iterator[Target]:
        """Yield the checkpoint tensors that fill this part."""
        for role, table in {"positions": self.positions, "token_types": self.types}.items():
            if table is not None:
                yield scope.matrix(role, table)
        yield from self.norm.targets(scope, "embedding_norm")


def position_rows(spec: PositionSpec, batch: ForwardBatch) -> npt.NDArray[np.int64]:
    """Return the row of the table of positions for each token of a step whose requests are whole, [T] int64."""
    if spec.pad_id is None:
        return host_array(batch.positions)
    counts = (host_array(batch.token_ids) != spec.pad_id).astype(np.int64)
    totals = np.concatenate([[0], np.cumsum(counts)])
    within = totals[1:] - np.repeat(totals[batch.query_starts[:-1]], batch.query_lens)
    return within * counts + spec.pad_id


class RowTypes(RowExtension):
    """The place in each row's request where the second text, of tokens of the second type, begins. For the host."""

    def __init__(self, num_rows: int) -> None:
        self._seconds = np.zeros(num_rows, np.int64)

    def enter(self, plan: StepPlan) -> Arrays:
        """Take in where the second texts of new rows begin."""
        for new in plan.new_rows:
            self._seconds[new.row] = 0 if new.pooling is None else new.pooling.second
        return {}

    def extend(self, batch: ForwardBatch, plan: StepPlan, first: int, arrays: Arrays, sent: Sent) -> ForwardBatch:
        """Add the types of a step's tokens, if any of its requests is a pair."""
        seconds = self._seconds[plan.rows[first:]]
        if not seconds.any():
            return batch
        begins = np.repeat(np.where(seconds, seconds, np.iinfo(np.int64).max), batch.query_lens)
        return msgspec.structs.replace(batch, types=(host_array(batch.positions) >= begins).astype(np.int64))
