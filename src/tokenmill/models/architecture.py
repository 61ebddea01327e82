"""What a decoder is made of, as plain frozen data: a specification of every layer, and what is around the layers.

Knows neither torch nor the names that config.json gives these things (see `families`). What a layer is stands here and
nowhere else: the parts of `Layer`, the attention and the native pass are made of it, once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Rotary frequencies divided by `factor` (position interpolation)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """The scaling of Llama 3.1: long wavelengths are divided by `factor`, short ones kept, a ramp between them.

    Attributes:
        original_max_position: context of the pretraining, in tokens; wavelengths are judged against it.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): a ramp between interpolated and kept frequencies, and a factor on cos and sin.

    Attributes:
        beta_fast, beta_slow: rotations over the original context where the ramp begins and ends.
        attention_factor: multiplies cos and sin.
        truncate: the ends of the ramp are rounded to whole dimensions.
    """

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024): each frequency divided by a factor of its own, and a factor on cos and sin.

    Attributes:
        short, long: the factors for contexts up to that of the pretraining, and for longer ones.
        original_max_position: context of the pretraining, in tokens.
        is_long: which of the two are taken. All requests have the same, so that their KV can be shared.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    attention_factor: float
    is_long: bool

    @property
    def factors(self) -> tuple[float, ...]:
        """Those that are taken."""
        return self.long if self.is_long else self.short


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """The first `share` of a head's pairs turn, as fast as if all did, over `factor`; the others stay (Gemma 4)."""

    share: float
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding.

    Attributes:
        scaling: None: the plain form.
        share: of each head that turns, its first numbers.
    """

    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | ProportionalScaling | None = None
    share: float = 1.0

    def num_rotated(self, head_dim: int) -> int:
        """How many numbers of a head turn."""
        return int(head_dim * self.share)


@dataclass(frozen=True, slots=True)
class NormSpec:
    """An RMSNorm. `is_offset`: its weight is what is added to 1 (Gemma)."""

    eps: float
    is_offset: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfAttentionSpec:
    """Causal attention of one layer.

    Attributes:
        scale: factor on q.k before the softmax.
        rope: how positions turn q and k; None: the layer is not told where its tokens stand.
        window: how many tokens a token attends to, itself among them; None: all before it.
        head_norm: over each head of q and k, before the rotary embedding; None: there is none.
        output_bias: bias on the projection that ends the block.
        has_sinks: each head has a sink; see `AttentionLayer.sinks`.
        norms_values: each head of v is normed, too, by a norm without a weight.
        kv_from: the layer whose keys and values it attends to, having none of its own; None: it has its own.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    window: int | None = None
    head_norm: NormSpec | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    has_sinks: bool = False
    norms_values: bool = False
    kv_from: int | None = None

    @property
    def q_size(self) -> int:
        """Width of the queries of one token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys, or of the values, of one token; 0 where these are another layer's."""
        return 0 if self.kv_from is not None else self.num_kv_heads * self.head_dim

    def num_parameters(self, hidden_size: int) -> int:
        """Parameters of the block."""
        qkv = self.q_size + 2 * self.kv_size
        num_norms = 0 if self.head_norm is None else 2 if self.kv_from is None else 1
        rest = num_norms * self.head_dim + self.num_heads * self.has_sinks
        return hidden_size * (qkv + self.q_size) + qkv * self.qkv_bias + hidden_size * self.output_bias + rest


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """A dense feed-forward block: a gated pair of projections to `size` and one back.

    Attributes:
        activation: of the gate, `silu`, or `gelu` with tanh.
    """

    size: int
    bias: bool = False
    activation: str = "silu"

    @property
    def active_size(self) -> int:
        """Width of what one token is projected to."""
        return self.size

    def num_parameters(self, hidden_size: int) -> int:
        """Parameters of the block."""
        return 3 * hidden_size * self.size + (2 * self.size + hidden_size) * self.bias


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Mixture of experts instead of a dense feed-forward block.

    Attributes:
        experts_per_token: experts that each token is sent to.
        size: as `MlpSpec.size`, of each expert.
        norm_topk_prob: the weights of a token's experts are made to sum to 1.
        activation: as `MlpSpec.activation`, or `clamped`: see `kernels.protocol.Gate`.
        has_biases: router and experts have them.
    """

    num_experts: int
    experts_per_token: int
    size: int
    norm_topk_prob: bool
    activation: str = "silu"
    has_biases: bool = False

    @property
    def active_size(self) -> int:
        """Width of what one token is projected to, by all its experts."""
        return self.size * self.experts_per_token

    def num_parameters(self, hidden_size: int) -> int:
        """Parameters of the block, router and all experts."""
        biases = self.num_experts * (1 + 2 * self.size + hidden_size) * self.has_biases
        return self.num_experts * hidden_size * (3 * self.size + 1) + biases


@dataclass(frozen=True, slots=True)
class PerLayerSpec:
    """Embeddings that each layer has for itself; see `models.per_layer`.

    Attributes:
        size: of one layer's.
        vocab_size: rows of their table.
    """

    size: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: attention, then a feed-forward block, each after a norm and added to its input.

    Attributes:
        norm: before each block.
        has_out_norms: what a block adds goes through such a norm, too.
        residual_multiplier: of what a block adds.
        per_layer_size: of the embedding that a third block takes; 0: there is none.
        has_scalar: the layer's output is multiplied by a number that is a weight.
    """

    attention: SelfAttentionSpec
    mlp: MlpSpec | MoeSpec
    norm: NormSpec
    residual_multiplier: float = 1.0
    has_out_norms: bool = False
    per_layer_size: int = 0
    has_scalar: bool = False

    def num_parameters(self, hidden_size: int) -> int:
        """Parameters of the layer; its scalar, which is not trained, is none."""
        norms = (4 if self.has_out_norms else 2) * hidden_size
        third = (2 * self.per_layer_size + 1) * hidden_size if self.per_layer_size else 0
        return self.attention.num_parameters(hidden_size) + self.mlp.num_parameters(hidden_size) + norms + third


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder-only transformer: embedding, layers, final RMSNorm and output head.

    Attributes:
        name: as config.json says it, e.g. `Qwen3ForCausalLM`.
        weight_names: what checkpoints call the weights; see `models.weight_names`.
        norm: the final one.
        takes_images: a vision tower stands beside it.
        stacks_experts: checkpoints store all experts of a layer in one tensor.
        other_weights: what the names of weights begin with that are not the decoder's.
        tie_embeddings: the output head is the embedding table.
        embedding_multiplier: of the embeddings that enter the first layer. rounds_multiplier: to the model's dtype.
        logits_scaling: logits are divided by it.
        logits_cap: they are bent towards at most this, by tanh; None: they are not.
        per_layer: None: there are no such embeddings.
        max_position: the context the model is made for, in tokens.
        eos_token_ids: as config.json has them (generation_config.json may say more).
        dtype: what the checkpoint says it is stored in, e.g. `bfloat16`; None: it does not say.
    """

    name: str
    weight_names: Mapping[str, str]
    layers: tuple[LayerSpec, ...]
    hidden_size: int
    vocab_size: int
    norm: NormSpec
    max_position: int
    tie_embeddings: bool = False
    embedding_multiplier: float = 1.0
    rounds_multiplier: bool = False
    logits_scaling: float = 1.0
    logits_cap: float | None = None
    per_layer: PerLayerSpec | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None
    takes_images: bool = False
    stacks_experts: bool = False
    other_weights: tuple[str, ...] = ()

    def for_context(self, num_tokens: int) -> Architecture:
        """The same for requests of at most so many tokens: LongRoPE has factors for the context of the pretraining."""
        return dataclasses.replace(self, layers=tuple(_for_context(layer, num_tokens) for layer in self.layers))

    @property
    def context_form(self) -> str:
        """What `for_context` has chosen, where there is a choice: KV of one form is none of another."""
        ropes = (layer.attention.rope for layer in self.layers)
        forms = {rope.scaling.is_long for rope in ropes if rope and isinstance(rope.scaling, LongRopeScaling)}
        return ("short", "long")[forms.pop()] if forms else ""

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of KV that one token takes, over all layers."""
        return sum(2 * layer.attention.kv_size * bytes_per_value for layer in self.layers)

    def num_parameters(self) -> int:
        """Parameters of the model, tied embeddings counted once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        layers = sum(layer.num_parameters(self.hidden_size) for layer in self.layers)
        width = 0 if self.per_layer is None else len(self.layers) * self.per_layer.size
        given = 0 if self.per_layer is None else width * self.hidden_size + self.per_layer.size
        return embeddings + layers + self.hidden_size + given + self.num_mapped_parameters

    @property
    def num_mapped_parameters(self) -> int:
        """Of these, what is not loaded: the table of per-layer embeddings, read by rows where its file is mapped."""
        return 0 if self.per_layer is None else len(self.layers) * self.per_layer.size * self.per_layer.vocab_size


def _for_context(layer: LayerSpec, num_tokens: int) -> LayerSpec:
    rope = layer.attention.rope
    if rope is None or not isinstance(rope.scaling, LongRopeScaling):
        return layer
    scaling = dataclasses.replace(rope.scaling, is_long=num_tokens > rope.scaling.original_max_position)
    attention = dataclasses.replace(layer.attention, rope=dataclasses.replace(rope, scaling=scaling))
    return dataclasses.replace(layer, attention=attention)
