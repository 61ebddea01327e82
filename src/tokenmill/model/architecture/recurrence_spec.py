"""Recurrences, which layers have instead of attention, as plain frozen data: a convolution, a delta net, a state space.

Each keeps a state for a request, of one size however long the request is.
"""

from __future__ import annotations

import msgspec

from tokenmill.model.architecture.norm_spec import NormSpec


class StatePart(msgspec.Struct, frozen=True):
    """A tensor of the state that a layer keeps for a request. `is_wide`: float32 whatever the model's dtype is."""

    shape: tuple[int, ...]
    is_wide: bool = False


class ShortConvSpec(msgspec.Struct, frozen=True):
    """A gated convolution over the last tokens instead of attention (LFM2); see `models.short_conv`.

    Attributes:
        kernel: tokens that it sees, the last one among them.
    """

    size: int
    kernel: int
    bias: bool = False

    @property
    def widest(self) -> int:
        """Numbers of a token between its projections."""
        return 4 * self.size

    @property
    def state(self) -> tuple[StatePart, ...]:
        """Tensors kept for each request."""
        return (StatePart((self.size, self.kernel - 1)),)

    @property
    def inputs(self) -> tuple[int, ...]:
        """Widths of what the state takes of a token."""
        return (self.size,)

    def num_parameters(self, hidden_size: int) -> int:
        """Return the number of parameters of the block."""
        return 4 * self.size * hidden_size + self.size * self.kernel + (4 * self.size + hidden_size) * self.bias


class DeltaNetSpec(msgspec.Struct, frozen=True):
    """The gated delta rule instead of attention (Yang et al. 2024, as Qwen3-Next has it); see `models.delta_net`.

    Attributes:
        num_key_heads, num_value_heads: each key head serves as many value heads as the next.
        kernel: tokens that the convolution before it sees, the last one among them.
        norm: over the heads of its output.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    kernel: int
    norm: NormSpec

    @property
    def keys_width(self) -> int:
        """Width of the queries, or of the keys, of one token."""
        return self.num_key_heads * self.key_size

    @property
    def values_width(self) -> int:
        """Width of the values of one token."""
        return self.num_value_heads * self.value_size

    @property
    def mixed_width(self) -> int:
        """Width of queries, keys and values together."""
        return 2 * self.keys_width + self.values_width

    @property
    def widest(self) -> int:
        """Numbers of a token between its projections."""
        return 2 * self.mixed_width + 2 * self.values_width

    @property
    def state(self) -> tuple[StatePart, ...]:
        """Tensors kept for each request."""
        matrices = (self.num_value_heads, self.key_size, self.value_size)
        return StatePart((self.mixed_width, self.kernel - 1)), StatePart(matrices, is_wide=True)

    @property
    def inputs(self) -> tuple[int, ...]:
        """Widths of what the state takes of a token: q, k and v before their convolution, and gates."""
        return self.mixed_width, 2 * self.num_value_heads

    def num_parameters(self, hidden_size: int) -> int:
        """Return the number of parameters of the block."""
        inputs = self.mixed_width + self.values_width + 2 * self.num_value_heads
        vectors = self.mixed_width * self.kernel + 2 * self.num_value_heads + self.value_size
        return hidden_size * (inputs + self.values_width) + vectors


class StateSpaceSpec(msgspec.Struct, frozen=True):
    """A state space instead of attention (Mamba-2: Dao and Gu 2024); see `models.mamba`.

    Attributes:
        head_size: numbers of a head of x. state_size: rows of its state, and numbers of B and of C.
        num_groups: each of B and C serves as many heads as the next.
        kernel: tokens that the convolution before it sees, the last one among them.
        norm: over the numbers of each group of its output.
        has_filter_bias: the convolution has one. has_biases: the projections have them.
    """

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    kernel: int
    norm: NormSpec
    has_filter_bias: bool = True
    has_biases: bool = False

    @property
    def inner_width(self) -> int:
        """Width of x, and of the output, of one token."""
        return self.num_heads * self.head_size

    @property
    def mixed_width(self) -> int:
        """Width of x, B and C together."""
        return self.inner_width + 2 * self.num_groups * self.state_size

    @property
    def widest(self) -> int:
        """Numbers of a token between its projections."""
        return 2 * self.inner_width + 2 * self.mixed_width + self.num_heads

    @property
    def state(self) -> tuple[StatePart, ...]:
        """Tensors kept for each request."""
        matrices = (self.num_heads, self.state_size, self.head_size)
        return StatePart((self.mixed_width, self.kernel - 1)), StatePart(matrices, is_wide=True)

    @property
    def inputs(self) -> tuple[int, ...]:
        """Widths of what the state takes of a token: x, B and C before their convolution, and steps."""
        return self.mixed_width, self.num_heads

    def num_parameters(self, hidden_size: int) -> int:
        """Return the number of parameters of the block."""
        inputs = self.inner_width + self.mixed_width + self.num_heads
        biases = (inputs + hidden_size) * self.has_biases + self.mixed_width * self.has_filter_bias
        vectors = self.mixed_width * self.kernel + 3 * self.num_heads + self.inner_width
        return hidden_size * (inputs + self.inner_width) + vectors + biases


RecurrenceSpec = ShortConvSpec | DeltaNetSpec | StateSpaceSpec
"""The recurrence of a layer."""
