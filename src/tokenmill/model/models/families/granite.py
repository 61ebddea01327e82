"""Granite, dense: Llama's layers with four multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from tokenmill.model.architecture.architecture import Architecture, LayerSpec
from tokenmill.model.models.attention_config import read_attention
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.decoder_config import decoder, read_frame, read_norm
from tokenmill.model.models.family import Family
from tokenmill.model.models.gguf_table import GgufTable, interleaved_heads
from tokenmill.model.models.layer_kinds import refuse_window
from tokenmill.model.models.mlp_config import read_mlp


def read(config: ConfigReader) -> Architecture:
    """Read the decoder."""
    frame = read_frame(config)
    refuse_window(config, frame.num_layers, frame.max_position)
    attention = read_attention(config, frame.rope, biases=config.boolean("attention_bias", False))
    layer = LayerSpec(
        msgspec.structs.replace(attention, scale=config.number("attention_multiplier", 1.0)),
        read_mlp(config, bias=config.boolean("mlp_bias", False)),
        read_norm(config),
        residual_multiplier=config.number("residual_multiplier", 1.0),
    )
    return decoder(
        config,
        [layer] * frame.num_layers,
        frame.max_position,
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        logits_scaling=config.number("logits_scaling", 1.0),
    )


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "GraniteForCausalLM": Family(
            read=read,
            defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
            gguf=GgufTable("granite", change=interleaved_heads),
        )
    }
)
