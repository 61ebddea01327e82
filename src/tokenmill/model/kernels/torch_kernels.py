"""Kernels in plain torch, for any device and dtype: the reference of the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from tokenmill.model.kernels import recurrence
from tokenmill.model.kernels.protocol import ExpertBiases, Experts, Gate, Kernels, LinearWeight, WeightRole
from tokenmill.model.quantization.packed import Rows, dense
from tokenmill.platform.memory import Arena

# Below these row counts the CPU libraries of torch take other code paths, whose sums round differently; padded up to
# them, a token's result hardly ever depends on who shares its batch (measured: MKL, one thread: never; oneDNN: rarely).
FEWEST_ROWS = {torch.float32: 8, torch.bfloat16: 4}


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b: [T, in_size] -> [T, out_size]; on a CPU, the same code whether T is 1 or more."""
    missing = FEWEST_ROWS.get(x.dtype, 0) - x.shape[0] if x.is_cpu else 0
    if missing <= 0:
        return functional.linear(x, weight, bias)
    return functional.linear(functional.pad(x, (0, 0, 0, missing)), weight, bias)[: x.shape[0]]


def gated(gate_up: torch.Tensor, gate: Gate = Gate.SILU) -> torch.Tensor:
    """[T, 2 * size] -> gate(first half) * second half, [T, size]."""
    first, up = gate_up.chunk(2, -1)
    match gate:
        case Gate.SILU:
            return functional.silu(first).mul_(up)
        case Gate.GELU:
            return functional.gelu(first, approximate="tanh").mul_(up)
        case Gate.CLAMPED:
            wide = first.float().clamp(max=7.0)
            return (wide * torch.sigmoid(1.702 * wide)).to(up.dtype).mul_(up.clamp(-7.0, 7.0) + 1.0)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, is_offset: bool = False) -> torch.Tensor:
    """x [..., size] over its last dimension, times weight [size]; see `Kernels.rms_norm`."""
    if is_offset:
        return functional.rms_norm(x.float(), weight.shape, None, eps).mul_(1.0 + weight.float()).to(x.dtype)
    return functional.rms_norm(x, weight.shape, None, eps).mul_(weight)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """[T, V] -> [T] int64: the largest of each row; see `LinearWeight.argmax`."""
    ids = logits.argmax(-1, keepdim=True)  # of a NaN, if there is one
    return ids.where(logits.gather(1, ids).isfinite(), -1).squeeze(1)


def best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, V] -> [T] int64, [T] float32: the largest of each row, and its value; see `LinearWeight.best`."""
    ids = logits.argmax(-1, keepdim=True)
    return ids.squeeze(1), logits.gather(1, ids).squeeze(1).float()


class TorchWeight:
    """A row-major weight; see `LinearWeight`.

    Attributes:
        weight: [out_size, in_size].
    """

    __slots__ = ("num_bytes", "shape", "weight")

    def __init__(self, out_size: int, in_size: int, dtype: torch.dtype, device: str) -> None:
        self.shape = out_size, in_size
        self.weight = torch.empty(out_size, in_size, dtype=dtype, device=device)
        self.num_bytes = self.weight.nbytes

    def load_rows(self, start: int, rows: Rows) -> None:
        """See `LinearWeight.load_rows`; quantized rows are spelled out."""
        self.weight[start : start + rows.shape[0]].copy_(dense(rows))

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `LinearWeight.multiply`."""
        return product(x, self.weight, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None = None, gate: Gate = Gate.SILU) -> torch.Tensor:
        """See `LinearWeight.gated`."""
        return gated(self.multiply(x, bias), gate)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """See `LinearWeight.logits`."""
        return self.multiply(x).float()

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """See `LinearWeight.argmax`."""
        return argmax(self.multiply(x))

    def best(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LinearWeight.best`."""
        return best(self.multiply(x))

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """See `LinearWeight.lookup`."""
        return functional.embedding(ids, self.weight)


class LoopedExperts:
    """One expert after the other, each a product of its own: for kernels without grouped products."""

    __slots__ = ("biases", "down", "gate", "gate_up")

    def __init__(
        self,
        gate_up: Sequence[LinearWeight],
        down: Sequence[LinearWeight],
        gate: Gate = Gate.SILU,
        biases: ExpertBiases | None = None,
    ) -> None:
        self.gate_up = gate_up
        self.down = down
        self.biases = biases
        self.gate = gate

    def one(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """See `Experts.one`."""
        first, second = (None, None) if self.biases is None else (bias[expert] for bias in self.biases)
        return self.down[expert].multiply(self.gate_up[expert].gated(x, first, self.gate), second)

    def mix(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """See `Experts.mix`."""
        order = experts.flatten().argsort(stable=True)
        tokens = order // experts.shape[1]
        inputs, scales = x[tokens], weights.flatten()[order].unsqueeze(1)
        counts = torch.bincount(experts.flatten(), minlength=len(self.down)).tolist()
        result = torch.zeros_like(x)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                mine = slice(start, start + count)
                result.index_add_(0, tokens[mine], self.one(expert, inputs[mine]).mul_(scales[mine]))
                start += count
        return result


class TorchKernels:
    """See `Kernels`. Device `meta` allocates nothing."""

    name = "torch"

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype = dtype
        self._device = device

    def without_memory(self) -> TorchKernels:
        """See `Kernels.without_memory`."""
        return TorchKernels(self.dtype, "meta")

    def in_memory(self, arena: Arena) -> Kernels | None:
        """See `Kernels.in_memory`."""
        return None

    def linear_weight(self, out_size: int, in_size: int, role: WeightRole = WeightRole.LINEAR) -> LinearWeight:
        """See `Kernels.linear_weight`."""
        return TorchWeight(out_size, in_size, self.dtype, self._device)

    def experts(
        self, num_experts: int, hidden_size: int, size: int, gate: Gate = Gate.SILU, has_biases: bool = False
    ) -> Experts:
        """See `Kernels.experts`."""
        gate_up = [self._expert_weight(2 * size, hidden_size, WeightRole.GATE_UP) for _ in range(num_experts)]
        down = [self._expert_weight(hidden_size, size) for _ in range(num_experts)]
        biases = self._biases(num_experts, hidden_size, size) if has_biases else None
        return self._mixture(gate_up, down, gate, biases)

    def _mixture(
        self, gate_up: Sequence[LinearWeight], down: Sequence[LinearWeight], gate: Gate, biases: ExpertBiases | None
    ) -> Experts:
        return LoopedExperts(gate_up, down, gate, biases)

    def _expert_weight(self, out_size: int, in_size: int, role: WeightRole = WeightRole.LINEAR) -> LinearWeight:
        return self.linear_weight(out_size, in_size, role)

    def _biases(self, num_experts: int, hidden_size: int, size: int) -> ExpertBiases:
        return tuple(self.vector(num_experts * own).view(num_experts, own) for own in (2 * size, hidden_size))

    def vector(self, size: int) -> torch.Tensor:
        """See `Kernels.vector`."""
        return torch.empty(size, dtype=self.dtype, device=self._device)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """See `Kernels.gelu`."""
        return functional.gelu(x, approximate="tanh")

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, is_offset: bool = False) -> torch.Tensor:
        """See `Kernels.rms_norm`."""
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
        """See `Kernels.add_rms_norm`."""
        if scale == 1:
            x += delta
        else:
            # In a narrower type torch would round the factor too.
            x.copy_(x.float().add_(delta.float(), alpha=scale))
        return rms_norm(x, weight, eps, is_offset)

    def short_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        rows: recurrence.StateRows,
        out: torch.Tensor,
        silu: bool = False,
    ) -> None:
        """See `Kernels.short_conv`."""
        recurrence.short_conv(x, weight, bias, state, rows, out, silu)

    def delta_rule(
        self,
        mixed: torch.Tensor,
        gates: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        state: torch.Tensor,
        rows: recurrence.StateRows,
        out: torch.Tensor,
    ) -> None:
        """See `Kernels.delta_rule`."""
        recurrence.delta_rule(mixed, gates, a_log, dt_bias, state, rows, out)

    def gated_rms_norm(self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Kernels.gated_rms_norm`."""
        return recurrence.gated_rms_norm(x, gate, weight, eps)

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """See `Kernels.sigmoid_gate`."""
        return recurrence.sigmoid_gate(x, gate)
