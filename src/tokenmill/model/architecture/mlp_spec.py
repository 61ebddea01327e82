"""Feed-forward blocks as plain data: a dense one, or a mixture of experts."""

from __future__ import annotations

import msgspec

from tokenmill.model.architecture.norm_spec import NormSpec


class MlpSpec(msgspec.Struct, frozen=True):
    """A dense feed-forward block: a gated pair of projections to `size`, or a single one, and one back.

    Attributes:
        activation: of the gate, `silu`, `gelu` with tanh, or `gelu_erf`; without a gate also `relu`, or `relu2`, its
            square.
        has_down_bias: the projection back has a bias; None: as those before it, by `bias`.
    """

    size: int
    bias: bool = False
    activation: str = "silu"
    is_gated: bool = True
    has_down_bias: bool | None = None

    @property
    def down_bias(self) -> bool:
        """True if the projection back has a bias."""
        return self.bias if self.has_down_bias is None else self.has_down_bias

    @property
    def active_size(self) -> int:
        """Width that one token is projected to."""
        return self.size

    def obstacle(self, size: int, sums: bool) -> str | None:
        """Return why `size` ranks cannot share it, each with some of its width; None: they can."""
        return f"the {self.size} numbers between its projections cannot be shared evenly" if self.size % size else None

    def num_parameters(self, hidden_size: int) -> int:
        """Return the number of parameters of the block."""
        inner = (1 + self.is_gated) * self.size
        return hidden_size * (inner + self.size) + inner * self.bias + hidden_size * self.down_bias


class ExpertStack(msgspec.Struct, frozen=True):
    """The tensors in which checkpoints may store all experts of a layer.

    Attributes:
        gate_up, down: names of the tensors, with a place for the layer.
        takes_turns: inputs stand before outputs, and gate and up take turns among the outputs. Otherwise all of gate
            stands before all of up, and whether inputs stand before outputs is told by the shape.
        are_plain: there is no gate, and experts stand one below the other in matrices of two dimensions: up, and down
            with inputs before outputs.
    """

    gate_up: str
    down: str
    takes_turns: bool = False
    are_plain: bool = False


class SigmoidSpec(msgspec.Struct, frozen=True):
    """Scores of experts that are sigmoids of their logits, and not a softmax.

    Attributes:
        has_bias: numbers are added to the scores to choose experts, and not to weigh them.
        scale: factor on the weights of those chosen.
    """

    has_bias: bool
    scale: float


class MoeSpec(msgspec.Struct, frozen=True):
    """Mixture of experts instead of a dense feed-forward block.

    Attributes:
        experts_per_token: experts that each token is sent to.
        size: as `MlpSpec.size`, of each expert.
        norm_topk_prob: the weights of a token's experts are made to sum to 1.
        activation: as `MlpSpec.activation`, or `clamped`: see `kernels.protocol.Gate`.
        has_biases: router and experts have them.
        shared_size: as `size`, of an expert that every token is sent to; 0: absent.
        has_shared_gate: a token is sent to it as far as a gate of its own lets it.
        sigmoid: None: the scores of experts are a softmax.
        is_gated: an expert is as `MlpSpec` has it.
        has_output_bias: a bias is added to what the experts of a token give together.
        norm: of norms that the block has of its own (Gemma 4): the router and the experts take norms of the hidden
            states, and what the experts and the expert of all tokens give is normed before it is added up. None: all
            take what the layer's norm gives.
        has_scales: the weight of each expert is multiplied by a number of its own.
    """

    num_experts: int
    experts_per_token: int
    size: int
    norm_topk_prob: bool
    activation: str = "silu"
    has_biases: bool = False
    shared_size: int = 0
    has_shared_gate: bool = True
    sigmoid: SigmoidSpec | None = None
    is_gated: bool = True
    has_output_bias: bool = False
    norm: NormSpec | None = None
    has_scales: bool = False

    @property
    def active_size(self) -> int:
        """Width that one token is projected to, by all its experts."""
        return self.size * self.experts_per_token + self.shared_size

    def obstacle(self, size: int, sums: bool) -> str | None:
        """Return why `size` ranks cannot share it: each has whole experts or, of ranks that sum, a part of each."""
        if self.shared_size and (obstacle := MlpSpec(self.shared_size).obstacle(size, sums)):
            return obstacle
        if sums:
            return MlpSpec(self.size).obstacle(size, sums)
        return f"it has {self.num_experts} experts, and each is whole on a rank" if self.num_experts < size else None

    def num_parameters(self, hidden_size: int) -> int:
        """Return the number of parameters of the block, router and all experts."""
        biases = self.num_experts * (1 + 2 * self.size + hidden_size) * self.has_biases
        shared = hidden_size * (3 * self.shared_size + self.has_shared_gate) if self.shared_size else 0
        biases += hidden_size * self.has_output_bias + self.num_experts * self.has_scales
        biases += 4 * hidden_size if self.norm is not None else 0
        return self.num_experts * (self._expert_parameters(hidden_size) + hidden_size) + biases + shared

    def num_idle_parameters(self, hidden_size: int) -> int:
        """Return the number of parameters that one token does not meet: those of experts that it is not sent to."""
        return (self.num_experts - self.experts_per_token) * self._expert_parameters(hidden_size)

    def _expert_parameters(self, hidden_size: int) -> int:
        return (2 + self.is_gated) * self.size * hidden_size
