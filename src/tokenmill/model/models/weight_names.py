"""Names of a decoder's weights in checkpoints: every weight has a role, and a table turns roles into names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

LLAMA_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embedding": "model.embed_tokens",
        "attention_norm": "model.layers.{layer}.input_layernorm",
        "q": "model.layers.{layer}.self_attn.q_proj",
        "k": "model.layers.{layer}.self_attn.k_proj",
        "v": "model.layers.{layer}.self_attn.v_proj",
        "output": "model.layers.{layer}.self_attn.o_proj",
        "attention": "model.layers.{layer}.self_attn",
        "q_norm": "model.layers.{layer}.self_attn.q_norm",
        "k_norm": "model.layers.{layer}.self_attn.k_norm",
        "mlp_norm": "model.layers.{layer}.post_attention_layernorm",
        "gate": "model.layers.{layer}.mlp.gate_proj",
        "up": "model.layers.{layer}.mlp.up_proj",
        "down": "model.layers.{layer}.mlp.down_proj",
        "router": "model.layers.{layer}.mlp.gate",
        "expert_gate": "model.layers.{layer}.mlp.experts.{expert}.gate_proj",
        "expert_up": "model.layers.{layer}.mlp.experts.{expert}.up_proj",
        "expert_down": "model.layers.{layer}.mlp.experts.{expert}.down_proj",
        "final_norm": "model.norm",
        "head": "lm_head",
    }
)
"""Role of a weight -> what Llama, and most families after it, call it, without `.weight` or `.bias`."""

QWEN3_VL_NAMES: Mapping[str, str] = MappingProxyType(
    {role: name.replace("model.", "model.language_model.", 1) for role, name in LLAMA_NAMES.items()}
)
"""The same where a vision tower stands beside the decoder."""

PHI3_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **LLAMA_NAMES,
        **dict.fromkeys(("q", "k", "v"), "model.layers.{layer}.self_attn.qkv_proj"),
        **dict.fromkeys(("gate", "up"), "model.layers.{layer}.mlp.gate_up_proj"),
    }
)
"""Where projections of the same input are stored in one matrix, one behind the other."""

GPT_OSS_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **LLAMA_NAMES,
        "router": "model.layers.{layer}.mlp.router",
        **dict.fromkeys(("expert_gate", "expert_up"), "model.layers.{layer}.mlp.experts.gate_up_proj"),
        "expert_down": "model.layers.{layer}.mlp.experts.down_proj",
    }
)
"""Where the experts of a layer are stacked; see `model/weights/stacked_experts.py`."""

GEMMA3_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **LLAMA_NAMES,
        "attention_out_norm": "model.layers.{layer}.post_attention_layernorm",
        "mlp_norm": "model.layers.{layer}.pre_feedforward_layernorm",
        "mlp_out_norm": "model.layers.{layer}.post_feedforward_layernorm",
    }
)
"""Of layers whose blocks end with a norm."""

GEMMA4_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **GEMMA3_NAMES,
        "layer": "model.layers.{layer}",
        "per_layer_table": "model.embed_tokens_per_layer",
        "per_layer_projection": "model.per_layer_model_projection",
        "per_layer_norm": "model.per_layer_projection_norm",
        "per_layer_gate": "model.layers.{layer}.per_layer_input_gate",
        "per_layer_output": "model.layers.{layer}.per_layer_projection",
        "per_layer_out_norm": "model.layers.{layer}.post_per_layer_input_norm",
    }
)
"""Of layers that also have embeddings of their own."""

LFM2_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **LLAMA_NAMES,
        "attention_norm": "model.layers.{layer}.operator_norm",
        "output": "model.layers.{layer}.self_attn.out_proj",
        "q_norm": "model.layers.{layer}.self_attn.q_layernorm",
        "k_norm": "model.layers.{layer}.self_attn.k_layernorm",
        "conv_inputs": "model.layers.{layer}.conv.in_proj",
        "conv": "model.layers.{layer}.conv.conv",
        "conv_output": "model.layers.{layer}.conv.out_proj",
        "mlp_norm": "model.layers.{layer}.ffn_norm",
        "gate": "model.layers.{layer}.feed_forward.w1",
        "up": "model.layers.{layer}.feed_forward.w3",
        "down": "model.layers.{layer}.feed_forward.w2",
        "final_norm": "model.embedding_norm",
    }
)
"""Of layers some of which have a short convolution instead of attention."""

QWEN3_5_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **LLAMA_NAMES,
        "attention_gate": "model.layers.{layer}.self_attn.q_proj",
        **dict.fromkeys(("delta_q", "delta_k", "delta_v"), "model.layers.{layer}.linear_attn.in_proj_qkv"),
        "delta_z": "model.layers.{layer}.linear_attn.in_proj_z",
        "delta_b": "model.layers.{layer}.linear_attn.in_proj_b",
        "delta_a": "model.layers.{layer}.linear_attn.in_proj_a",
        "delta_filters": "model.layers.{layer}.linear_attn.conv1d",
        "delta": "model.layers.{layer}.linear_attn",
        "delta_norm": "model.layers.{layer}.linear_attn.norm",
        "delta_output": "model.layers.{layer}.linear_attn.out_proj",
    }
)
"""Of layers some of which have the delta rule instead of attention."""

QWEN3_NEXT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **QWEN3_5_NAMES,
        **dict.fromkeys(("delta_q", "delta_k", "delta_v", "delta_z"), "model.layers.{layer}.linear_attn.in_proj_qkvz"),
        **dict.fromkeys(("delta_b", "delta_a"), "model.layers.{layer}.linear_attn.in_proj_ba"),
        "shared_gate": "model.layers.{layer}.mlp.shared_expert.gate_proj",
        "shared_up": "model.layers.{layer}.mlp.shared_expert.up_proj",
        "shared_down": "model.layers.{layer}.mlp.shared_expert.down_proj",
        "shared_switch": "model.layers.{layer}.mlp.shared_expert_gate",
    }
)
"""Where projections of the same input are stored key head by key head, and one expert is every token's."""

QWEN3_5_VL_NAMES: Mapping[str, str] = MappingProxyType(
    {role: name.replace("model.", "model.language_model.", 1) for role, name in QWEN3_5_NAMES.items()}
)

GEMMA4_VL_NAMES: Mapping[str, str] = MappingProxyType(
    {role: name.replace("model.", "model.language_model.", 1) for role, name in GEMMA4_NAMES.items()}
)

GEMMA3_VL_NAMES: Mapping[str, str] = MappingProxyType(
    {role: f"language_model.{name}" for role, name in GEMMA3_NAMES.items()}
)


@dataclass(frozen=True, slots=True)
class WeightKey:
    """A weight of a decoder, independent of its name in checkpoints.

    Attributes:
        role: a key of the tables above.
        kind: `weight`, `bias`, or what follows the name otherwise, such as `sinks` or `A_log`.
    """

    role: str
    layer: int | None = None
    expert: int | None = None
    kind: str = "weight"

    def name(self, names: Mapping[str, str]) -> str:
        """Return its name by a table of names."""
        return f"{names[self.role].format(layer=self.layer, expert=self.expert)}.{self.kind}"
