"""Arcee (AFM): Llama's layers, with a feed-forward block that has no gate."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tokenmill.model.architecture.architecture import Architecture, LayerSpec
from tokenmill.model.architecture.mlp_spec import MlpSpec
from tokenmill.model.models.attention_config import read_attention
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.decoder_config import decoder, read_frame, read_norm
from tokenmill.model.models.family import Family
from tokenmill.model.models.gguf_table import GgufHeader, GgufTable, interleaved_heads
from tokenmill.model.models.layer_kinds import refuse_window


def read(config: ConfigReader) -> Architecture:
    """Read the decoder."""
    frame = read_frame(config)
    refuse_window(config, frame.num_layers, frame.max_position)
    attention = read_attention(config, frame.rope, biases=config.boolean("attention_bias", False))
    activation = config.raw("hidden_act", "relu2")
    if activation != "relu2":
        raise config.error(f"hidden_act {activation!r} is not supported; supported: relu2")
    mlp = MlpSpec(config.integer("intermediate_size"), config.boolean("mlp_bias", False), activation, is_gated=False)
    layer = LayerSpec(attention, mlp, read_norm(config))
    return decoder(config, [layer] * frame.num_layers, frame.max_position)


def _gguf_fields(header: GgufHeader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the files of this family do not say."""
    return {"hidden_act": "relu2"}


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "ArceeForCausalLM": Family(
            read=read,
            defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 128001},
            gguf=GgufTable("arcee", fields=_gguf_fields, change=interleaved_heads),
        )
    }
)
