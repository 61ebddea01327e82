"""The parts of an adapter: what it adds to a projection, to a matrix, to embeddings. They know no rows of a step.

They are of the kind that their kernels make, NumPy arrays or tensors. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from tokenmill.model.kernels.operands import add_scaled, bfloat16, contiguous, float32
from tokenmill.model.kernels.protocol import LinearWeight
from tokenmill.model.quantization.stored_array import StoredArray

if TYPE_CHECKING:
    import torch

    from tokenmill.platform.arrays import Array


class AdapterModule(msgspec.Struct, frozen=True):
    """The addition of an adapter to one projection: scale * b a.

    Attributes:
        start: first of its columns among the outputs of the matrix.
        a: [rank, in_size]. b: [columns, rank]; floats of any dtype, as they are stored or tensors.
    """

    start: int
    a: StoredArray | torch.Tensor
    b: StoredArray | torch.Tensor
    scale: float


class HeadAddition(Protocol):
    """The addition of a row's adapter to the output head."""

    def add(self, x: Any, y: Any) -> Any:
        """Return logits y [T, vocab_size] with the adapter's part for x [T, hidden_size], perhaps in y's memory."""


class AdapterPart(msgspec.Struct, frozen=True):
    """The addition of an adapter to one projection of a fused matrix.

    Attributes:
        start: first of its columns among the outputs of the matrix.
        rank_start: first of its rows in the A of the matrix.
        b: B, [columns, rank].
    """

    start: int
    rank_start: int
    b: LinearWeight
    scale: float


class LinearAdapter(msgspec.Struct, frozen=True):
    """The addition of an adapter to one matrix.

    Attributes:
        a: the A of all its parts, their rows stacked: [sum of ranks, in_size].
    """

    a: LinearWeight
    parts: tuple[AdapterPart, ...]

    @property
    def num_bytes(self) -> int:
        """Memory of the weights in bytes."""
        return self.a.num_bytes + sum(part.b.num_bytes for part in self.parts)

    def add(self, x: Any, y: Any) -> Any:
        """Add the adapter's part for x [T, in_size] to y [T, out_size] in place, rounded once per part; return y."""
        inner, sums = self.a.multiply(self.a.operand(x)), self.a.operand(y)
        for part in self.parts:
            columns, rank = part.b.shape
            own = sums[:, part.start : part.start + columns]
            added = part.b.logits(contiguous(inner[:, part.rank_start : part.rank_start + rank]))
            add_scaled(own, added, part.scale)
        return y


class EmbeddingAdapter(msgspec.Struct, frozen=True):
    """The addition of an adapter to embeddings.

    Attributes:
        a: A as columns, [vocab_size, rank]. b: B, [hidden_size, rank].
    """

    a: Array
    b: LinearWeight
    scale: float

    @property
    def num_bytes(self) -> int:
        """Memory of the weights in bytes."""
        return self.a.nbytes + self.b.num_bytes

    def add(self, token_ids: Any, hidden: Any) -> Any:
        """Return hidden [n, hidden_size] plus the adapter's part for the tokens [n], rounded once."""
        if isinstance(hidden, np.ndarray):
            added = float32(self.b.logits(np.asarray(self.a)[token_ids]))
            return bfloat16(float32(hidden) + added * np.float32(self.scale))
        # Imported here: native kernels run where there is no torch.
        from tokenmill.model.kernels.stored_tensors import tensor_over

        added = self.b.logits(tensor_over(self.a)[token_ids]).float()
        return (hidden.float() + added * self.scale).to(hidden.dtype)


LayerAdapters = Mapping[str, LinearAdapter]
"""Those of one layer, by the role of the first projection in each matrix."""
