"""A decoder as plain frozen data: a specification of every layer, and of the parts around the layers.

Knows neither torch nor the names that config.json gives these things (see `families`). A layer is specified here and
nowhere else: the parts of `Layer`, the attention and the native pass are all built from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from tokenmill.model.architecture.draft_head_spec import DraftHeadSpec
from tokenmill.model.architecture.input_spec import InputSpec
from tokenmill.model.architecture.mlp_spec import ExpertStack, MlpSpec, MoeSpec
from tokenmill.model.architecture.norm_spec import NormSpec
from tokenmill.model.architecture.recurrence_spec import RecurrenceSpec
from tokenmill.model.architecture.rope_spec import LongRopeScaling, RopeSpec


class SelfAttentionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Attention of one layer, causal unless `ahead` says more.

    Attributes:
        scale: factor on q.k before the softmax.
        rope: the rotary embedding of q and k; None: the layer does not know the positions of its tokens.
        window: how many tokens up to itself a token attends to; None: all before it.
        ahead: how many tokens after it a token attends to; None: all that follow.
        head_norm: over each head of q and k, before the rotary embedding; None: absent.
        joint_norm: over all heads of q together, and over those of k, before the rotary embedding; None: absent.
        output_bias: bias on the projection that ends the block.
        has_sinks: each head has a sink; see `AttentionLayer.sinks`.
        norms_values: each head of v is normed, too, by a norm without a weight.
        in_window_group: its KV is in pages that go when they lie behind the window.
        kv_from: the layer whose keys and values it attends to, having none of its own; None: it has its own.
        has_gate: its output is multiplied by the sigmoid of another projection, whose rows stand behind those of q,
            head by head.
        num_inputs: vectors of the hidden size that it takes side by side.
        first_key: no token attends to what lies before this position.
        has_key_bias: where q and v have biases, the keys have one, too.
        has_alibi: scores fall with the distance between tokens; see `AttentionLayer.slopes`.
        values_are_keys: there is no projection to values: they are the keys, before their norm and rotary embedding.
        spans_see_ahead: the tokens of one image see each other, before and after.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    window: int | None = None
    head_norm: NormSpec | None = None
    joint_norm: NormSpec | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    has_sinks: bool = False
    norms_values: bool = False
    kv_from: int | None = None
    has_gate: bool = False
    in_window_group: bool = False
    num_inputs: int = 1
    first_key: int = 0
    ahead: int | None = 0
    has_key_bias: bool = True
    has_alibi: bool = False
    values_are_keys: bool = False
    spans_see_ahead: bool = False

    @property
    def q_size(self) -> int:
        """Width of the queries of one token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys, or of the values, of one token; 0 where these are another layer's."""
        return 0 if self.kv_from is not None else self.num_kv_heads * self.head_dim

    @property
    def widest(self) -> int:
        """Numbers of a token between its projections."""
        return 2 * (self.q_size + self.kv_size) + self.q_size * self.has_gate

    def obstacle(self, size: int) -> str | None:
        """Return why `size` ranks cannot share it, each with some of its heads; None: they can."""
        if self.joint_norm is not None and size > 1:
            return "its norms of q and k are over the heads of all ranks"
        if self.num_heads % size or (self.num_kv_heads % size and size % self.num_kv_heads):
            return f"its {self.num_heads} query heads and {self.num_kv_heads} KV heads cannot be shared evenly"
        return None

    def num_parameters(self, hidden_size: int) -> int:
        """Return the number of parameters of the block."""
        qkv = self.q_size + (2 - self.values_are_keys) * self.kv_size
        num_norms = 0 if self.head_norm is None else 2 if self.kv_from is None else 1
        rest = num_norms * self.head_dim + self.num_heads * self.has_sinks
        rest += 0 if self.joint_norm is None else self.joint_norm.num_parameters(self.q_size + self.kv_size)
        qkv += self.q_size * self.has_gate
        projections = hidden_size * (qkv * self.num_inputs + self.q_size)
        biases = (qkv - self.kv_size * (not self.has_key_bias)) * self.qkv_bias + hidden_size * self.output_bias
        return projections + biases + rest


class PerLayerSpec(msgspec.Struct, frozen=True):
    """Embeddings that each layer has of its own; see `models.per_layer`.

    Attributes:
        size: of one layer's.
        vocab_size: rows of their table.
    """

    size: int
    vocab_size: int


class LayerSpec(msgspec.Struct, frozen=True):
    """One layer: attention, then a feed-forward block, each between norms and added to its input.

    Attributes:
        attention: None: `recurrence` stands in its place.
        norm: the form of its norms.
        has_in_norms: the input of each block goes through one.
        has_out_norms: the output of each block goes through one.
        norms_after: it is the sum of output and input of a block that goes through one, and is all that goes on (BERT).
        norms_attention_input: False where the attention's input goes through none, though that of the other block does.
        residual_multiplier: factor on the output of a block.
        per_layer_size: of the embedding that a third block takes; 0: absent.
        has_scalar: the layer's output is multiplied by a number that is a weight.
        takes_pair: its attention takes the norm of a token's embedding beside that of the hidden states (draft heads).
        begins_normed: of such a layer: its blocks add to the latter norm instead of the hidden states.
        crosses: a block between both attends to the clip that stands before its attention's `first_key`; its heads are
            those of the attention.
        norms_attention_twice: of a layer that `norms_after`: the attention's input is added to the norm behind it once
            more, and this sum goes through another one.
    """

    attention: SelfAttentionSpec | None
    mlp: MlpSpec | MoeSpec
    norm: NormSpec
    residual_multiplier: float = 1.0
    has_in_norms: bool = True
    has_out_norms: bool = False
    per_layer_size: int = 0
    has_scalar: bool = False
    recurrence: RecurrenceSpec | None = None
    takes_pair: bool = False
    begins_normed: bool = False
    norms_after: bool = False
    norms_attention_input: bool = True
    crosses: bool = False
    norms_attention_twice: bool = False

    @property
    def mixer(self) -> SelfAttentionSpec | RecurrenceSpec:
        """The block that mixes the tokens of a request: attention or a recurrence."""
        mixer = self.attention or self.recurrence
        assert mixer is not None, "a layer has attention, or what stands in its place"
        return mixer

    def num_parameters(self, hidden_size: int) -> int:
        """Return the number of parameters of the layer, without its scalar, which is not trained."""
        count = self.has_in_norms * (1 + self.norms_attention_input) + 2 * self.has_out_norms
        norms = (count + self.takes_pair + self.norms_attention_twice) * self.norm.num_parameters(hidden_size)
        third = (2 * self.per_layer_size + 1) * hidden_size if self.per_layer_size else 0
        mixer = self.mixer.num_parameters(hidden_size)
        across = (mixer + self.norm.num_parameters(hidden_size)) * self.crosses
        return mixer + across + self.mlp.num_parameters(hidden_size) + norms + third


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer: embedding, layers, final norm and output head; or an encoder.

    Attributes:
        name: as config.json says it, e.g. `Qwen3ForCausalLM`.
        weight_names: names of the weights in checkpoints; see `models.weight_names`.
        norm: the final one. has_final_norm: False: the last layer's output is the model's.
        inputs: what is added to the embeddings, and their norm; None: nothing, and none.
        has_head: False: no logits are computed, the model gives vectors alone.
        takes_images: a vision tower stands beside it. takes_sound: an encoder of sound does.
        expert_stack: how checkpoints may store all experts of a layer in one tensor; None: each has tensors of its own.
        other_weights: name prefixes of weights that are not the decoder's.
        optional_prefix: of the names of all weights, where a checkpoint has it.
        draft_head: it is an EAGLE-3 head; None: a model.
        tie_embeddings: the output head is the embedding table.
        embedding_multiplier: factor on the embeddings. rounds_multiplier: it is rounded to the model's dtype.
        logits_scaling: logits are divided by it.
        logits_cap: bound that tanh keeps logits below; None: absent.
        per_layer: None: there are no such embeddings.
        max_position: the context the model is made for, in tokens.
        eos_token_ids: as config.json has them (generation_config.json may say more).
        dtype: format that the checkpoint declares, e.g. `bfloat16`; None: it declares none.
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
    takes_sound: bool = False
    expert_stack: ExpertStack | None = None
    other_weights: tuple[str, ...] = ()
    draft_head: DraftHeadSpec | None = None
    inputs: InputSpec | None = None
    has_final_norm: bool = True
    has_head: bool = True
    optional_prefix: str = ""

    def for_context(self, num_tokens: int) -> Architecture:
        """Return the architecture for requests of at most this many tokens; LongRoPE's factors depend on it."""
        return msgspec.structs.replace(self, layers=tuple(_for_context(layer, num_tokens) for layer in self.layers))

    def without_media(self) -> Architecture:
        """Return the architecture of the decoder alone, without what stands beside it."""
        return msgspec.structs.replace(self, takes_images=False, takes_sound=False)

    def with_window_group(self) -> Architecture:
        """Return the architecture with windowed layers' KV in pages of their own, which go behind the window."""
        return msgspec.structs.replace(self, layers=tuple(_in_group(layer) for layer in self.layers))

    @property
    def widest_window(self) -> int:
        """Most tokens that layers of the window group attend to; 0: there is no such group."""
        attentions = [attention for attention in self.attentions if attention.in_window_group]
        return max((attention.window or 0 for attention in attentions), default=0)

    @property
    def attentions(self) -> tuple[SelfAttentionSpec, ...]:
        """Attention of each layer that has it."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def clip_length(self) -> int:
        """Positions of the clip that each request begins with, for layers that attend to it; 0: there is none."""
        return max((layer.attention.first_key for layer in self.layers if layer.crosses and layer.attention), default=0)

    @property
    def needs_kv(self) -> bool:
        """True if tokens of later steps attend to those of earlier ones; else a request is whole in a step."""
        return all(attention.ahead == 0 for attention in self.attentions)

    @property
    def spans_see_ahead(self) -> bool:
        """True if the tokens of one image see each other, in some layers: it is then computed in one step."""
        return self.takes_images and any(attention.spans_see_ahead for attention in self.attentions)

    @property
    def recurrences(self) -> tuple[RecurrenceSpec, ...]:
        """Recurrence of each layer without attention, in the order in which their states lie in memory."""
        return tuple(layer.recurrence for layer in self.layers if layer.recurrence is not None)

    def state_bytes(self, bytes_per_value: int) -> int:
        """Return the bytes of state that layers keep for one request, besides KV."""
        parts = [part for recurrence in self.recurrences for part in recurrence.state]
        return sum(math.prod(part.shape) * (4 if part.is_wide else bytes_per_value) for part in parts)

    @property
    def context_form(self) -> str:
        """The form that `for_context` chose, if there is a choice: KV of one form is not valid for another."""
        ropes = (attention.rope for attention in self.attentions)
        forms = {rope.scaling.is_long for rope in ropes if rope and isinstance(rope.scaling, LongRopeScaling)}
        return ("short", "long")[forms.pop()] if forms else ""

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Return the bytes of KV that one token takes, over all layers."""
        return sum(2 * attention.kv_size * bytes_per_value for attention in self.attentions)

    def num_parameters(self) -> int:
        """Return the number of parameters of the model, tied embeddings counted once."""
        embeddings = self.vocab_size * self.hidden_size * (2 if self.has_head and not self.tie_embeddings else 1)
        embeddings += 0 if self.inputs is None else self.inputs.num_parameters(self.hidden_size)
        if (head := self.draft_head) is not None:
            rows = self.vocab_size * head.has_embedding + head.vocab_size * head.has_head
            embeddings = rows * self.hidden_size + head.num_parameters(self.hidden_size)
        layers = sum(layer.num_parameters(self.hidden_size) for layer in self.layers)
        width = 0 if self.per_layer is None else len(self.layers) * self.per_layer.size
        given = 0 if self.per_layer is None else width * self.hidden_size + self.per_layer.size
        norm = self.norm.num_parameters(self.hidden_size) if self.has_final_norm else 0
        return embeddings + layers + norm + given + self.num_mapped_parameters

    @property
    def num_mapped_parameters(self) -> int:
        """Number of parameters that are not loaded: the per-layer embeddings' table, read by rows from its file."""
        return 0 if self.per_layer is None else len(self.layers) * self.per_layer.size * self.per_layer.vocab_size


def _in_group(layer: LayerSpec) -> LayerSpec:
    if layer.attention is None or layer.attention.window is None:
        return layer
    return msgspec.structs.replace(layer, attention=msgspec.structs.replace(layer.attention, in_window_group=True))


def _for_context(layer: LayerSpec, num_tokens: int) -> LayerSpec:
    rope = None if layer.attention is None else layer.attention.rope
    if layer.attention is None or rope is None or not isinstance(rope.scaling, LongRopeScaling):
        return layer
    scaling = msgspec.structs.replace(rope.scaling, is_long=num_tokens > rope.scaling.original_max_position)
    attention = msgspec.structs.replace(layer.attention, rope=msgspec.structs.replace(rope, scaling=scaling))
    return msgspec.structs.replace(layer, attention=attention)
