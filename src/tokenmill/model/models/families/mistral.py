"""Mistral: one window for all layers. Its GGUF files say that they are Llama's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tokenmill.model.architecture.architecture import Architecture, LayerSpec
from tokenmill.model.models.attention_config import read_attention, with_windows
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.decoder_config import decoder, read_frame, read_norm
from tokenmill.model.models.family import Family
from tokenmill.model.models.layer_kinds import one_window
from tokenmill.model.models.mlp_config import read_mlp


def read(config: ConfigReader) -> Architecture:
    """Read the decoder."""
    frame, norm, mlp = read_frame(config), read_norm(config), read_mlp(config)
    attentions = with_windows(read_attention(config, frame.rope), one_window(config, frame.num_layers))
    return decoder(config, [LayerSpec(one, mlp, norm) for one in attentions], frame.max_position)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "MistralForCausalLM": Family(
            read=read, defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "eos_token_id": 2}
        )
    }
)
