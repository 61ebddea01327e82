"""Kernels in plain torch, for any device and dtype: the reference for all other kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from tokenmill.model.kernels import recurrence
from tokenmill.model.kernels.experts import ExpertMaker
from tokenmill.model.kernels.protocol import (
    LEAST_SUM,
    NO_PARTS,
    Activation,
    Gate,
    Kernels,
    LinearWeight,
    Parts,
    SigmoidScores,
    WeightRole,
)
from tokenmill.model.kernels.states import StateRows
from tokenmill.model.kernels.stored_tensors import floats, tensor_over
from tokenmill.model.quantization.packed import Rows
from tokenmill.model.quantization.stored_array import Floats, StoredArray, seeded_normal
from tokenmill.platform.memory import Arena

if TYPE_CHECKING:
    from tokenmill.platform.arrays import Array

# Below these row counts the CPU libraries of torch take other code paths, whose sums round differently; padded up to
# them, a token's result hardly ever depends on who shares its batch (measured, oneDNN: float32 never, bfloat16 rarely).
FEWEST_ROWS = {torch.float32: 8, torch.bfloat16: 4}
# Where torch would give float32 to MKL, which leaves some makers' wide registers alone and, with two threads, rounds by
# the number of rows: oneDNN does neither, and is up to 2.3 times as fast.
_HAS_BOTH = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
_ONEDNN_LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if _HAS_BOTH else None


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x W^T + b: [T, in_size] -> [T, out_size]; on a CPU, by the same code for one token as for more."""
    missing = FEWEST_ROWS.get(x.dtype, 0) - x.shape[0] if x.is_cpu else 0
    if missing <= 0:
        return _linear(x, weight, bias)
    return _linear(functional.pad(x, (0, 0, 0, missing)), weight, bias)[: x.shape[0]]


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if x.is_cpu and x.dtype == torch.float32 and _ONEDNN_LINEAR is not None:
        return _ONEDNN_LINEAR(x, weight, bias, "none", [], "")
    return functional.linear(x, weight, bias)


def gated(gate_up: torch.Tensor, gate: Gate = Gate.SILU) -> torch.Tensor:
    """Return gate(first half) * second half: [T, 2 * size] -> [T, size]."""
    first, up = gate_up.chunk(2, -1)
    match gate:
        case Gate.SILU:
            return functional.silu(first).mul_(up)
        case Gate.GELU:
            return functional.gelu(first, approximate="tanh").mul_(up)
        case Gate.GELU_ERF:
            # In one piece: of a single row, which always is, torch's erf rounds otherwise than of a part of several.
            return functional.gelu(first.contiguous()).mul_(up)
        case Gate.CLAMPED:
            wide = first.float().clamp(max=7.0)
            return (wide * torch.sigmoid(1.702 * wide)).to(up.dtype).mul_(up.clamp(-7.0, 7.0) + 1.0)


def activated(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return the activation of x, which may be overwritten."""
    match activation:
        case Activation.RELU2:
            return x.relu_().square_()
        case Activation.GELU:
            return functional.gelu(x, approximate="tanh")
        case Activation.GELU_ERF:
            return functional.gelu(x)
        case Activation.RELU:
            return x.relu_()
        case Activation.SILU:
            return functional.silu(x)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, is_offset: bool = False) -> torch.Tensor:
    """Return x [..., size] normalized over its last dimension, times weight [size]; see `Kernels.rms_norm`."""
    if is_offset:
        return functional.rms_norm(x.float(), weight.shape, None, eps).mul_(1.0 + weight.float()).to(x.dtype)
    return functional.rms_norm(x, weight.shape, None, eps).mul_(weight)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the index of the largest of each row, [T, V] -> [T] int64; see `LinearWeight.argmax`."""
    ids = logits.argmax(-1, keepdim=True)  # of a NaN, if there is one
    return ids.where(logits.gather(1, ids).isfinite(), -1).squeeze(1)


def best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return index and value of the largest of each row, [T, V] -> [T] int64, [T] float32; see `LinearWeight.best`."""
    ids = logits.argmax(-1, keepdim=True)
    return ids.squeeze(1), logits.gather(1, ids).squeeze(1).float()


class TorchWeight:
    """A row-major `LinearWeight`.

    Attributes:
        weight: [out_size, in_size].
    """

    __slots__ = ("num_bytes", "shape", "weight")

    def __init__(self, out_size: int, in_size: int, dtype: torch.dtype, device: str) -> None:
        self.shape = out_size, in_size
        self.weight = torch.empty(out_size, in_size, dtype=dtype, device=device)
        self.num_bytes = self.weight.nbytes

    def load_rows(self, start: int, rows: Rows | torch.Tensor) -> None:
        """Copy rows from row `start` on; quantized rows are dequantized."""
        self.weight[start : start + rows.shape[0]].copy_(floats(rows))

    def operand(self, array: Array) -> torch.Tensor:
        """Return the array as a tensor."""
        return tensor_over(array)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x W^T + bias."""
        return product(x, self.weight, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None = None, gate: Gate = Gate.SILU) -> torch.Tensor:
        """Return gate(first half) * second half of x W^T + bias."""
        return gated(self.multiply(x, bias), gate)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T in float32."""
        return self.multiply(x).float()

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """Return the row of the largest logit, or -1 if that is not finite."""
        return argmax(self.multiply(x))

    def best(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row and the value of the largest logit."""
        return best(self.multiply(x))

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows by number."""
        return functional.embedding(ids, self.weight)


class TorchKernels(ExpertMaker):
    """`Kernels` in plain torch. Device `meta` allocates nothing."""

    name = "torch"

    def __init__(self, dtype: str, device: str, *, maps_tables: bool | None = None) -> None:
        self.dtype = dtype
        self.has_memory = device != "meta"
        self.maps_tables = device in ("cpu", "meta") if maps_tables is None else maps_tables
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._device = device

    def without_memory(self) -> TorchKernels:
        """Return the same kernels on device `meta`."""
        return TorchKernels(self.dtype, "meta", maps_tables=self.maps_tables)

    def in_memory(self, arena: Arena) -> Kernels | None:
        """Return None: these kernels cannot share memory."""
        return None

    def of_layer(self, index: int) -> Kernels:
        """Return these kernels: all layers have the same format."""
        return self

    def linear_weight(
        self, out_size: int, in_size: int, role: WeightRole = WeightRole.LINEAR, parts: Parts = NO_PARTS
    ) -> LinearWeight:
        """Make an unfilled row-major weight."""
        return TorchWeight(out_size, in_size, self._dtype, self._device)

    def vector(self, size: int, is_wide: bool = False) -> torch.Tensor:
        """Make an unfilled vector."""
        return torch.empty(size, dtype=torch.float32 if is_wide else self._dtype, device=self._device)

    def constant(self, values: Floats) -> torch.Tensor:
        """Return numbers as a tensor."""
        return torch.from_numpy(values).to(self._device, self._dtype)

    def normal(self, shape: tuple[int, ...], deviation: float, seed: int) -> StoredArray | torch.Tensor:
        """Return random numbers around 0: those of all kernels on a CPU, a device's own where it draws them."""
        if self._device == "cpu":
            return seeded_normal(shape, deviation, seed)
        generator = torch.Generator(self._device).manual_seed(seed)
        values = torch.empty(shape, dtype=self._dtype, device=self._device)
        return values.normal_(std=deviation, generator=generator)

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return the activation of x, which may be overwritten."""
        return activated(x, activation)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, is_offset: bool = False) -> torch.Tensor:
        """Return the RMSNorm of x, times the weight."""
        return rms_norm(x, weight, eps, is_offset)

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
        if scale == 1:
            x += delta
        else:
            # In a narrower type torch would round the factor too.
            x.copy_(x.float().add_(delta.float(), alpha=scale))
        return rms_norm(x, weight, eps, is_offset)

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        delta: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add delta to x in place and return the LayerNorm of x."""
        if delta is not None:
            x += delta
        return functional.layer_norm(x, weight.shape, weight, bias, eps)

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

    def gated_group_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, num_groups: int, eps: float
    ) -> torch.Tensor:
        """Return the norm of x * silu(gate) over each group, times the weight."""
        return recurrence.gated_group_norm(x, gate, weight, num_groups, eps)

    def gated_rms_norm(self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the norm of x over each head, times the weight and silu(gate)."""
        return recurrence.gated_rms_norm(x, gate, weight, eps)

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return x * sigmoid(gate), computed in place."""
        return recurrence.sigmoid_gate(x, gate)

    def add_gated(self, sums: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Add x * sigmoid(gate) to sums in place."""
        return sums.add_(x.mul_(torch.sigmoid(gate)))

    def multiply(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return x * y."""
        return x * y

    def scaled_sum(
        self, x: torch.Tensor, factor: float, delta: torch.Tensor | None = None, scale: float = 1.0
    ) -> torch.Tensor:
        """Return (x + scale * delta) * factor, computed in place."""
        if delta is not None:
            x.add_(delta.mul_(scale))
        return x.mul_(factor)

    def route(
        self, logits: torch.Tensor, count: int, normalizes: bool, sigmoid: SigmoidScores | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the experts of each token."""
        if sigmoid is not None:
            return _route_by_sigmoids(logits, count, normalizes, sigmoid)
        weights, experts = torch.softmax(logits, -1, dtype=torch.float32).topk(count, -1)
        if normalizes:
            weights /= weights.sum(-1, keepdim=True)
        return weights.to(logits.dtype), experts


def _route_by_sigmoids(
    logits: torch.Tensor, count: int, normalizes: bool, sigmoid: SigmoidScores
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.float().sigmoid()
    experts = (scores if sigmoid.bias is None else scores + sigmoid.bias).topk(count, -1).indices
    weights = scores.gather(1, experts)
    if normalizes:
        weights /= weights.sum(-1, keepdim=True) + LEAST_SUM
    return weights.mul_(sigmoid.scale).to(logits.dtype), experts
