"""SmolLM3: Llama's layers, every fourth of them without a rope, perhaps with a window there."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from tokenmill.model.architecture.architecture import Architecture, LayerSpec
from tokenmill.model.models.attention_config import read_attention, with_windows
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.decoder_config import decoder, read_frame, read_norm
from tokenmill.model.models.family import Family
from tokenmill.model.models.gguf_table import GgufTable, interleaved_heads
from tokenmill.model.models.layer_kinds import Windows, windows_by_type
from tokenmill.model.models.mlp_config import read_mlp


def read(config: ConfigReader) -> Architecture:
    """Read the decoder."""
    frame, norm = read_frame(config), read_norm(config)
    ropes = _rope_flags(config, frame.num_layers)
    attention = read_attention(config, frame.rope, biases=config.boolean("attention_bias", False))
    attentions = with_windows(attention, _windows(config, ropes))
    attentions = [
        one if has_rope else msgspec.structs.replace(one, rope=None)
        for one, has_rope in zip(attentions, ropes, strict=True)
    ]
    mlp = read_mlp(config, bias=config.boolean("mlp_bias", False))
    return decoder(config, [LayerSpec(one, mlp, norm) for one in attentions], frame.max_position)


def _rope_flags(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Read which layers have a rope: `no_rope_layers` has a 1 for each of them (sic); without it every fourth has
    none."""
    if config.raw("no_rope_layers") is None:
        interval = config.integer("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    flags = config.integers("no_rope_layers")
    if len(flags) < num_layers:
        raise config.error(f"no_rope_layers must have a flag for each of {num_layers} layers, got {len(flags)}")
    return tuple(flag != 0 for flag in flags[:num_layers])


def _windows(config: ConfigReader, ropes: tuple[bool, ...]) -> Windows:
    """Read the windows from `layer_types`, whatever `use_sliding_window` says; else layers without a rope have one."""
    has_window = config.raw("sliding_window") is not None
    window = config.integer("sliding_window") if has_window else None
    if config.raw("layer_types") is not None:
        return windows_by_type(config, len(ropes), window)
    if not config.boolean("use_sliding_window", False):
        return (None,) * len(ropes)
    return tuple(None if has_rope else window for has_rope in ropes)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "SmolLM3ForCausalLM": Family(
            read=read,
            defaults={
                "num_key_value_heads": 4,
                "rope_theta": 2000000.0,
                "tie_word_embeddings": True,
                "bos_token_id": 128000,
                "eos_token_id": 128001,
            },
            gguf=GgufTable("smollm3", change=interleaved_heads),
        )
    }
)
