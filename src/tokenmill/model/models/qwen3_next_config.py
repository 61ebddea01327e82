"""Read the layers of Qwen3-Next and Qwen3.5 from their config.json. Knows no torch."""

from __future__ import annotations

from tokenmill.model.architecture.architecture import (
    DeltaNetSpec,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    SelfAttentionSpec,
)
from tokenmill.model.architecture.rope_spec import RopeSpec
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.heads_config import check_rope, read_head_dim, read_heads
from tokenmill.model.models.layer_kinds import read_kinds


def read_layers(config: ConfigReader, num_layers: int, rope: RopeSpec) -> tuple[LayerSpec, ...]:
    """Read the layers.

    Raises:
        InvalidCheckpoint: a value that is not supported; names the field.
    """
    if config.raw("hidden_act", "silu") != "silu":
        raise config.error(f"hidden_act {config.raw('hidden_act')!r} is not supported; supported: silu")
    norm = NormSpec(config.number("rms_norm_eps", 1e-6), is_offset=True)
    attention, delta_net = _attention(config, rope, norm), _delta_net(config)
    return tuple(
        LayerSpec(attention, mlp, norm)
        if kind == "full_attention"
        else LayerSpec(None, mlp, norm, recurrence=delta_net)
        for kind, mlp in zip(_kinds(config, num_layers), _mlps(config, num_layers), strict=True)
    )


def _attention(config: ConfigReader, rope: RopeSpec, norm: NormSpec) -> SelfAttentionSpec:
    if config.boolean("attention_bias", False):
        raise config.error("attention_bias true is not supported")
    num_heads, num_kv_heads = read_heads(config)
    head_dim = read_head_dim(config, num_heads, None)
    check_rope(config, rope, head_dim)
    return SelfAttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope,
        head_norm=norm,
        has_gate=True,
    )


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
        norm=NormSpec(config.number("rms_norm_eps", 1e-6)),
    )


def _kinds(config: ConfigReader, num_layers: int) -> list[str]:
    """Read the kind of each layer from `layer_types`; older configs give the distance between layers with attention."""
    if config.raw("layer_types") is not None:
        return read_kinds(config, num_layers, ("full_attention", "linear_attention"))
    interval = config.integer("full_attention_interval", 4)
    return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)]


def _mlps(config: ConfigReader, num_layers: int) -> list[MlpSpec | MoeSpec]:
    dense = MlpSpec(config.integer("intermediate_size"))
    num_experts = config.integer("num_experts", 0, low=0, high=4096)
    if num_experts == 0:
        return [dense] * num_layers
    experts_per_token = config.integer("num_experts_per_tok", 10)
    if experts_per_token > num_experts:
        raise config.error(f"num_experts_per_tok ({experts_per_token}) must not exceed num_experts ({num_experts})")
    moe = MoeSpec(
        num_experts,
        experts_per_token,
        config.integer("moe_intermediate_size", 512),
        config.boolean("norm_topk_prob", True),
        shared_size=config.integer("shared_expert_intermediate_size", 512),
    )
    step, only_dense = config.integer("decoder_sparse_step", 1), config.integers("mlp_only_layers")
    return [dense if layer in only_dense or (layer + 1) % step else moe for layer in range(num_layers)]
