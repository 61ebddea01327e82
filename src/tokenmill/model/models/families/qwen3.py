"""Qwen3: norms over each head of q and k; experts in Qwen3-MoE. Qwen3-VL is either beside a vision tower."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from tokenmill.model.architecture.architecture import Architecture, LayerSpec, SelfAttentionSpec
from tokenmill.model.architecture.mlp_spec import MoeSpec
from tokenmill.model.models.attention_config import read_attention, with_windows
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.decoder_config import Frame, decoder, read_frame, read_norm
from tokenmill.model.models.family import Family
from tokenmill.model.models.gguf_table import GgufTable
from tokenmill.model.models.layer_kinds import layered_windows, one_window, refuse_window
from tokenmill.model.models.mlp_config import read_mlp, read_sparse_mlps
from tokenmill.model.models.weight_names import LLAMA_NAMES, LLAMA_STACK, beside_a_tower, stack_beside_a_tower


def read(config: ConfigReader) -> Architecture:
    """Read the dense decoder."""
    frame, norm, mlp = read_frame(config), read_norm(config), read_mlp(config)
    attentions = with_windows(_attention(config, frame, 128), layered_windows(config, frame.num_layers))
    return decoder(config, [LayerSpec(one, mlp, norm) for one in attentions], frame.max_position)


def read_beside_a_tower(config: ConfigReader) -> Architecture:
    """Read the dense decoder of Qwen3-VL, all of whose layers attend to all tokens."""
    frame = read_frame(config)
    refuse_window(config, frame.num_layers, frame.max_position)
    layer = LayerSpec(_attention(config, frame, 128), read_mlp(config), read_norm(config))
    return decoder(config, [layer] * frame.num_layers, frame.max_position)


def read_with_experts_beside_a_tower(config: ConfigReader) -> Architecture:
    """Read the decoder of Qwen3-VL-MoE, whose experts' weights always sum to 1."""
    frame, norm = read_frame(config), read_norm(config)
    refuse_window(config, frame.num_layers, frame.max_position)
    attention = _attention(config, frame, None)

    def read_experts(config: ConfigReader, num_experts: int, experts_per_token: int) -> MoeSpec:
        return MoeSpec(num_experts, experts_per_token, config.integer("moe_intermediate_size", 1408), True)

    mlps = read_sparse_mlps(config, frame.num_layers, read_experts)
    return decoder(config, [LayerSpec(attention, mlp, norm) for mlp in mlps], frame.max_position)


def read_with_experts(config: ConfigReader) -> Architecture:
    """Read the decoder of Qwen3-MoE."""
    frame, norm = read_frame(config), read_norm(config)
    has_window = config.boolean("use_sliding_window", False)
    windows = one_window(config, frame.num_layers) if has_window else (None,) * frame.num_layers
    attentions = with_windows(_attention(config, frame, None), windows)
    mlps = read_sparse_mlps(config, frame.num_layers, _read_experts)
    layers = [LayerSpec(attention, mlp, norm) for attention, mlp in zip(attentions, mlps, strict=True)]
    return decoder(config, layers, frame.max_position)


def _attention(config: ConfigReader, frame: Frame, head_dim: int | None) -> SelfAttentionSpec:
    biases = config.boolean("attention_bias", False)
    attention = read_attention(config, frame.rope, head_dim=head_dim, biases=biases)
    return msgspec.structs.replace(attention, head_norm=read_norm(config))


def _read_experts(config: ConfigReader, num_experts: int, experts_per_token: int) -> MoeSpec:
    size = config.integer("moe_intermediate_size", 768)
    return MoeSpec(num_experts, experts_per_token, size, config.boolean("norm_topk_prob", False))


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Qwen3ForCausalLM": Family(read=read, gguf=GgufTable("qwen3")),
        "Qwen3MoeForCausalLM": Family(read=read_with_experts, gguf=GgufTable("qwen3moe")),
        "Qwen3VLForConditionalGeneration": Family(
            read=read_beside_a_tower,
            defaults={"rope_theta": 500000.0, "max_position_embeddings": 128000},
            has_text_config=True,
            weight_names=beside_a_tower(LLAMA_NAMES),
            other_weights=("model.visual.",),
            takes_images=True,
            gguf=GgufTable("qwen3vl", without_tower="Qwen3ForCausalLM"),
        ),
        "Qwen3VLMoeForConditionalGeneration": Family(
            read=read_with_experts_beside_a_tower,
            defaults={
                "rope_theta": 500000.0,
                "max_position_embeddings": 128000,
                "num_experts_per_tok": 4,
                "tie_word_embeddings": True,
            },
            has_text_config=True,
            weight_names=beside_a_tower(LLAMA_NAMES),
            expert_stack=stack_beside_a_tower(LLAMA_STACK),
            other_weights=("model.visual.",),
            takes_images=True,
            gguf=GgufTable("qwen3vlmoe", without_tower="Qwen3MoeForCausalLM"),
        ),
    }
)
