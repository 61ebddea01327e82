"""LFM2: short convolutions instead of attention in most layers, see `models.short_conv`; experts in LFM2-MoE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from tokenmill.model.architecture.architecture import Architecture, LayerSpec
from tokenmill.model.architecture.mlp_spec import MlpSpec, MoeSpec, SigmoidSpec
from tokenmill.model.architecture.norm_spec import NormSpec
from tokenmill.model.architecture.recurrence_spec import ShortConvSpec
from tokenmill.model.models.attention_config import read_attention
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.decoder_config import decoder, read_depth, read_frame
from tokenmill.model.models.family import Family
from tokenmill.model.models.gguf_table import GGUF_NAMES, GgufHeader, GgufTable
from tokenmill.model.models.layer_kinds import read_kinds
from tokenmill.model.models.mlp_config import read_expert_counts
from tokenmill.model.models.weight_names import LLAMA_NAMES


def read(config: ConfigReader) -> Architecture:
    """Read the dense decoder."""
    num_layers, _ = read_depth(config)
    return _read(config, [MlpSpec(_mlp_size(config))] * num_layers)


def read_with_experts(config: ConfigReader) -> Architecture:
    """Read the decoder of LFM2-MoE, whose first layers are dense."""
    num_layers, _ = read_depth(config)
    num_dense = config.integer("num_dense_layers", 2, low=0)
    dense, experts = MlpSpec(config.integer("intermediate_size")), _read_experts(config)
    return _read(config, [dense if layer < num_dense else experts for layer in range(num_layers)])


def _read(config: ConfigReader, mlps: Sequence[MlpSpec | MoeSpec]) -> Architecture:
    frame, norm = read_frame(config), NormSpec(config.number("norm_eps"))
    attention = msgspec.structs.replace(read_attention(config, frame.rope), head_norm=norm)
    kernel = config.integer("conv_L_cache", 3, low=2)
    conv = ShortConvSpec(config.integer("hidden_size"), kernel, config.boolean("conv_bias", False))
    kinds = zip(_attention_layers(config, frame.num_layers), mlps, strict=True)
    layers = [
        LayerSpec(attention, mlp, norm) if has_attention else LayerSpec(None, mlp, norm, recurrence=conv)
        for has_attention, mlp in kinds
    ]
    return decoder(config, layers, frame.max_position)


def _read_experts(config: ConfigReader) -> MoeSpec:
    """Read a block of experts, chosen by sigmoids and a bias, and weighed by the sigmoids."""
    num_experts, chosen = read_expert_counts(config, 32, 4)
    sigmoid = SigmoidSpec(config.boolean("use_expert_bias", True), config.number("routed_scaling_factor", 1.0))
    size = config.integer("moe_intermediate_size")
    return MoeSpec(num_experts, chosen, size, config.boolean("norm_topk_prob", True), sigmoid=sigmoid)


def _attention_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    """Read which layers have attention: from `layer_types`, or from the list of their numbers in older configs."""
    if config.raw("layer_types") is not None:
        return [kind == "full_attention" for kind in read_kinds(config, num_layers, ("full_attention", "conv"))]
    if config.raw("full_attn_idxs") is None:
        return [True] * num_layers
    chosen = config.integers("full_attn_idxs")
    return [layer in chosen for layer in range(num_layers)]


def _mlp_size(config: ConfigReader) -> int:
    """Return the width that `intermediate_size` means: two thirds of it, times a factor, rounded up to whole blocks."""
    size = config.integer("block_ff_dim", config.integer("intermediate_size"))
    if not config.boolean("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if config.raw("block_ffn_dim_multiplier", 1.0) is None:
        return size
    size, block = int(config.number("block_ffn_dim_multiplier", 1.0) * size), config.integer("block_multiple_of", 256)
    return -(-size // block) * block


def _gguf_fields(header: GgufHeader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return which layers have attention, those with KV heads, and the width, which is the one that was adjusted."""
    kind, heads = header.metadata.get("general.architecture"), list(fields.get("num_key_value_heads", []))
    return {
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "num_key_value_heads": int(max(heads, default=0)),
        "conv_L_cache": header.metadata.get(f"{kind}.shortconv.l_cache"),
        "num_dense_layers": header.metadata.get(f"{kind}.leading_dense_block_count"),
        "routed_scaling_factor": header.metadata.get(f"{kind}.expert_weights_scale"),
        "block_auto_adjust_ff_dim": False,
        "norm_eps": fields.get("rms_norm_eps"),
    }


GGUF: Mapping[str, str] = MappingProxyType(
    {
        **GGUF_NAMES,
        "conv_inputs": "blk.{layer}.shortconv.in_proj",
        "conv": "blk.{layer}.shortconv.conv",
        "conv_output": "blk.{layer}.shortconv.out_proj",
        "final_norm": "token_embd_norm",
    }
)
"""Role of a weight -> its name in a GGUF file."""
_DENSE = Family(
    read=read,
    defaults={
        "vocab_size": 65536,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    weight_names={
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
        "router": "model.layers.{layer}.feed_forward.gate",
        "experts": "model.layers.{layer}.feed_forward",
        "expert_gate": "model.layers.{layer}.feed_forward.experts.{expert}.w1",
        "expert_up": "model.layers.{layer}.feed_forward.experts.{expert}.w3",
        "expert_down": "model.layers.{layer}.feed_forward.experts.{expert}.w2",
        "final_norm": "model.embedding_norm",
    },
    gguf=GgufTable("lfm2", GGUF, fields=_gguf_fields),
)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Lfm2ForCausalLM": _DENSE,
        "Lfm2MoeForCausalLM": msgspec.structs.replace(
            _DENSE,
            read=read_with_experts,
            defaults={
                **_DENSE.defaults,
                "hidden_size": 2048,
                "intermediate_size": 7168,
                "moe_intermediate_size": 1792,
            },
            gguf=GgufTable("lfm2moe", GGUF, kinds={"expert_bias": "exp_probs_b.bias"}, fields=_gguf_fields),
        ),
    }
)
