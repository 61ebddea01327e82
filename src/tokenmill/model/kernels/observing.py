"""Native kernels that note how large the inputs of their matrices are, while a model runs a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tokenmill.model.kernels.experts import LoopedExperts
from tokenmill.model.kernels.native_kernels import NativeKernels
from tokenmill.model.kernels.native_weight import PackedWeight
from tokenmill.model.kernels.protocol import ExpertBiases, Experts, Gate, LinearWeight, WeightRole
from tokenmill.model.quantization.packed import PackedFormat, PackedFormats


class ObservedWeight(PackedWeight):
    """A `PackedWeight` that adds up the squares of its inputs.

    Attributes:
        num_rows: the rows of x so far.
        squares: [in_size] float64, the sum over them of x squared.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_rows = 0
        self.squares = torch.zeros(self.shape[1], dtype=torch.float64)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Note x, and multiply."""
        self._note(x)
        return super().multiply(x, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None = None, gate: Gate = Gate.SILU) -> torch.Tensor:
        """Note x, and multiply."""
        self._note(x)
        return super().gated(x, bias, gate)

    def _note(self, x: torch.Tensor) -> None:
        self.num_rows += x.shape[0]
        self.squares += x.double().square_().sum(0)


class ObservingKernels(NativeKernels):
    """`NativeKernels` in int8 whose matrices are `ObservedWeight`s."""

    def __init__(self, kernels: NativeKernels) -> None:
        super().__init__(kernels.native, PackedFormats(PackedFormat.INT8, PackedFormat.INT8))

    def of_layer(self, index: int) -> ObservingKernels:
        """Return these kernels."""
        return self

    def linear_weight(self, out_size: int, in_size: int, role: WeightRole = WeightRole.LINEAR) -> LinearWeight:
        """Make an unfilled matrix."""
        return ObservedWeight(self.native, (out_size, in_size), role, self._format(role))

    def _expert_weight(self, out_size: int, in_size: int, role: WeightRole = WeightRole.LINEAR) -> LinearWeight:
        return ObservedWeight(self.native, (out_size, in_size), role, self.formats.layers)

    def _mixture(
        self, gate_up: Sequence[LinearWeight], down: Sequence[LinearWeight], gate: Gate, biases: ExpertBiases | None
    ) -> Experts:
        return LoopedExperts(gate_up, down, gate, biases)
