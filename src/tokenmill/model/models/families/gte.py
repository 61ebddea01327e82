"""GTE as of v1.5 (Zhang et al. 2024, mGTE: gte-base-en-v1.5, gte-multilingual-base): ropes, and a block gated by GELU.

Alibaba's own code calls the model "New", transformers calls it GTE; both have the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from tokenmill.model.architecture.architecture import Architecture, LayerSpec
from tokenmill.model.architecture.input_spec import InputSpec
from tokenmill.model.architecture.mlp_spec import MlpSpec
from tokenmill.model.architecture.rope_spec import LinearScaling, RopeSpec
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.decoder_config import read_depth, refuse
from tokenmill.model.models.encoder_config import (
    GATES,
    encoder,
    read_both_ways,
    read_encoder_activation,
    read_layer_norm,
)
from tokenmill.model.models.family import Family
from tokenmill.model.models.rope_config import read_rope, rope_part


def read(config: ConfigReader) -> Architecture:
    """Read the encoder."""
    refuse(config, "logn_attention_scale", "logn_attention_clip1")
    for field, supported in {"position_embedding_type": "rope", "layer_norm_type": "layer_norm"}.items():
        if config.raw(field, supported) != supported:
            raise config.error(f"{field} {config.raw(field)!r} is not supported; supported: {supported}")
    if config.raw("pack_qkv", True) is not True:
        raise config.error("pack_qkv false is not supported: q, k and v are read from one tensor")
    num_layers, max_position = read_depth(config)
    norm = read_layer_norm(config, "layer_norm_eps")
    attention = read_both_ways(config, _read_rope(config, max_position))
    activation = read_encoder_activation(config, "hidden_act", GATES)
    mlp = MlpSpec(config.integer("intermediate_size"), False, activation, has_down_bias=True)
    layer = LayerSpec(attention, mlp, norm, has_in_norms=False, has_out_norms=True, norms_after=True)
    inputs = InputSpec(norm, None, config.integer("type_vocab_size", low=0))
    return encoder(config, [layer] * num_layers, max_position, inputs, has_final_norm=False)


def _read_rope(config: ConfigReader, max_position: int) -> RopeSpec:
    """Read the rope. Of `ntk` with factor f and heads of d: f times the base, and frequencies over f^(2/d)."""
    scaling = rope_part(config, "rope_scaling", None)
    if scaling.raw("type", scaling.raw("rope_type")) != "ntk":
        return read_rope(config, max_position)[0]
    if scaling.raw("mixed_b") is not None:
        raise scaling.error(f"mixed_b {scaling.raw('mixed_b')!r} is not supported")
    factor, theta = scaling.number("factor"), config.number("rope_theta")
    size = config.integer("hidden_size") // config.integer("num_attention_heads")
    return RopeSpec(theta * factor, LinearScaling(factor ** (2 / size))) if factor > 1 else RopeSpec(theta)


_GTE = Family(
    read=read,
    defaults={
        "vocab_size": 250048,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "max_position_embeddings": 8192,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-12,
        "rope_theta": 160000.0,
    },
    weight_names={
        "embedding": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "embedding_norm": "embeddings.LayerNorm",
        **dict.fromkeys(("q", "k", "v"), "encoder.layer.{layer}.attention.qkv_proj"),
        "output": "encoder.layer.{layer}.attention.o_proj",
        "attention_out_norm": "encoder.layer.{layer}.attn_ln",
        **dict.fromkeys(("up", "gate"), "encoder.layer.{layer}.mlp.up_gate_proj"),
        "down": "encoder.layer.{layer}.mlp.down_proj",
        "mlp_out_norm": "encoder.layer.{layer}.mlp_ln",
    },
    optional_prefix="gte.",
    other_weights=("pooler.", "lm_head.", "embeddings.position_ids"),
)
_NEW = msgspec.structs.replace(_GTE, optional_prefix="new.")

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        **dict.fromkeys(("GteModel", "GteForMaskedLM"), _GTE),
        **dict.fromkeys(("NewModel", "NewForMaskedLM"), _NEW),
    }
)
