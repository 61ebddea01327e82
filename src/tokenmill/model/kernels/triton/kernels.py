"""`TritonKernels`: the kernels of a decoder on a GPU. Large products come from the library, the rest is Triton."""

from __future__ import annotations

import torch

from tokenmill.model.kernels.fp8 import ALIGNMENT, Fp8Weight
from tokenmill.model.kernels.protocol import NO_PARTS, Experts, Gate, Parts, WeightRole
from tokenmill.model.kernels.states import StateRows
from tokenmill.model.kernels.torch_kernels import TorchKernels, TorchWeight, product
from tokenmill.model.kernels.triton import matmul, norm, recurrence
from tokenmill.model.kernels.triton.expert_matrices import (
    ExpertMatrices,
    Fp8Matrices,
    Mxfp4Matrices,
    PlainMatrices,
    Shape,
)
from tokenmill.model.kernels.triton.experts import StackedExperts
from tokenmill.model.kernels.triton.few_rows import are_fewest, few_rows, suits
from tokenmill.model.kernels.triton.fp8 import RoundedRows
from tokenmill.model.kernels.triton.gate import gated


class TritonWeight(TorchWeight):
    """A weight with the gate in one pass over the product, and with logits in x's dtype."""

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None = None, gate: Gate = Gate.SILU) -> torch.Tensor:
        """Multiply, then apply the gate in one pass."""
        return gated(self.multiply(x, bias), gate)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T in x's dtype, which the sampler's kernels read."""
        return self.multiply(x)


class PlainWeight(TritonWeight):
    """A weight whose products with few rows, those of decodes, are Triton's, and the library's otherwise."""

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x W^T + bias."""
        if suits(x, self.weight, False):
            return few_rows(x, self.weight, bias)
        return product(x, self.weight, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None = None, gate: Gate = Gate.SILU) -> torch.Tensor:
        """Multiply and apply the gate: in one kernel for few rows."""
        if suits(x, self.weight, True):
            return few_rows(x, self.weight, bias, gate)
        return super().gated(x, bias, gate)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T in x's dtype, by the library: a head has rows enough to keep its kernels busy."""
        return product(x, self.weight)


class InvariantWeight(TritonWeight):
    """A weight whose products sum in one order, whatever the number of rows."""

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x W^T + bias by the Triton kernel with fixed tiles."""
        return matmul.multiply(x, self.weight, bias)


class TritonFp8Weight(Fp8Weight, TritonWeight):
    """A weight of eight-bit floats with the gate in one pass.

    Activations are rounded by the norm in front, or else in a pass of their own; few rows of them are not rounded.

    Args:
        rounded: the rows that norms have rounded.
    """

    __slots__ = ("_rounded",)

    def __init__(self, out_size: int, in_size: int, device: str, rounded: RoundedRows) -> None:
        super().__init__(out_size, in_size, device)
        self._rounded = rounded

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x W^T + bias."""
        if suits(x, self.weight, False):
            return few_rows(x, self.weight, bias, None, self.scales)
        return super().multiply(x, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None = None, gate: Gate = Gate.SILU) -> torch.Tensor:
        """Multiply and apply the gate: in one kernel for few rows."""
        if suits(x, self.weight, True):
            return few_rows(x, self.weight, bias, gate, self.scales)
        return super().gated(x, bias, gate)

    def _quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rounded.take(x)


class TritonKernels(TorchKernels):
    """`Kernels` for GPUs.

    Args:
        is_invariant: make a token's results independent of the number of tokens beside it.
        fp8: quantize linear layers and experts to eight-bit floats while they are filled.
        mxfp4: keep experts in mxfp4, as they are stored, whatever linear layers are.
    """

    name = "triton"

    def __init__(
        self, dtype: str, device: str, *, is_invariant: bool = False, fp8: bool = False, mxfp4: bool = False
    ) -> None:
        super().__init__(dtype, device, maps_tables=False)
        self._is_invariant = is_invariant
        self._mxfp4 = mxfp4
        # Of all norms, also those that another product follows: a byte a number more is not worth telling them apart.
        self._rounded = RoundedRows() if fp8 else None

    def without_memory(self) -> TritonKernels:
        """Return the same kernels on device `meta`."""
        forms = {"is_invariant": self._is_invariant, "fp8": self._rounded is not None, "mxfp4": self._mxfp4}
        return TritonKernels(self.dtype, "meta", **forms)

    def linear_weight(
        self, out_size: int, in_size: int, role: WeightRole = WeightRole.LINEAR, parts: Parts = NO_PARTS
    ) -> TorchWeight:
        """Make an unfilled weight: eight-bit floats, batch-invariant or plain."""
        is_aligned = out_size % ALIGNMENT == 0 and in_size % ALIGNMENT == 0
        is_of_layers = role in (WeightRole.LINEAR, WeightRole.GATE_UP, WeightRole.DOWN)
        if self._rounded is not None and is_aligned and is_of_layers:
            return TritonFp8Weight(out_size, in_size, self._device, self._rounded)
        kind = InvariantWeight if self._is_invariant else PlainWeight
        return kind(out_size, in_size, self._dtype, self._device)

    def experts(
        self, num_experts: int, hidden_size: int, size: int, gate: Gate = Gate.SILU, has_biases: bool = False
    ) -> Experts:
        """Make unfilled stacked experts: as they are stored in mxfp4, in eight-bit floats or plain."""
        biases = self._biases(num_experts, hidden_size, size) if has_biases else None
        gate_up = self._matrices((num_experts, 2 * size, hidden_size))
        return StackedExperts(gate_up, self._matrices((num_experts, hidden_size, size)), gate, biases)

    def _matrices(self, shape: Shape) -> ExpertMatrices:
        like = self.vector(0)
        if self._mxfp4:
            return Mxfp4Matrices(shape, like)
        return PlainMatrices(shape, like) if self._rounded is None else Fp8Matrices(shape, like, self._rounded)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, is_offset: bool = False) -> torch.Tensor:
        """Return the RMSNorm of x, times the weight."""
        return norm.rms_norm(x, weight, eps, is_offset, None if are_fewest(x) else self._rounded)

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
        rounded = None if are_fewest(x) else self._rounded
        return norm.add_rms_norm(x, delta, weight, eps, scale, is_offset, rounded)

    def short_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        rows: StateRows,
        out: torch.Tensor,
        silu: bool = False,
    ) -> None:
        """Run the causal convolution of each request."""
        recurrence.short_conv(x, weight, bias, state, rows, out, silu)

    def delta_rule(
        self,
        mixed: torch.Tensor,
        gates: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        state: torch.Tensor,
        rows: StateRows,
        out: torch.Tensor,
    ) -> None:
        """Run the gated delta rule of each request."""
        recurrence.delta_rule(mixed, gates, a_log, dt_bias, state, rows, out)

    def state_space(
        self,
        mixed: torch.Tensor,
        steps: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        skip: torch.Tensor,
        state: torch.Tensor,
        rows: StateRows,
        out: torch.Tensor,
    ) -> None:
        """Run the state space of each request."""
        recurrence.state_space(mixed, steps, a_log, dt_bias, skip, state, rows, out)

    def gated_rms_norm(self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the norm of x over each head, times the weight and silu(gate)."""
        return recurrence.gated_rms_norm(x, gate, weight, eps)

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return x * sigmoid(gate) as a new tensor."""
        return recurrence.sigmoid_gate(x, gate)
