"""Experts whose mixture is one native call; the C++ side is native/experts.h."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tokenmill.model.kernels.native import MODULE
from tokenmill.model.kernels.native_weight import PackedWeight
from tokenmill.model.kernels.protocol import ExpertBiases, Gate, LinearWeight
from tokenmill.model.kernels.torch_kernels import LoopedExperts

if TYPE_CHECKING:
    from tokenmill import _native


class NativeExperts(LoopedExperts):
    """`Experts` mixed in one native call; `mix` has the same bits as `LoopedExperts.mix`, which loops in Python."""

    __slots__ = ("_bound", "_native")

    def __init__(
        self,
        native: _native.Kernels,
        gate_up: Sequence[LinearWeight],
        down: Sequence[LinearWeight],
        gate: Gate = Gate.SILU,
        biases: ExpertBiases | None = None,
    ) -> None:
        super().__init__(gate_up, down, gate, biases)
        self._native = native
        self._bound: _native.Experts | None = None

    def mix(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts in one native call."""
        if self._bound is None:
            self._bound = self._bind()
        out = torch.zeros(x.shape, dtype=torch.bfloat16)
        chosen, weights = experts.contiguous(), weights.contiguous()
        assert x.dtype == weights.dtype == torch.bfloat16 and x.stride(1) == 1, "tokens are rows of bfloat16"
        addresses = chosen.data_ptr(), weights.data_ptr(), out.data_ptr()
        self._bound.mix(x.data_ptr(), x.stride(0), x.shape[0], experts.shape[1], *addresses)
        return out

    def _bind(self) -> _native.Experts:
        size, hidden_size = self.gate_up[0].shape[0] // 2, self.gate_up[0].shape[1]
        bound: _native.Experts = importlib.import_module(MODULE).Experts(self._native, self.gate, hidden_size, size)
        for number, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            assert isinstance(gate_up, PackedWeight) and isinstance(down, PackedWeight), "its matrices are packed"
            biases = (0, 0) if self.biases is None else (bias[number].data_ptr() for bias in self.biases)
            bound.add(gate_up.packed, down.packed, *biases)
        return bound
