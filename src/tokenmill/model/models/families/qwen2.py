"""Qwen2 and Qwen2.5: biases of q, k and v. Qwen2.5-VL and Qwen2-Audio are the same beside a tower."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from tokenmill.model.architecture.architecture import Architecture, LayerSpec
from tokenmill.model.models.attention_config import read_attention, with_windows
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.decoder_config import decoder, read_frame, read_norm
from tokenmill.model.models.family import Family
from tokenmill.model.models.gguf_table import GgufTable
from tokenmill.model.models.layer_kinds import layered_windows
from tokenmill.model.models.mlp_config import read_mlp
from tokenmill.model.models.weight_names import LLAMA_NAMES


def read(config: ConfigReader) -> Architecture:
    """Read the decoder."""
    frame, norm, mlp = read_frame(config), read_norm(config), read_mlp(config)
    attention = msgspec.structs.replace(read_attention(config, frame.rope), qkv_bias=True)
    attentions = with_windows(attention, layered_windows(config, frame.num_layers))
    return decoder(config, [LayerSpec(one, mlp, norm) for one in attentions], frame.max_position)


# What Qwen2-Audio's file leaves out: the shape of Qwen-7B.
_AUDIO_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": 151936,
    }
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Qwen2ForCausalLM": Family(read=read, gguf=GgufTable("qwen2")),
        "Qwen2_5_VLForConditionalGeneration": Family(
            read=read,
            defaults={"rope_theta": 1000000.0, "rms_norm_eps": 1e-5},
            has_text_config=True,
            other_weights=("visual.",),
            takes_images=True,
            gguf=GgufTable("qwen2vl", without_tower="Qwen2ForCausalLM"),
        ),
        "Qwen2AudioForConditionalGeneration": Family(
            read=read,
            defaults=_AUDIO_DEFAULTS,
            has_text_config=True,
            weight_names={role: f"language_model.{name}" for role, name in LLAMA_NAMES.items()},
            other_weights=("audio_tower.", "multi_modal_projector."),
            takes_sound=True,
        ),
    }
)
