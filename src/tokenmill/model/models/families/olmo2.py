"""OLMo-2: norms of what blocks add instead of what they take, and norms over all heads of q and of k together."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from tokenmill.model.architecture.architecture import Architecture, LayerSpec
from tokenmill.model.models.attention_config import read_attention
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.decoder_config import decoder, read_frame, read_norm
from tokenmill.model.models.family import Family
from tokenmill.model.models.gguf_table import GgufTable
from tokenmill.model.models.layer_kinds import refuse_window
from tokenmill.model.models.mlp_config import read_mlp
from tokenmill.model.models.weight_names import LLAMA_NAMES


def read(config: ConfigReader) -> Architecture:
    """Read the decoder."""
    frame, norm = read_frame(config), read_norm(config)
    refuse_window(config, frame.num_layers, frame.max_position)
    attention = read_attention(config, frame.rope, biases=config.boolean("attention_bias", False))
    attention = msgspec.structs.replace(attention, joint_norm=norm)
    layer = LayerSpec(attention, read_mlp(config), norm, has_in_norms=False, has_out_norms=True)
    return decoder(config, [layer] * frame.num_layers, frame.max_position)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Olmo2ForCausalLM": Family(
            read=read,
            defaults={
                "vocab_size": 50304,
                "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-5,
                "eos_token_id": 50279,
            },
            weight_names={
                **LLAMA_NAMES,
                "attention_out_norm": "model.layers.{layer}.post_attention_layernorm",
                "mlp_out_norm": "model.layers.{layer}.post_feedforward_layernorm",
            },
            gguf=GgufTable("olmo2"),
        )
    }
)
