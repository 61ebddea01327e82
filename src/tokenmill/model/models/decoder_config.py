"""Read what stands around the layers of a config.json: depth, context, rope, norms, vocabulary. Knows no torch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenmill.model.architecture.architecture import Architecture, LayerSpec, PerLayerSpec
from tokenmill.model.architecture.norm_spec import NormSpec
from tokenmill.model.architecture.rope_spec import RopeSpec
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.rope_config import read_rope

# Several times what any model has; laying out one with millions would take minutes.
MOST_LAYERS = 1024
# What `dtype` may say; "auto" says nothing.
FLOAT_FORMATS = ("float32", "float16", "bfloat16", "auto")


class Frame(msgspec.Struct, frozen=True):
    """Depth, context and rope of a decoder; the rope of layers with a window may be another."""

    num_layers: int
    max_position: int
    rope: RopeSpec


def read_frame(config: ConfigReader, layer_type: str | None = None, *, may_rotate_partly: bool = False) -> Frame:
    """Read depth, context and rope.

    Args:
        layer_type: type of the layers that have the rope, where types may differ; None: all have the same.
        may_rotate_partly: the rope may turn a part of each head.

    Raises:
        InvalidCheckpoint: a value that is not supported; names the field.
    """
    num_layers, max_position = read_depth(config)
    rope, max_position = read_rope(config, max_position, layer_type, may_rotate_partly)
    return Frame(num_layers, max_position, rope)


def read_depth(config: ConfigReader) -> tuple[int, int]:
    """Read the number of layers and the context in tokens."""
    max_position = config.integer("max_position_embeddings", 32768)
    return config.integer("num_hidden_layers", high=MOST_LAYERS), max_position


def read_norm(config: ConfigReader, *, is_offset: bool = False) -> NormSpec:
    """Read the norm that all layers have. `is_offset`: its weight is an offset from 1."""
    return NormSpec(config.number("rms_norm_eps", 1e-6), is_offset)


def refuse(config: ConfigReader, *fields: str) -> None:
    """Refuse fields that ask for parts which are not supported, unless they are absent, null or false.

    Raises:
        InvalidCheckpoint: names the field.
    """
    for field in fields:
        if config.raw(field) not in (None, False):
            raise config.error(f"{field} {config.raw(field)!r} is not supported")


def decoder(
    config: ConfigReader,
    layers: Sequence[LayerSpec],
    max_position: int,
    *,
    embedding_multiplier: float = 1.0,
    rounds_multiplier: bool = False,
    logits_scaling: float = 1.0,
    logits_cap: float | None = None,
    per_layer: PerLayerSpec | None = None,
) -> Architecture:
    """Read the rest of a decoder, given its layers; its final norm is like theirs.

    Name and names of weights are left to `read_architecture`.

    Raises:
        InvalidCheckpoint: a value that is not supported; names the field.
    """
    vocab_size = config.integer("vocab_size")
    return Architecture(
        name="",
        weight_names={},
        layers=tuple(layers),
        hidden_size=config.integer("hidden_size"),
        vocab_size=vocab_size,
        norm=layers[0].norm,
        max_position=max_position,
        tie_embeddings=config.boolean("tie_embedding", config.boolean("tie_word_embeddings", False)),
        embedding_multiplier=embedding_multiplier,
        rounds_multiplier=rounds_multiplier,
        logits_scaling=logits_scaling,
        logits_cap=logits_cap,
        per_layer=per_layer,
        bos_token_id=next(iter(config.integers("bos_token_id")), None),
        eos_token_ids=_eos_token_ids(config, vocab_size),
        dtype=_dtype_name(config),
    )


def _eos_token_ids(config: ConfigReader, vocab_size: int) -> tuple[int, ...]:
    """Return the ids that end a text. A family's defaults may lie outside of a small vocabulary; stated ids may not."""
    for token_id in config.stated().integers("eos_token_id"):
        if not 0 <= token_id < vocab_size:
            raise config.error(
                f"eos_token_id {token_id} is not in the vocabulary of {vocab_size} tokens; "
                "put the id of the token that ends a text"
            )
    return tuple(token_id for token_id in config.integers("eos_token_id") if token_id < vocab_size)


def _dtype_name(config: ConfigReader) -> str | None:
    """Return the name of the float format, and refuse an unknown one."""
    field = "torch_dtype" if config.raw("dtype") is None else "dtype"
    name = config.raw(field)
    if name is None or name in FLOAT_FORMATS:
        return name
    raise config.error(f"{field} {name!r} is not supported; supported: {', '.join(FLOAT_FORMATS)}")
