"""Read the attention of a layer from a config.json: heads, their size, and how windows vary it. Knows no torch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenmill.model.architecture.architecture import SelfAttentionSpec
from tokenmill.model.architecture.rope_spec import LongRopeScaling, RopeSpec
from tokenmill.model.models.config_reader import ConfigReader


def read_attention(
    config: ConfigReader, rope: RopeSpec, *, head_dim: int | None = None, biases: bool = False
) -> SelfAttentionSpec:
    """Read plain attention to all tokens; a family replaces the fields that are otherwise.

    Args:
        head_dim: the size of a head where the config has none; None: hidden size over heads.
        biases: on all four projections.

    Raises:
        InvalidCheckpoint: numbers that do not go together; names the field.
    """
    num_heads, num_kv_heads = read_heads(config)
    head_dim = _read_head_dim(config, num_heads, head_dim)
    _check_rope(config, rope, head_dim)
    return SelfAttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope,
        qkv_bias=biases,
        output_bias=biases,
    )


def with_windows(
    attention: SelfAttentionSpec, windows: Sequence[int | None], local_rope: RopeSpec | None = None
) -> list[SelfAttentionSpec]:
    """Return the attention of each layer. `local_rope`: the rope of layers with a window; None: that of all."""
    windowed = msgspec.structs.replace(attention, rope=local_rope or attention.rope)
    return [attention if window is None else msgspec.structs.replace(windowed, window=window) for window in windows]


def read_heads(config: ConfigReader) -> tuple[int, int]:
    """Return the number of attention heads and the number of KV heads.

    Raises:
        InvalidCheckpoint: the former is no multiple of the latter.
    """
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.error(
            f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})"
        )
    return num_heads, num_kv_heads


def _read_head_dim(config: ConfigReader, num_heads: int, default: int | None) -> int:
    hidden_size = config.integer("hidden_size")
    if config.raw("head_dim") is None and default is None and hidden_size % num_heads:
        raise config.error(f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads})")
    head_dim = config.integer("head_dim", default or hidden_size // num_heads)
    if head_dim % 2:
        raise config.error(f"head_dim must be even, got {head_dim}")
    return head_dim


def _check_rope(config: ConfigReader, rope: RopeSpec, head_dim: int) -> None:
    """Check that a rope fits heads of this size."""
    rotated = rope.num_rotated(head_dim)
    if rotated % 2 or not rotated:
        raise config.error(f"partial_rotary_factor {rope.share:g} of heads of {head_dim} must leave an even number")
    if isinstance(rope.scaling, LongRopeScaling):
        for name, factors in {"short_factor": rope.scaling.short, "long_factor": rope.scaling.long}.items():
            if 2 * len(factors) != rotated:
                raise config.error(
                    f"{name} must have {rotated // 2} numbers, one for each frequency; got {len(factors)}"
                )
