"""Kernels in C++ for bfloat16 models on CPUs; see native/. Their torch reference is `TorchKernels`.

Weights of encoders may be float32; only a pass in one native call multiplies those.

Of experts, whose C++ side is native/experts.h, a mixture is one native call.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tokenmill.model.kernels import native_ops
from tokenmill.model.kernels.experts import ExpertMaker, LoopedExperts
from tokenmill.model.kernels.native import MODULE
from tokenmill.model.kernels.native_recurrence import NativeRecurrence
from tokenmill.model.kernels.native_weight import PackedWeight
from tokenmill.model.kernels.operands import contiguous, in_pieces, is_a, stride, zeros_like
from tokenmill.model.kernels.parted_weight import PartedWeight
from tokenmill.model.kernels.protocol import (
    NO_PARTS,
    Activation,
    ExpertBiases,
    Experts,
    Gate,
    LinearWeight,
    Parts,
    SigmoidScores,
    WeightRole,
)
from tokenmill.model.quantization.packed import PackedFormat, PackedFormats
from tokenmill.model.quantization.stored_array import Floats, StoredArray, seeded_normal
from tokenmill.platform.arrays import address
from tokenmill.platform.memory import Arena

if TYPE_CHECKING:
    from tokenmill import _native
    from tokenmill.platform.arrays import Array


class NativeKernels(NativeRecurrence, ExpertMaker):
    """`Kernels` in C++. Weights are packed when they are filled; a row's result depends on no other row, bit for bit.

    Vectors are NumPy arrays of the bits of bfloat16, or of float32. Activations may be of NumPy or of torch.

    Attributes:
        formats: storage formats of the matrices. dtype: `float32` if they are `FLOATS`, else `bfloat16`.
    """

    name = "native"

    def __init__(
        self,
        native: _native.Kernels,
        formats: PackedFormats,
        has_memory: bool = True,
        arena: Arena | None = None,
    ) -> None:
        super().__init__(native)
        self.formats = formats
        self.dtype = "float32" if formats.layers is PackedFormat.FLOAT32 else "bfloat16"
        self.has_memory = has_memory
        self.maps_tables = True
        self._arena = arena

    def without_memory(self) -> NativeKernels:
        """Return the same kernels with weights and vectors that have sizes but no values."""
        return NativeKernels(self.native, self.formats, has_memory=False)

    def in_memory(self, arena: Arena) -> NativeKernels:
        """Return the same kernels with weights and vectors in an arena."""
        return NativeKernels(self.native, self.formats, arena=arena)

    def with_formats(self, formats: PackedFormats) -> NativeKernels:
        """Return the same kernels with other formats."""
        return NativeKernels(self.native, formats, self.has_memory, self._arena)

    def of_layer(self, index: int) -> NativeKernels:
        """Return the same kernels with the formats of layer `index`."""
        return self.with_formats(self.formats.of_layer(index))

    def linear_weight(
        self, out_size: int, in_size: int, role: WeightRole = WeightRole.LINEAR, parts: Parts = NO_PARTS
    ) -> LinearWeight:
        """Make an unfilled packed weight in the format for its role, or in those of its parts."""
        general = self._format(role)
        rows = [(self.formats.of_part(name, general), count) for name, count in parts.items() if count]
        if len({format for format, _ in rows}) > 1 and role is not WeightRole.GATE_UP:
            return PartedWeight(self.native, in_size, rows, self.has_memory, self._arena)
        format = rows[0][0] if rows else self.formats.of_part(role.value, general)
        return PackedWeight(self.native, (out_size, in_size), role, format, self.has_memory, self._arena)

    def _expert_weight(self, out_size: int, in_size: int, role: WeightRole = WeightRole.LINEAR) -> LinearWeight:
        part = "expert_gate" if role is WeightRole.GATE_UP else "expert_down"
        format = self.formats.of_part(part, self.formats.experts or self.formats.layers)
        return PackedWeight(self.native, (out_size, in_size), role, format, self.has_memory, self._arena)

    def _mixture(
        self, gate_up: Sequence[LinearWeight], down: Sequence[LinearWeight], gate: Gate, biases: ExpertBiases | None
    ) -> Experts:
        return NativeExperts(self.native, gate_up, down, gate, biases)

    def vector(self, size: int, is_wide: bool = False) -> npt.NDArray[Any]:
        """Make an unfilled vector, in the arena if there is one."""
        dtype = np.dtype(np.float32 if is_wide or self.dtype == "float32" else np.uint16)
        if not self.has_memory:  # all of its numbers are one, which cannot be written
            return np.broadcast_to(dtype.type(0), (size,))
        if self._arena is None:
            return np.empty(size, dtype)
        return self._arena.take(size * dtype.itemsize).view(dtype)

    def constant(self, values: Floats) -> npt.NDArray[Any]:
        """Return numbers in float32, or the bits of numbers rounded to bfloat16."""
        return np.ascontiguousarray(values) if self.dtype == "float32" else StoredArray(values, "F32").bfloat16()

    def normal(self, shape: tuple[int, ...], deviation: float, seed: int) -> StoredArray:
        """Return random numbers around 0."""
        return seeded_normal(shape, deviation, seed)

    def _format(self, role: WeightRole) -> PackedFormat:
        if role in (WeightRole.ROUTER, WeightRole.ADAPTER):
            return PackedFormat.BF16
        if role in (WeightRole.EMBEDDING, WeightRole.HEAD):
            return self.formats.vocabulary
        own = {WeightRole.GATE_UP: self.formats.gate_up, WeightRole.DOWN: self.formats.down}.get(role)
        return self.formats.layers if own is None else own

    def activate(self, x: Any, activation: Activation) -> Any:
        """Apply an activation in place."""
        return native_ops.activate(self.native, x, activation)

    def add_gated(self, sums: Any, x: Array, gate: Array) -> Any:
        """Add x * sigmoid(gate) to sums in place."""
        return native_ops.add_gated(self.native, sums, x, gate)

    def multiply(self, x: Any, y: Array) -> Any:
        """Return x * y."""
        return native_ops.multiply(self.native, x, y)

    def scaled_sum(self, x: Any, factor: float, delta: Array | None = None, scale: float = 1.0) -> Any:
        """Return (x + scale * delta) * factor, computed in place."""
        return native_ops.scaled_sum(self.native, x, factor, delta, scale)

    def route(self, logits: Any, count: int, normalizes: bool, sigmoid: SigmoidScores | None = None) -> tuple[Any, Any]:
        """Choose the experts of each token; of equal scores the lower number comes first."""
        return native_ops.route(self.native, logits, count, normalizes, sigmoid)

    def rms_norm(self, x: Any, weight: Array, eps: float, is_offset: bool = False) -> Any:
        """Return the RMSNorm of x, times the weight."""
        return native_ops.rms_norm(self.native, x, weight, eps, is_offset=is_offset)

    def layer_norm(self, x: Any, weight: Array, bias: Array | None, eps: float, delta: Array | None = None) -> Any:
        """Add delta to x in place and return the LayerNorm of x."""
        return native_ops.layer_norm(self.native, x, weight, bias, eps, delta)

    def add_rms_norm(
        self,
        x: Any,
        delta: Array,
        weight: Array,
        eps: float,
        scale: float = 1.0,
        is_offset: bool = False,
    ) -> Any:
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

    def mix(self, x: Any, weights: Any, experts: Any) -> Any:
        """Return the weighted sum of each token's experts in one native call."""
        if self._bound is None:
            self._bound = self.bind()
        out = zeros_like(x, x.shape)
        chosen, weights = contiguous(experts), contiguous(weights)
        assert is_a("bfloat16", x, weights) and in_pieces(x), "tokens are rows of bfloat16"
        addresses = address(chosen), address(weights), address(out)
        self._bound.mix(address(x), stride(x), x.shape[0], experts.shape[1], *addresses)
        return out

    def bind(self) -> _native.Experts:
        """Return the experts in native form; the matrices have to stay where they are."""
        size, hidden_size = self.gate_up[0].shape[0] // 2, self.gate_up[0].shape[1]
        bound: _native.Experts = importlib.import_module(MODULE).Experts(self._native, self.gate, hidden_size, size)
        for number, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            assert isinstance(gate_up, PackedWeight) and isinstance(down, PackedWeight), "its matrices are packed"
            biases = (0, 0) if self.biases is None else (address(bias[number]) for bias in self.biases)
            bound.add(gate_up.packed, down.packed, *biases)
        return bound
