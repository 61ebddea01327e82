"""Qwen3.5, Qwen3.5-MoE and Qwen3-Next: the gated delta rule in three of four layers, attention that a sigmoid gates.

The delta rule is `models.delta_net`. Those with experts send every token to one of its own kind besides those of the
router. Qwen3-Next stores projections of one input key head by key head, and Qwen3.5-MoE stacks experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from tokenmill.model.architecture.architecture import Architecture, LayerSpec, SelfAttentionSpec
from tokenmill.model.architecture.mlp_spec import MoeSpec
from tokenmill.model.architecture.norm_spec import NormSpec
from tokenmill.model.architecture.recurrence_spec import DeltaNetSpec
from tokenmill.model.architecture.rope_spec import RopeSpec
from tokenmill.model.models.attention_config import read_attention
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.decoder_config import decoder, read_frame, read_norm
from tokenmill.model.models.family import Family
from tokenmill.model.models.gguf_table import (
    GGUF_NAMES,
    UNCHANGED,
    Change,
    GgufHeader,
    GgufTable,
    num_drafting_layers,
)
from tokenmill.model.models.layer_kinds import read_kinds
from tokenmill.model.models.mlp_config import read_sparse_mlps
from tokenmill.model.models.weight_names import (
    LLAMA_NAMES,
    LLAMA_STACK,
    WeightKey,
    beside_a_tower,
    stack_beside_a_tower,
)

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
        "shared_gate": "model.layers.{layer}.mlp.shared_expert.gate_proj",
        "shared_up": "model.layers.{layer}.mlp.shared_expert.up_proj",
        "shared_down": "model.layers.{layer}.mlp.shared_expert.down_proj",
        "shared_switch": "model.layers.{layer}.mlp.shared_expert_gate",
    }
)

QWEN3_NEXT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **QWEN3_5_NAMES,
        **dict.fromkeys(("delta_q", "delta_k", "delta_v", "delta_z"), "model.layers.{layer}.linear_attn.in_proj_qkvz"),
        **dict.fromkeys(("delta_b", "delta_a"), "model.layers.{layer}.linear_attn.in_proj_ba"),
    }
)


def read(config: ConfigReader) -> Architecture:
    """Read the decoder."""
    frame, norm = read_frame(config, may_rotate_partly=True), read_norm(config, is_offset=True)
    attention, delta_net = _attention(config, frame.rope, norm), _delta_net(config)
    mlps = read_sparse_mlps(config, frame.num_layers, _read_experts)
    layers = [
        LayerSpec(attention, mlp, norm)
        if kind == "full_attention"
        else LayerSpec(None, mlp, norm, recurrence=delta_net)
        for kind, mlp in zip(_kinds(config, frame.num_layers), mlps, strict=True)
    ]
    return decoder(config, layers, frame.max_position)


def _attention(config: ConfigReader, rope: RopeSpec, norm: NormSpec) -> SelfAttentionSpec:
    if config.boolean("attention_bias", False):
        raise config.error("attention_bias true is not supported")
    return msgspec.structs.replace(read_attention(config, rope), head_norm=norm, has_gate=True)


def _delta_net(config: ConfigReader) -> DeltaNetSpec:
    num_keys = config.integer("linear_num_key_heads", 16)
    num_values = config.integer("linear_num_value_heads", 32)
    if num_values % num_keys:
        raise config.error(
            f"linear_num_value_heads ({num_values}) must be a multiple of linear_num_key_heads ({num_keys})"
        )
    return DeltaNetSpec(
        num_key_heads=num_keys,
        num_value_heads=num_values,
        key_size=config.integer("linear_key_head_dim", 128),
        value_size=config.integer("linear_value_head_dim", 128),
        kernel=config.integer("linear_conv_kernel_dim", 4, low=2),
        norm=read_norm(config),
    )


def _kinds(config: ConfigReader, num_layers: int) -> list[str]:
    """Read the kind of each layer from `layer_types`; older configs give the distance between layers with attention."""
    if config.raw("layer_types") is not None:
        return read_kinds(config, num_layers, ("full_attention", "linear_attention"))
    interval = config.integer("full_attention_interval", 4)
    return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)]


def _read_experts(config: ConfigReader, num_experts: int, experts_per_token: int) -> MoeSpec:
    return MoeSpec(
        num_experts,
        experts_per_token,
        config.integer("moe_intermediate_size"),
        config.boolean("norm_topk_prob", True),
        shared_size=config.integer("shared_expert_intermediate_size", 512),
    )


def _gguf_fields(header: GgufHeader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of the delta rule, by names of state spaces, and how much of a head turns."""
    keys = {
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
        "linear_key_head_dim": "ssm.state_size",
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "full_attention_interval": "full_attention_interval",
    }
    kind = header.metadata.get("general.architecture")
    sizes = {field: header.metadata.get(f"{kind}.{key}") for field, key in keys.items()}
    inner, heads = header.metadata.get(f"{kind}.ssm.inner_size"), sizes["linear_num_value_heads"]
    if inner and heads:
        sizes["linear_value_head_dim"] = inner // heads
    rotated, head_dim = header.metadata.get(f"{kind}.rope.dimension_count"), fields.get("head_dim")
    if rotated and head_dim:
        sizes["partial_rotary_factor"] = rotated / head_dim
    return {
        "num_hidden_layers": fields["num_hidden_layers"] - num_drafting_layers(header),
        **{field: size for field, size in sizes.items() if size is not None},
    }


def _gguf_change(key: WeightKey, num_rows: int, architecture: Architecture) -> Change | None:
    """Return the change of a weight with value heads: those of a key head lie as far apart as there are key heads.

    |key head 0, 1st value head|key head 1, 1st|...|key head 0, 2nd|key head 1, 2nd|...
    """
    spec = None if key.layer is None else architecture.layers[key.layer].recurrence
    if not isinstance(spec, DeltaNetSpec) or not key.role.startswith("delta"):
        return None
    num_keys, group = spec.num_key_heads, spec.num_value_heads // spec.num_key_heads
    places = [which * num_keys + head for head in range(num_keys) for which in range(group)]
    values = [spec.value_size * place + row for place in places for row in range(spec.value_size)]
    if key.role in ("delta_v", "delta_z"):
        return Change(rows=values)
    if key.role in ("delta_a", "delta_b") or key.kind == "dt_bias":
        return Change(rows=places)
    if key.kind == "A_log":
        return Change(rows=places, is_negative_exponential=True)
    if key.role == "delta_filters":
        before = 2 * spec.keys_width
        return Change(rows=[*range(before), *(before + row for row in values)])
    return Change(columns=values) if key.role == "delta_output" else UNCHANGED


_GGUF = GgufTable(
    "qwen35",
    {
        **GGUF_NAMES,
        "attention_gate": "blk.{layer}.attn_q",
        **dict.fromkeys(("delta_q", "delta_k", "delta_v"), "blk.{layer}.attn_qkv"),
        "delta_z": "blk.{layer}.attn_gate",
        "delta_b": "blk.{layer}.ssm_beta",
        "delta_a": "blk.{layer}.ssm_alpha",
        "delta_filters": "blk.{layer}.ssm_conv1d",
        "delta_norm": "blk.{layer}.ssm_norm",
        "delta_output": "blk.{layer}.ssm_out",
        "mlp_norm": "blk.{layer}.post_attention_norm",
        "shared_gate": "blk.{layer}.ffn_gate_shexp",
        "shared_up": "blk.{layer}.ffn_up_shexp",
        "shared_down": "blk.{layer}.ffn_down_shexp",
        "shared_switch": "blk.{layer}.ffn_gate_inp_shexp",
    },
    kinds={"A_log": "ssm_a", "dt_bias": "ssm_dt.bias"},
    fields=_gguf_fields,
    change=_gguf_change,
)
_QWEN3_5 = Family(
    read=read,
    defaults={
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "num_experts": 0,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
    },
    weight_names=QWEN3_5_NAMES,
    other_weights=("mtp.", "model.visual."),
    gguf=_GGUF,
)

_QWEN3_5_MOE = msgspec.structs.replace(
    _QWEN3_5,
    defaults={
        **_QWEN3_5.defaults,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    expert_stack=LLAMA_STACK,
    gguf=msgspec.structs.replace(_GGUF, name="qwen35moe"),
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Qwen3_5ForCausalLM": _QWEN3_5,
        "Qwen3_5ForConditionalGeneration": msgspec.structs.replace(
            _QWEN3_5, has_text_config=True, weight_names=beside_a_tower(QWEN3_5_NAMES), gguf=None
        ),
        "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
        "Qwen3_5MoeForConditionalGeneration": msgspec.structs.replace(
            _QWEN3_5_MOE,
            has_text_config=True,
            weight_names=beside_a_tower(QWEN3_5_NAMES),
            expert_stack=stack_beside_a_tower(LLAMA_STACK),
            gguf=None,
        ),
        "Qwen3NextForCausalLM": msgspec.structs.replace(
            _QWEN3_5,
            defaults={
                **_QWEN3_5.defaults,
                "vocab_size": 151936,
                "hidden_size": 2048,
                "intermediate_size": 5632,
                "num_hidden_layers": 48,
                "num_key_value_heads": 2,
                "num_experts": 512,
            },
            weight_names=QWEN3_NEXT_NAMES,
            other_weights=("mtp.",),
            gguf=None,
        ),
    }
)
