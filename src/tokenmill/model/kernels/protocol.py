"""The kernels' protocol: all that a decoder asks of a device besides attention.

A set of kernels owns the form of the weights (`LinearWeight`): row-major tensors in torch, packed panels in native
code; and of vectors: tensors in torch, NumPy arrays in native code, of bfloat16 the bits. So a model names its
operations and never its device, and a new device is a new class here.

Of activations the protocol speaks as tensors; native kernels take NumPy arrays alike, and give what they take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

if TYPE_CHECKING:
    import torch

    from tokenmill.model.kernels.states import StateRows
    from tokenmill.model.quantization.packed import Rows
    from tokenmill.model.quantization.stored_array import Floats, StoredArray
    from tokenmill.platform.arrays import Array
    from tokenmill.platform.memory import Arena

# Added to the sum of the sigmoids of the experts that a token is sent to; see native/isa/route.cpp.
LEAST_SUM = 1e-6


class WeightRole(Enum):
    """The use of a matrix; kernels that quantize choose the precision by it."""

    LINEAR = "linear"
    GATE_UP = "gate_up"  # gate rows, then as many up rows, used through `LinearWeight.gated` only
    DOWN = "down"  # of a dense feed-forward block; its inputs have the largest outliers
    EMBEDDING = "embedding"  # looked up, and the output head where the two are tied
    HEAD = "head"  # the output head: one row per token of the vocabulary
    ROUTER = "router"  # small, and its errors send tokens to other experts
    ADAPTER = "adapter"  # small, and added to what a matrix of fewer bits gives


Parts: TypeAlias = Mapping[str, int]
"""The projections of one input that are stacked in a matrix: role in a table of names -> rows, from the first on."""
NO_PARTS: Parts = MappingProxyType({})


class Gate(IntEnum):
    """Activation of the gate in a gated product; the numbers are those of native/packed.h."""

    SILU = 0
    GELU = 1  # with tanh
    CLAMPED = 2  # gate * sigmoid(1.702 gate) * (up + 1), with gate up to 7 and up from -7 to 7 (gpt-oss)
    GELU_ERF = 3


class Activation(IntEnum):
    """Activation of a product without a gate; the numbers are those of native/row_kernels.h."""

    RELU2 = 0  # the square of ReLU (So et al. 2021)
    GELU = 1  # with tanh
    GELU_ERF = 2
    RELU = 3
    SILU = 4


class LinearWeight(Protocol):
    """A weight W [out_size, in_size] in a form that its kernels choose.

    Attributes:
        shape: (out_size, in_size).
        num_bytes: memory of the weight in bytes.
    """

    shape: tuple[int, int]
    num_bytes: int

    def load_rows(self, start: int, rows: Rows | torch.Tensor) -> None:
        """Set rows [start, start + n) to `rows` [n, in_size]; a tensor may be on any device."""

    def operand(self, array: Any) -> Any:
        """Return an array as the products of these kernels take it, over the same memory."""

    def multiply(self, x: torch.Tensor, bias: Array | None = None) -> torch.Tensor:
        """Return x W^T + bias: [T, in_size] -> [T, out_size] in x's dtype."""

    def gated(self, x: torch.Tensor, bias: Array | None = None, gate: Gate = Gate.SILU) -> torch.Tensor:
        """Return gate(first half) * second half of x W^T + bias: [T, in_size] -> [T, out_size / 2] in x's dtype."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T: [T, in_size] -> [T, out_size] float32, or x's dtype where a device's sampler reads that."""

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """Return the row of the largest of `logits(x)`, the lowest of equals: [T, in_size] -> [T] int64.

        The result is -1 where a logit is NaN or +inf, or all are -inf.
        """

    def best(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row, the lowest of equals, and the value of the largest of `logits(x)`: [T] int64, [T] float32.

        The row is valid where the value is finite; NaN counts as larger than any number.
        """

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows by number: [T] int64 -> [T, in_size] in the model's dtype."""


ExpertBiases: TypeAlias = "tuple[Array, Array]"


class Experts(Protocol):
    """E experts, in a form that their kernels choose.

    Attributes:
        gate_up: per expert [2 * size, hidden_size].
        down: per expert [hidden_size, size].
        biases: of both, [E, 2 * size] and [E, hidden_size]; None without biases.
    """

    biases: ExpertBiases | None

    @property
    def gate_up(self) -> Sequence[LinearWeight]:
        """Gate and up matrices of the experts, for the caller to fill."""

    @property
    def down(self) -> Sequence[LinearWeight]:
        """Down matrices of the experts, for the caller to fill."""

    def one(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Run x [T, hidden_size] through one expert."""

    def mix(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts, added in the order of their ids.

        Args:
            x: [T, hidden_size]. weights: [T, k] in x's dtype. experts: [T, k] int64, ids of each token's experts.

        Returns:
            [T, hidden_size]; a token's result does not depend on the other tokens.
        """


class SigmoidScores(msgspec.Struct, frozen=True):
    """Scores of experts that are sigmoids of their logits; weights of those chosen are over their sum and `LEAST_SUM`.

    Attributes:
        bias: [experts] float32, added to the scores to choose experts, and not to weigh them; None: absent.
        scale: factor on the weights.
    """

    bias: Array | None
    scale: float


class Kernels(Protocol):
    """A set of kernels: makes a model's parameters and runs every operation but attention.

    Attributes:
        name: e.g. `torch`.
        dtype: name of the type of activations, vectors and unquantized matrices, e.g. `bfloat16`.
        has_memory: False if weights and vectors have sizes but no values.
    """

    name: str
    dtype: str
    has_memory: bool

    def without_memory(self) -> Kernels:
        """Return the same kernels with weights that have sizes but no values, to ask what a model needs and takes."""

    def in_memory(self, arena: Arena) -> Kernels | None:
        """Return the same kernels with weights and vectors in an arena, in the order in which they are made.

        The bytes in the arena count as their values. None if these kernels cannot share memory.
        """

    def of_layer(self, index: int) -> Kernels:
        """Return the same kernels for the weights of layer `index`, which may have formats of its own."""

    def linear_weight(
        self, out_size: int, in_size: int, role: WeightRole = WeightRole.LINEAR, parts: Parts = NO_PARTS
    ) -> LinearWeight:
        """Make an unfilled weight."""

    def experts(
        self, num_experts: int, hidden_size: int, size: int, gate: Gate = Gate.SILU, has_biases: bool = False
    ) -> Experts:
        """Make unfilled experts of a mixture; `size` is that of their gated middle."""

    def vector(self, size: int, is_wide: bool = False) -> Array:
        """Make an unfilled bias or norm weight [size]; `is_wide`: in float32 whatever the kernels' dtype is."""

    def constant(self, values: Floats) -> Array:
        """Return numbers in the form of a vector, rounded to the kernels' dtype; not in an arena."""

    def normal(self, shape: tuple[int, ...], deviation: float, seed: int) -> StoredArray | torch.Tensor:
        """Return random numbers around 0, the same for a seed, that weights and vectors can be filled with."""

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return the activation of contiguous x, which may be overwritten."""

    def rms_norm(self, x: torch.Tensor, weight: Array, eps: float, is_offset: bool = False) -> torch.Tensor:
        """Return x [T, size] normalized over its last dimension, times weight [size], as a new tensor.

        The norm is computed in float32 and rounded to x's dtype before the product with the weight, as in transformers.

        Args:
            is_offset: multiply by 1 + weight and round only after the product, as transformers does for Gemma.
        """

    def add_rms_norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor,
        weight: Array,
        eps: float,
        scale: float = 1.0,
        is_offset: bool = False,
    ) -> torch.Tensor:
        """Add scale * delta to x in place, rounded once, and return the norm of x."""

    def layer_norm(
        self, x: torch.Tensor, weight: Array, bias: Array | None, eps: float, delta: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add delta, if there is one, to x [T, size] in place; return the LayerNorm of x, as a new tensor.

        It is computed in float32 and rounded once.
        """

    def short_conv(
        self,
        x: torch.Tensor,
        weight: Array,
        bias: Array | None,
        state: torch.Tensor,
        rows: StateRows,
        out: torch.Tensor,
        silu: bool = False,
    ) -> None:
        """Run a causal convolution over the tokens of each request; see `kernels.recurrence.short_conv`."""

    def delta_rule(
        self,
        mixed: torch.Tensor,
        gates: torch.Tensor,
        a_log: Array,
        dt_bias: Array,
        state: torch.Tensor,
        rows: StateRows,
        out: torch.Tensor,
    ) -> None:
        """Run the gated delta rule over the tokens of each request; see `kernels.recurrence.delta_rule`."""

    def state_space(
        self,
        mixed: torch.Tensor,
        steps: torch.Tensor,
        a_log: Array,
        dt_bias: Array,
        skip: Array,
        state: torch.Tensor,
        rows: StateRows,
        out: torch.Tensor,
    ) -> None:
        """Run a state space over the tokens of each request; see `kernels.recurrence.state_space`."""

    def gated_group_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: Array, num_groups: int, eps: float
    ) -> torch.Tensor:
        """Return the norm of x * silu(gate) over each group; see `kernels.recurrence.gated_group_norm`."""

    def gated_rms_norm(self, x: torch.Tensor, gate: torch.Tensor, weight: Array, eps: float) -> torch.Tensor:
        """Return the norm over each head, times the weight and silu(gate); see `kernels.recurrence.gated_rms_norm`."""

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return x * sigmoid(gate); x may be overwritten."""

    def add_gated(self, sums: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Add x * sigmoid(gate) to sums in place, and return them; x may be overwritten.

        Args:
            sums, x: [T, size]. gate: [T, 1], one number for each row.
        """

    def multiply(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return x * y, of rows [T, size] each; x may be overwritten."""

    def scaled_sum(
        self, x: torch.Tensor, factor: float, delta: torch.Tensor | None = None, scale: float = 1.0
    ) -> torch.Tensor:
        """Return (x + scale * delta) * factor, of contiguous numbers; both may be overwritten.

        Each product and the sum are rounded to x's dtype. None: nothing is added.
        """

    def route(
        self, logits: torch.Tensor, count: int, normalizes: bool, sigmoid: SigmoidScores | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose `count` experts for each token: the largest of a softmax in float32, or of sigmoids.

        Args:
            logits: [T, experts], of the router.
            normalizes: the weights of those chosen are divided by their sum.

        Returns:
            Weights [T, count] in the dtype of the logits, and expert ids [T, count] int64.
        """
