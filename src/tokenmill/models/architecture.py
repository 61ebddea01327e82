"""What a decoder is made of, as plain frozen data: sizes, rotary scaling, windows, experts.

Knows neither torch nor the names that config.json gives these things (see `families`).
"""

from __future__ import annotations

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
class RopeSpec:
    """Rotary position embedding over the whole head. `scaling` None: the plain form."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Mixture of experts in the layers of `sparse_layers`; the other layers have a dense MLP.

    Attributes:
        experts_per_token: experts that each token is sent to.
        norm_topk_prob: the weights of a token's experts are made to sum to 1.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder-only transformer with RMSNorm before each block, rotary positions and a gated SiLU MLP.

    Attributes:
        name: as config.json says it, e.g. `Qwen3ForCausalLM`.
        output_bias: bias on the projection that ends an attention block.
        qk_norm: RMSNorm over each head of q and k, before the rotary embedding.
        tie_embeddings: the output head is the embedding table.
        windows: per layer, how many tokens a token attends to, itself among them; None: all before it.
        max_position: the context the model is made for, in tokens.
        eos_token_ids: as config.json has them (generation_config.json may say more).
        dtype: what the checkpoint says it is stored in, e.g. `bfloat16`; None: it does not say.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    rope: RopeSpec
    max_position: int
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    moe: MoeSpec | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None

    @property
    def q_size(self) -> int:
        """Width of the queries of one token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys, or of the values, of one token in one layer."""
        return self.num_kv_heads * self.head_dim

    def is_sparse(self, layer: int) -> bool:
        """True if the layer has experts instead of a dense MLP."""
        return self.moe is not None and layer in self.moe.sparse_layers

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of KV that one token takes, over all layers."""
        return 2 * self.num_layers * self.kv_size * bytes_per_value

    def kv_bytes_per_page(self, page_size: int, bytes_per_value: int) -> int:
        """Bytes of KV that one page of `page_size` token slots takes, over all layers."""
        return page_size * self.kv_bytes_per_token(bytes_per_value)

    def num_parameters(self) -> int:
        """Parameters of the model, tied embeddings counted once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        layers = sum(self._mlp_parameters(layer) for layer in range(self.num_layers))
        return embeddings + layers + self.num_layers * self._attention_parameters() + self.hidden_size

    def _attention_parameters(self) -> int:
        qkv = self.q_size + 2 * self.kv_size
        weights = self.hidden_size * (qkv + self.q_size)
        biases = qkv * self.qkv_bias + self.hidden_size * self.output_bias
        norms = self.hidden_size + 2 * self.head_dim * self.qk_norm
        return weights + biases + norms

    def _mlp_parameters(self, layer: int) -> int:
        if self.moe is not None and self.is_sparse(layer):
            experts = 3 * self.moe.num_experts * self.hidden_size * self.moe.intermediate_size
            return experts + self.moe.num_experts * self.hidden_size + self.hidden_size
        biases = (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        return 3 * self.hidden_size * self.intermediate_size + biases + self.hidden_size
