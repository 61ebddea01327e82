"""Read the number and the size of attention heads from a config.json. Knows no torch."""

from __future__ import annotations

from tokenmill.model.architecture.rope_spec import LongRopeScaling, RopeSpec
from tokenmill.model.models.config_reader import ConfigReader


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


def read_head_dim(config: ConfigReader, num_heads: int, default: int | None) -> int:
    """Return the size of a head. `default`: the size where the config has none; None: hidden size over heads.

    Raises:
        InvalidCheckpoint: it is odd, or no whole number.
    """
    hidden_size = config.integer("hidden_size")
    if config.raw("head_dim") is None and default is None and hidden_size % num_heads:
        raise config.error(f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads})")
    head_dim = config.integer("head_dim", default or hidden_size // num_heads)
    if head_dim % 2:
        raise config.error(f"head_dim must be even, got {head_dim}")
    return head_dim


def check_rope(config: ConfigReader, rope: RopeSpec, head_dim: int) -> None:
    """Check that a rope fits heads of this size.

    Raises:
        InvalidCheckpoint: it does not; names the field.
    """
    rotated = rope.num_rotated(head_dim)
    if rotated % 2 or not rotated:
        raise config.error(f"partial_rotary_factor {rope.share:g} of heads of {head_dim} must leave an even number")
    if isinstance(rope.scaling, LongRopeScaling):
        for name, factors in {"short_factor": rope.scaling.short, "long_factor": rope.scaling.long}.items():
            if 2 * len(factors) != rotated:
                raise config.error(
                    f"{name} must have {rotated // 2} numbers, one for each frequency; got {len(factors)}"
                )
