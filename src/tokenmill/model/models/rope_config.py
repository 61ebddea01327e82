"""The rotary part of a config.json -> `RopeSpec`, in the spelling of transformers 4 and of transformers 5."""

from __future__ import annotations

import math

import msgspec

from tokenmill.model.architecture.rope_spec import LinearScaling, Llama3Scaling, LongRopeScaling, RopeSpec, YarnScaling
from tokenmill.model.models.config_reader import ConfigReader

DEFAULT_THETA = 10000.0
KINDS = ("default", "linear", "llama3", "yarn", "longrope")


def read_rope(
    config: ConfigReader, max_position: int, layer_type: str | None = None, may_be_partial: bool = False
) -> tuple[RopeSpec, int]:
    """Read the rotary embedding, and the context in tokens that it reaches (YaRN may extend `max_position`).

    Args:
        layer_type: type of the layers that have it, where types may differ; None: all have the same.
        may_be_partial: a part of each head may turn.

    Raises:
        InvalidCheckpoint: a kind that is not supported, or a missing value; names the field.
    """
    rope = rope_part(config, "rope_scaling" if config.raw("rope_scaling") else "rope_parameters", layer_type)
    share = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if share > 1.0 or (share < 1.0 and not may_be_partial):
        raise rope.error(f"partial_rotary_factor {share:g} is not supported")
    original = config.integer("original_max_position_embeddings", max_position)
    spec, max_position = _read(rope, max_position, config.number("rope_theta", DEFAULT_THETA), original)
    return msgspec.structs.replace(spec, share=share), max_position


def read_local_rope(config: ConfigReader, theta: float) -> RopeSpec:
    """Read the rotary embedding of layers with a window, where these have one of their own.

    Args:
        theta: the base of its frequencies where the config has none.

    Raises:
        InvalidCheckpoint: see `read_rope`.
    """
    theta = config.number("rope_local_base_freq", theta)
    if config.raw("rope_scaling"):
        return RopeSpec(theta)  # scaled are those of the other layers
    rope, _ = _read(rope_part(config, "rope_parameters", "sliding_attention"), 1, theta, 1)
    if not isinstance(rope.scaling, LinearScaling | None):
        raise config.error("rope_parameters: sliding_attention: this rope_type is not supported for it")
    return rope


def rope_part(config: ConfigReader, field: str, layer_type: str | None) -> ConfigReader:
    """Return the object that describes the rope of a type of layers."""
    raw, source = config.raw(field, {}), f"{config.source}: {field}"
    if not isinstance(raw, dict):
        raise config.error(f"{field} must be an object, got {raw!r}")
    if any(isinstance(value, dict) for value in raw.values()):
        if layer_type is None:
            raise config.error(f"{field} with a rope per layer type is not supported")
        raw, source = raw.get(layer_type) or {}, f"{source}: {layer_type}"
        if not isinstance(raw, dict):
            raise config.error(f"{field}: {layer_type} must be an object, got {raw!r}")
    return ConfigReader(raw, source)


def _read(rope: ConfigReader, max_position: int, theta: float, original: int) -> tuple[RopeSpec, int]:
    """Read one rope; see `read_rope`. `theta`, `original`: default base and default context of the pretraining."""
    theta = rope.number("rope_theta", theta)
    kind = rope.raw("rope_type", rope.raw("type", "default"))
    if kind in ("default", "mrope"):  # positions of several axes are not the tables' business
        return RopeSpec(theta), max_position
    if kind == "linear":
        return RopeSpec(theta, LinearScaling(rope.number("factor"))), max_position
    if kind == "llama3":
        return RopeSpec(theta, _read_llama3(rope, max_position)), max_position
    if kind == "yarn":
        yarn = _read_yarn(rope, max_position)
        # A config may keep the pretraining context and only add the scaling, as Qwen's model cards advise.
        return RopeSpec(theta, yarn), max(max_position, int(yarn.original_max_position * yarn.factor))
    if kind == "longrope":
        return RopeSpec(theta, _read_longrope(rope, max_position, original)), max_position
    raise rope.error(f"rope_type {kind!r} is not supported; supported: {', '.join(KINDS)}")


def _read_longrope(rope: ConfigReader, max_position: int, original: int) -> LongRopeScaling:
    original = rope.integer("original_max_position_embeddings", original)
    factor = rope.number("factor", max_position / original)
    found = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        short=rope.numbers("short_factor"),
        long=rope.numbers("long_factor"),
        original_max_position=original,
        attention_factor=rope.number("attention_factor", found),
        is_long=max_position > original,
    )


def _read_llama3(rope: ConfigReader, max_position: int) -> Llama3Scaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error(f"high_freq_factor ({high:g}) must be above low_freq_factor ({low:g})")
    return Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=rope.integer("original_max_position_embeddings", max_position),
    )


def _read_yarn(rope: ConfigReader, max_position: int) -> YarnScaling:
    original = rope.integer("original_max_position_embeddings", max_position)
    factor = rope.number("factor", max_position / original)
    return YarnScaling(
        factor=factor,
        original_max_position=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(rope, factor),
        truncate=rope.boolean("truncate", True),
    )


def _yarn_attention_factor(rope: ConfigReader, factor: float) -> float:
    """Return the factor on cos and sin: given, or from the paper's 0.1 ln(s) + 1, with DeepSeek's two multipliers."""
    if rope.raw("attention_factor") is not None:
        return rope.number("attention_factor")

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    over, under = rope.raw("mscale"), rope.raw("mscale_all_dim")
    if over and under:
        return mscale(rope.number("mscale")) / mscale(rope.number("mscale_all_dim"))
    return mscale(1.0)
