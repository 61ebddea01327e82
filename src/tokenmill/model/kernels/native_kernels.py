"""Kernels in C++ for bfloat16 models on CPUs; see native/. Their torch reference is `TorchKernels`.

Of experts, whose C++ side is native/experts.h, a mixture is one native call.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tokenmill.model.kernels import native_ops
from tokenmill.model.kernels.native import MODULE
from tokenmill.model.kernels.native_recurrence import NativeRecurrence
from tokenmill.model.kernels.native_weight import PackedWeight
from tokenmill.model.kernels.protocol import ExpertBiases, Experts, Gate, LinearWeight, WeightRole
from tokenmill.model.kernels.torch_kernels import LoopedExperts
from tokenmill.model.quantization.packed import PackedFormat, PackedFormats
from tokenmill.platform.memory import Arena

if TYPE_CHECKING:
    from tokenmill import _native


class NativeKernels(NativeRecurrence):
    """`Kernels` in C++. Weights are packed when they are filled; a row's result depends on no other row, bit for bit.

    Attributes:
        formats: storage formats of the matrices.
    """

    name = "native"

    def __init__(
        self, native: _native.Kernels, formats: PackedFormats, device: str = "cpu", arena: Arena | None = None
    ) -> None:
        super().__init__(native, device)
        self.formats = formats
        self._arena = arena

    def without_memory(self) -> NativeKernels:
        """Return the same kernels on device `meta`."""
        return NativeKernels(self.native, self.formats, "meta")

    def in_memory(self, arena: Arena) -> NativeKernels:
        """Return the same kernels with weights and vectors in an arena."""
        return NativeKernels(self.native, self.formats, "cpu", arena)

    def with_formats(self, formats: PackedFormats) -> NativeKernels:
        """Return the same kernels with other formats."""
        return NativeKernels(self.native, formats, self._device, self._arena)

    def of_layer(self, index: int) -> NativeKernels:
        """Return the same kernels with the formats of layer `index`."""
        return self.with_formats(self.formats.of_layer(index))

    def linear_weight(self, out_size: int, in_size: int, role: WeightRole = WeightRole.LINEAR) -> LinearWeight:
        """Make an unfilled packed weight in the format for its role."""
        has_memory = self._device != "meta"
        return PackedWeight(self.native, (out_size, in_size), role, self._format(role), has_memory, self._arena)

    def _expert_weight(self, out_size: int, in_size: int, role: WeightRole = WeightRole.LINEAR) -> LinearWeight:
        format, has_memory = self.formats.experts or self.formats.layers, self._device != "meta"
        return PackedWeight(self.native, (out_size, in_size), role, format, has_memory, self._arena)

    def _mixture(
        self, gate_up: Sequence[LinearWeight], down: Sequence[LinearWeight], gate: Gate, biases: ExpertBiases | None
    ) -> Experts:
        return NativeExperts(self.native, gate_up, down, gate, biases)

    def vector(self, size: int) -> torch.Tensor:
        """Make an unfilled vector, in the arena if there is one."""
        if self._arena is None:
            return super().vector(size)
        return self._arena.take(size * self.dtype.itemsize).view(self.dtype)

    def _format(self, role: WeightRole) -> PackedFormat:
        if role in (WeightRole.ROUTER, WeightRole.ADAPTER):
            return PackedFormat.BF16
        if role in (WeightRole.EMBEDDING, WeightRole.HEAD):
            return self.formats.vocabulary
        own = {WeightRole.GATE_UP: self.formats.gate_up, WeightRole.DOWN: self.formats.down}.get(role)
        return self.formats.layers if own is None else own

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """Apply GELU with tanh in place."""
        return native_ops.gelu(self.native, x)

    def add_gated(self, sums: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Add x * sigmoid(gate) to sums in place."""
        return native_ops.add_gated(self.native, sums, x, gate)

    def multiply(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return x * y."""
        return native_ops.multiply(self.native, x, y)

    def scaled_sum(
        self, x: torch.Tensor, factor: float, delta: torch.Tensor | None = None, scale: float = 1.0
    ) -> torch.Tensor:
        """Return (x + scale * delta) * factor, computed in place."""
        return native_ops.scaled_sum(self.native, x, factor, delta, scale)

    def route(self, logits: torch.Tensor, count: int, normalizes: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the experts of each token; of equal logits the lower number comes first."""
        return native_ops.route(self.native, logits, count, normalizes)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, is_offset: bool = False) -> torch.Tensor:
        """Return the RMSNorm of x, times the weight."""
        return native_ops.rms_norm(self.native, x, weight, eps, is_offset=is_offset)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        scale: float = 1.0,
        is_offset: bool = False,
    ) -> torch.Tensor:
        """Add scale * delta to x in place and return the norm of x."""
        return native_ops.rms_norm(self.native, x, weight, eps, delta, scale, is_offset)


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
            self._bound = self.bind()
        out = torch.zeros(x.shape, dtype=torch.bfloat16)
        chosen, weights = experts.contiguous(), weights.contiguous()
        assert x.dtype == weights.dtype == torch.bfloat16 and x.stride(1) == 1, "tokens are rows of bfloat16"
        addresses = chosen.data_ptr(), weights.data_ptr(), out.data_ptr()
        self._bound.mix(x.data_ptr(), x.stride(0), x.shape[0], experts.shape[1], *addresses)
        return out

    def bind(self) -> _native.Experts:
        """Return the experts in native form; the matrices have to stay where they are."""
        size, hidden_size = self.gate_up[0].shape[0] // 2, self.gate_up[0].shape[1]
        bound: _native.Experts = importlib.import_module(MODULE).Experts(self._native, self.gate, hidden_size, size)
        for number, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            assert isinstance(gate_up, PackedWeight) and isinstance(down, PackedWeight), "its matrices are packed"
            biases = (0, 0) if self.biases is None else (bias[number].data_ptr() for bias in self.biases)
            bound.add(gate_up.packed, down.packed, *biases)
        return bound
