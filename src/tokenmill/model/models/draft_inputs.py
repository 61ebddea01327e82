"""`Taps` and `DraftInputs`: hidden states of a model between its layers, and the one vector that a head makes of them.

Boundary b lies behind b layers: 0 are the embeddings, and the last one is what the final norm takes.

    boundaries    | l | m | h |   of one token
    norms         |     or    |   of all three as one, or of each; most heads have none
    projection    |  g  |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tokenmill.model.architecture.draft_head_spec import DraftHeadSpec
from tokenmill.model.architecture.norm_spec import NormSpec
from tokenmill.model.kernels.operands import contiguous
from tokenmill.model.kernels.protocol import Kernels
from tokenmill.model.models.linear import Linear
from tokenmill.model.models.norm import RMSNorm
from tokenmill.model.models.targets import Target, TargetScope
from tokenmill.model.sharding.shard import Part

if TYPE_CHECKING:
    import torch


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
