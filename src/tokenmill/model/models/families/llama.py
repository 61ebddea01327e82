"""Llama, and the many that have its layers: all attend to all tokens, with biases where the config asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

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
    mlp = read_mlp(config, bias=config.boolean("mlp_bias", False))
    layer = LayerSpec(attention, mlp, read_norm(config))
    return decoder(config, [layer] * frame.num_layers, frame.max_position)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(
            read=read,
            defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
            gguf=GgufTable("llama", change=interleaved_heads),
        )
    }
)
