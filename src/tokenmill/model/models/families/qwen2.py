"""Qwen2 and Qwen2.5: biases of q, k and v. Qwen2.5-VL is the same beside a vision tower."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from tokenmill.model.architecture.architecture import Architecture, LayerSpec
from tokenmill.model.models.attention_config import read_attention, with_windows
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.decoder_config import decoder, read_frame, read_norm
from tokenmill.model.models.family import Family
from tokenmill.model.models.gguf_table import GgufTable
from tokenmill.model.models.layer_kinds import layered_windows
from tokenmill.model.models.mlp_config import read_mlp


def read(config: ConfigReader) -> Architecture:
    """Read the decoder."""
    frame, norm, mlp = read_frame(config), read_norm(config), read_mlp(config)
    attention = dataclasses.replace(read_attention(config, frame.rope), qkv_bias=True)
    attentions = with_windows(attention, layered_windows(config, frame.num_layers))
    return decoder(config, [LayerSpec(one, mlp, norm) for one in attentions], frame.max_position)


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
    }
)
