"""The kernels' protocol: all that a decoder asks of a device besides attention.

A set of kernels owns the form of the weights (`LinearWeight`): row-major tensors in torch, packed panels in native
code. So a model names its operations and never its device, and a new device is a new class here.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import Protocol

import torch

from tokenmill.model.kernels.recurrence import StateRows
from tokenmill.model.quantization.packed import Rows
from tokenmill.platform.memory import Arena


class WeightRole(Enum):
    """What a matrix is for; kernels that quantize choose the precision by it."""

    LINEAR = "linear"
    GATE_UP = "gate_up"  # gate rows, then as many up rows, used through `LinearWeight.gated` only
    EMBEDDING = "embedding"  # looked up, and the output head where the two are tied
    HEAD = "head"  # the output head: one row per token of the vocabulary
    ROUTER = "router"  # small, and its errors send tokens to other experts
    ADAPTER = "adapter"  # small, and added to what a matrix of fewer bits gives


class Gate(IntEnum):
    """What becomes of the gate in a gated product; the numbers are those of native/packed.h."""

    SILU = 0
    GELU = 1  # with tanh
    CLAMPED = 2  # gate * sigmoid(1.702 gate) * (up + 1), with gate up to 7 and up from -7 to 7 (gpt-oss)


class LinearWeight(Protocol):
    """A weight W [out_size, in_size] in the form that its kernels like.

    Attributes:
        shape: (out_size, in_size).
        num_bytes: memory it takes.
    """

    shape: tuple[int, int]
    num_bytes: int

    def load_rows(self, start: int, rows: Rows) -> None:
        """Set rows [start, start + n) to `rows` [n, in_size], on any device."""

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + bias: [T, in_size] -> [T, out_size] in x's dtype."""

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None = None, gate: Gate = Gate.SILU) -> torch.Tensor:
        """gate(first half) * second half of x W^T + bias: [T, in_size] -> [T, out_size / 2] in x's dtype."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T: [T, in_size] -> [T, out_size] float32; where a device's sampler reads it as it is, x's dtype."""

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_size] -> [T] int64: the row of the largest of `logits(x)`, the lowest of equals.

        -1 where one of these is NaN or +inf, or all are -inf.
        """

    def best(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, in_size] -> [T] int64, [T] float32: the largest of `logits(x)`, and its row, the lowest of equals.

        The row counts where the value is finite; NaN is taken for larger than any number.
        """

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows by number: [T] int64 -> [T, in_size] in the model's dtype."""


ExpertBiases = tuple[torch.Tensor, torch.Tensor]


class Experts(Protocol):
    """E experts, in the form that their kernels like.

    Attributes:
        gate_up: per expert [2 * size, hidden_size].
        down: per expert [hidden_size, size].
        biases: of both, [E, 2 * size] and [E, hidden_size]; None: there are none.
    """

    biases: ExpertBiases | None

    @property
    def gate_up(self) -> Sequence[LinearWeight]:
        """To be filled."""

    @property
    def down(self) -> Sequence[LinearWeight]:
        """To be filled."""

    def one(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """What one of them makes of x [T, hidden_size]."""

    def mix(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's experts, added in the order of their ids.

        Args:
            x: [T, hidden_size]. weights: [T, k] in x's dtype. experts: [T, k] int64, which ones.

        Returns:
            [T, hidden_size]; a token's result does not depend on the others.
        """


class Kernels(Protocol):
    """Makes a model's parameters and runs what is not attention.

    Attributes:
        name: e.g. `torch`.
        dtype: of activations, vectors and unquantized matrices.
    """

    name: str
    dtype: torch.dtype

    def without_memory(self) -> Kernels:
        """The same kernels, whose weights have sizes and no values: to ask what a model needs and what it takes."""

    def in_memory(self, arena: Arena) -> Kernels | None:
        """The same kernels, whose weights and vectors lie in an arena, in the order in which they are made.

        Whatever is there is taken for their values. None: these kernels do not share memory.
        """

    def linear_weight(self, out_size: int, in_size: int, role: WeightRole = WeightRole.LINEAR) -> LinearWeight:
        """An unfilled weight."""

    def experts(
        self, num_experts: int, hidden_size: int, size: int, gate: Gate = Gate.SILU, has_biases: bool = False
    ) -> Experts:
        """Unfilled experts of a mixture; `size` is that of their gated middle."""

    def vector(self, size: int) -> torch.Tensor:
        """An unfilled bias or norm weight [size]."""

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """GELU with tanh, of numbers that lie in one piece; x may be overwritten."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, is_offset: bool = False) -> torch.Tensor:
        """x [T, size] normalized over its last dimension, times weight [size]; a new tensor.

        Normalized in float32 and rounded to x's dtype before the product with the weight, as transformers does.

        Args:
            is_offset: times 1 + weight, and rounded after the product alone, as transformers does for Gemma.
        """

    def add_rms_norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        scale: float = 1.0,
        is_offset: bool = False,
    ) -> torch.Tensor:
        """x += scale * delta, in place and rounded once; then the norm of x."""

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
        """See `kernels.recurrence.short_conv`."""

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
        """See `kernels.recurrence.delta_rule`."""

    def gated_rms_norm(self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `kernels.recurrence.gated_rms_norm`."""

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """See `kernels.recurrence.sigmoid_gate`."""
