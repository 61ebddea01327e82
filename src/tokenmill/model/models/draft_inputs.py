"""`Taps`, `DraftInputs`, `PairInputs`: hidden states of a model between its layers, and what draft heads make of them.

Boundary b lies behind b layers: 0 are the embeddings, and the last one is what the final norm takes.

    boundaries    | l | m | h |   of one token
    norms         |     or    |   of all three as one, or of each; most heads have none
    projection    |  g  |

An MTP layer takes the outputs of all layers, normed, as they are, and projects each beside the next token's embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tokenmill.model.architecture.draft_head_spec import DraftHeadSpec
from tokenmill.model.architecture.norm_spec import NormSpec
from tokenmill.model.kernels.operands import contiguous, empty_like
from tokenmill.model.kernels.protocol import Kernels
from tokenmill.model.models.linear import Linear
from tokenmill.model.models.norm import RMSNorm, make_norm
from tokenmill.model.models.targets import Target, TargetScope
from tokenmill.model.sharding.shard import Part

if TYPE_CHECKING:
    import torch

    from tokenmill.model.attention.batch import ForwardBatch


class Taps:
    """The taps of one pass.

    Args:
        memory: [T, taps, hidden_size], of the pass's dtype.
    """

    __slots__ = ("_boundaries", "_memory", "_passed")

    def __init__(self, boundaries: Sequence[int], memory: torch.Tensor) -> None:
        self._boundaries = boundaries
        self._memory = memory
        self._passed = 0

    def take(self, hidden: torch.Tensor) -> None:
        """Copy the hidden states [T, hidden_size] of the next boundary, if it is one of those wanted."""
        for index, boundary in enumerate(self._boundaries):
            if boundary == self._passed:
                self._memory[:, index] = hidden
        self._passed += 1


class DraftInputs:
    """The projection of the taps, and their norms."""

    __slots__ = ("_joint_norm", "_norms", "_projection")

    def __init__(self, spec: DraftHeadSpec, hidden_size: int, norm: NormSpec, kernels: Kernels) -> None:
        width = spec.num_taps * spec.tapped_size
        self._joint_norm = RMSNorm(width, norm, kernels) if spec.tap_norm == "together" else None
        count = spec.num_taps if spec.tap_norm == "apart" else 0
        self._norms = [RMSNorm(spec.tapped_size, norm, kernels) for _ in range(count)]
        self._projection = Linear(width, {"taps": Part.whole(hidden_size)}, False, kernels)

    def forward(self, taps: torch.Tensor) -> torch.Tensor:
        """Map [T, taps, size], which may be overwritten, to [T, hidden_size]."""
        for index, norm in enumerate(self._norms):
            taps[:, index] = norm.forward(contiguous(taps[:, index]))
        x = taps.reshape(len(taps), -1)
        return self._projection.forward(x if self._joint_norm is None else self._joint_norm.forward(x))

    def targets(self, scope: TargetScope) -> Iterator[Target]:
        """Yield the checkpoint tensors that fill it."""
        if self._joint_norm is not None:
            yield scope.vector("taps_norm", self._joint_norm.weight)
        for index, norm in enumerate(self._norms):
            yield scope.vector(f"tap_norm_{index}", norm.weight)
        yield from self._projection.targets(scope)


class PairInputs:
    """The norms of a token's embedding and of the hidden state before it, and the projection of both to one vector."""

    __slots__ = ("_embedding_norm", "_hidden_norm", "_projection")

    def __init__(self, hidden_size: int, norm: NormSpec, kernels: Kernels) -> None:
        self._embedding_norm = make_norm(hidden_size, norm, kernels)
        self._hidden_norm = make_norm(hidden_size, norm, kernels)
        self._projection = Linear(2 * hidden_size, {"taps": Part.whole(hidden_size)}, False, kernels)

    def forward(self, taps: torch.Tensor) -> torch.Tensor:
        """Return what is kept of tokens: their taps [T, 1, hidden_size] as [T, hidden_size]."""
        return taps[:, 0]

    def join(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Map embeddings of tokens and hidden states before them, [T, hidden_size] each, to [T, hidden_size]."""
        size = hidden.shape[1]
        pair = empty_like(hidden, (len(hidden), 2 * size))
        pair[:, :size], pair[:, size:] = self._embedding_norm.forward(embeddings), self._hidden_norm.forward(hidden)
        return self._projection.forward(pair)

    def targets(self, scope: TargetScope) -> Iterator[Target]:
        """Yield the checkpoint tensors that fill it."""
        yield from self._embedding_norm.targets(scope, "embedding_norm")
        yield from self._hidden_norm.targets(scope, "hidden_norm")
        yield from self._projection.targets(scope)


def outputs_of_all(forward: Callable[[ForwardBatch], Any], batch: ForwardBatch, taps: Any, every: Any) -> Any:
    """Run a pass with outputs of all its tokens, which are its taps; return those that were wanted.

    Args:
        taps: [T, 1, hidden_size] to write to. every: [T] int64, 0 up to T - 1.
    """
    outputs = forward(msgspec.structs.replace(batch, taps=None, output_indices=every))
    taps[:, 0] = outputs
    return outputs[batch.output_indices]
