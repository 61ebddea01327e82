"""Read the layers of LFM2 from its config.json: which have attention, and how wide the rest is. Knows no torch."""

from __future__ import annotations

from tokenmill.model.architecture.architecture import LayerSpec, MlpSpec, NormSpec, SelfAttentionSpec, ShortConvSpec
from tokenmill.model.architecture.rope_spec import RopeSpec
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.heads_config import check_rope, read_head_dim, read_heads
from tokenmill.model.models.layer_kinds import read_kinds


def read_layers(config: ConfigReader, num_layers: int, rope: RopeSpec) -> tuple[LayerSpec, ...]:
    """Read the layers.

    Raises:
        InvalidCheckpoint: a value that is not supported; names the field.
    """
    norm = NormSpec(config.number("norm_eps"))
    num_heads, num_kv_heads = read_heads(config)
    head_dim = read_head_dim(config, num_heads, None)
    check_rope(config, rope, head_dim)
    attention = SelfAttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope,
        head_norm=norm,
    )
    kernel = config.integer("conv_L_cache", 3, low=2)
    conv = ShortConvSpec(config.integer("hidden_size"), kernel, config.boolean("conv_bias", False))
    mlp = MlpSpec(_mlp_size(config))
    return tuple(
        LayerSpec(attention, mlp, norm) if has_attention else LayerSpec(None, mlp, norm, recurrence=conv)
        for has_attention in _attention_layers(config, num_layers)
    )


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
